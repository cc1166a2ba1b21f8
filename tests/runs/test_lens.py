"""The lens on a real run and on files: every question gets a number and a plot that the page can draw."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from kontrast.errors import CheckpointError, DataError, UsageError
from kontrast.lens import positive_statistics
from kontrast.objectives import metrics
from kontrast.runs.lens import LensResult, apply_to_views, augment, denormalize, lens, lens_images, project_views
from kontrast.runs.run import Run
from kontrast.runs.snapshots import snapshots, spread_evenly
from kontrast.views import Views

from support import tiny_run
from support.plots import is_plot

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run():
    return Run(tiny_run.trained())


@pytest.fixture(scope="module")
def views(run):
    return Views(run.recipe.views.policy, count=4, size=run.recipe.views.size)


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> LensResult:
    copied = Run(tiny_run.copy(tmp_path_factory.mktemp("lens")))
    return lens(copied, images=40, augmentations=4, device="cpu", say=lambda _: None)


def test_lens_json_answers_every_question(result):
    tree = result.tree
    assert json.loads(result.path.read_text()) == tree and tree["version"] == 1
    ids = {p["id"].rstrip("0123456789-") for p in tree["plots"]}
    assert ids == {
        "entropy", "multiplier", "projections", "spectrum", "variance", "positive-cosine", "positive-variance",
        "positive-weights", "negative-weights", "neighborhood",
    }  # fmt: skip
    for plot in tree["plots"]:
        assert is_plot(plot) and plot["note"] and plot["name"], plot["id"]
    found = result.numbers
    assert {"alignment", "uniformity", "conditional entropy", "coupling multiplier", "effective rank"} <= set(found)
    assert all(math.isfinite(v) for v in found.values())
    assert 0 <= found["coupling multiplier"] <= 1 and 1 <= found["effective rank"] <= 32


def test_the_entropy_curve_has_all_saved_checkpoints(result):
    tree = result.tree
    curve = next(p for p in tree["plots"] if p["id"] == "entropy")
    assert curve["series"][0]["x"] == [0, 1, 2] and curve["x"]["label"] == "epoch"
    assert curve["references"] == [{"y": pytest.approx(math.log(39)), "label": "maximum"}]
    assert curve["series"][0]["y"][-1] == result.numbers["conditional entropy"]
    assert max(curve["series"][0]["y"]) <= math.log(39) + 1e-4


def test_numbers_are_those_of_the_projections(result, run, views):
    shown = lens_images(run, 40)
    z = project_views(run, snapshots(run, 9, CPU)[0][-1].student, shown, views, CPU, 2)
    found = result.numbers
    assert found["alignment"] == pytest.approx(metrics.alignment(z).item(), rel=1e-4)
    assert found["uniformity"] == pytest.approx(metrics.uniformity(z).item(), rel=1e-4)


def test_cosine_and_variance_of_real_views_agree(result, run, views):
    """JCL figure 3 on real features: mean cosine of all n x n pairs = 1 - D x mean diagonal of the covariance."""
    with torch.inference_mode():
        features = apply_to_views(run.encoder(), augment(run, lens_images(run, 40), views, CPU))
    found = positive_statistics(features)
    assert found.cosine.min() < 0.999  # the views do differ
    torch.testing.assert_close(found.cosine, 1 - features.shape[-1] * found.variance)
    numbers = result.numbers
    assert numbers["positive cosine"] == pytest.approx(found.cosine.mean().item(), rel=1e-4)
    assert numbers["positive cosine"] == pytest.approx(1 - numbers["positive variance x width"], abs=1e-5)


def test_weights_come_with_their_images(result):
    queries = result.tree["weights"]
    assert len(queries) == 3
    for one in queries:
        assert sum(p["weight"] for p in one["positives"]) == pytest.approx(1)
        assert len(one["positives"]) == 3 and len(one["hardest"]) == len(one["easiest"]) == 4
        assert one["hardest"][0]["weight"] >= one["hardest"][-1]["weight"] >= one["easiest"][-1]["weight"]
        for entry in [one["query"], *one["hardest"], *one["easiest"]]:
            assert entry["image"].startswith("data:image/png;base64,") and entry["name"].endswith(".png")


def test_maps_have_the_query_in_the_middle_at_each_snapshot(result):
    maps = [p for p in result.tree["plots"] if p["id"].startswith("neighborhood")]
    assert [p["title"].split(":")[0] for p in maps] == ["Before training", "At epoch 1", "At epoch 2"]
    for drawn in maps:
        middle = drawn["series"][0]
        assert middle["name"] == "the query" and (middle["x"][0], middle["y"][0]) == (0, 0)
        assert len(drawn["series"][1]["x"]) == 2 * 3


def test_the_augmentations_of_an_image_do_not_depend_on_the_others(run, views):
    shown = lens_images(run, 12)
    together = augment(run, shown, views, CPU)
    alone = augment(run, shown.subset([7]), views, CPU)
    torch.testing.assert_close(together[:, 7:8], alone)


def test_a_view_becomes_a_picture_again(run):
    shown = lens_images(run, 3)
    view = run.transform()(shown.images[:3], torch.arange(3))[0]
    assert torch.equal(denormalize(view, run.composite), shown.images[:3])


def test_snapshots_restore_the_run(run):
    history, unit = snapshots(run, 9, CPU)
    assert unit == "epoch" and [s.time for s in history] == [0, 1, 2]
    for name, tensor in run.encoder().state_dict().items():
        assert torch.equal(tensor, history[-1].student.encoder.state_dict()[name])
    for name, tensor in run.encoder(trained=False).state_dict().items():
        assert torch.equal(tensor, history[0].student.encoder.state_dict()[name])
    assert [s.time for s in snapshots(run, 2, CPU)[0]] == [0, 2]
    assert spread_evenly(list(range(10)), 3) == [2, 6, 9]


def test_damaged_checkpoints_are_skipped_and_without_any_the_encoder_is_measured_alone(tmp_path):
    run = Run(tiny_run.copy(tmp_path))
    first, last = sorted((run.path / "checkpoints").glob("step-*"))
    (first / "state.safetensors").write_bytes(b"torn")
    said = []
    assert [s.time for s in snapshots(run, 9, CPU, said.append)[0]] == [0, 2] and "damaged" in said[0]
    (last / "manifest.json").unlink()
    tree = lens(run, images=10, augmentations=2, device="cpu", say=said.append).tree
    assert "no readable checkpoint" in said[-1]
    assert "entropy" not in {p["id"] for p in tree["plots"]}
    (run.path / "encoder.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"not finished.*resume"):
        lens(run, images=10, device="cpu", say=said.append)


def test_an_unfinished_run_is_measured_with_a_warning(tmp_path):
    run = Run(tiny_run.copy(tmp_path))
    (run.path / "encoder.safetensors").unlink()
    del run.info["finished"]
    said = []
    assert lens(run, images=10, augmentations=2, device="cpu", say=said.append).numbers
    assert any("not finished" in line and "epoch 2" in line for line in said)


def test_too_few_images_or_augmentations(run):
    for arguments in ({"images": 2}, {"augmentations": 1}):
        with pytest.raises(UsageError, match="at least 3 images, 2 augmentations"):
            lens(run, **arguments)


def test_a_file_of_vectors_needs_no_run(tmp_path):
    path = tmp_path / "v.npy"
    vectors = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)
    np.save(path, vectors)
    (tmp_path / "labels.csv").write_text("".join(f"row {i},{'ab'[i % 2]}\n" for i in range(50)))
    plain, labeled = lens(path), lens(path, labels=tmp_path / "labels.csv")
    assert plain.path == tmp_path / "v.npy.lens" / "lens.json" and all(is_plot(p) for p in plain.tree["plots"])
    assert plain.numbers["uniformity"] == pytest.approx(metrics.uniformity(torch.from_numpy(vectors)).item(), rel=1e-4)
    assert set(labeled.numbers) - set(plain.numbers) == {"cosine within a class", "cosine between classes"}
    np.save(path, vectors[:2])
    with pytest.raises(DataError, match=r"2 of 2 rows.*at least 3"):
        lens(path)


@pytest.mark.parametrize("images", [-4, 0, 2])
def test_too_few_rows_of_a_file_are_an_error(tmp_path, images):
    np.save(tmp_path / "v.npy", np.eye(8, dtype=np.float32))
    with pytest.raises(UsageError, match=rf"--images {images}, .* at least 3"):
        lens(tmp_path / "v.npy", images=images)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [8e37, 1e-30, 1e-40])
def test_the_scale_of_a_file_does_not_matter(tmp_path, scale):
    """Squares and sums of such values are infinite or zero in float32; their directions are fine."""
    vectors = np.random.default_rng(0).uniform(-4, 4, (50, 8))
    for name, array in (("plain", vectors), ("scaled", vectors * scale)):
        np.save(tmp_path / f"{name}.npy", array.astype(np.float32))
    plain, scaled = (lens(tmp_path / f"{name}.npy").numbers for name in ("plain", "scaled"))
    assert scaled == pytest.approx(plain, rel=1e-3, abs=1e-4)


def test_rows_of_length_zero_are_skipped_and_counted(tmp_path):
    vectors = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)
    path, others = tmp_path / "v.npy", tmp_path / "others.npy"
    labels = tmp_path / "labels.csv"
    labels.write_text("".join(f"row {i},{'ab'[i % 2]}\n" for i in range(50)))
    np.save(others, np.delete(vectors, [7, 30], axis=0))
    vectors[[7, 30]] = 0
    np.save(path, vectors)
    result = lens(path, labels=labels)
    numbers, wanted = result.numbers, lens(others).numbers
    assert numbers.pop("rows of length zero") == 2
    assert "first row 7 (row 7)" in next(
        n["note"] for n in result.tree["numbers"] if n["name"] == "rows of length zero"
    )
    assert {name: numbers[name] for name in wanted} == pytest.approx(wanted)
    assert "cosine within a class" in numbers
    vectors[2:] = 0
    np.save(path, vectors)
    with pytest.raises(DataError, match=r"2 of 50 rows.*row 2 \(row 2\).*at least 3"):
        lens(path)


def test_the_table_breaks_between_words(tmp_path):
    note = "of 512 dimensions of the features; near 1: collapsed"
    result = LensResult(tmp_path / "lens.json", {"numbers": [{"name": "effective rank", "value": 12.5, "note": note}]})
    *lines, last = result.lines(60)
    assert len(lines) == 2 and all(len(line) <= 60 for line in lines) and lines[1].startswith(" " * 27)
    assert " ".join(" ".join(lines).split()) == f"effective rank 12.5 {note}" and last.endswith("lens.json")
    assert len(str(result).splitlines()) == 2
