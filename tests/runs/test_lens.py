"""The lens on a real run: every study gives a number and a plot that the page can draw."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from kontrast.errors import CheckpointError, DataError, UsageError
from kontrast.lens import positive_statistics
from kontrast.objectives import metrics
from kontrast.reports.curves import is_plot
from kontrast.runs.embed import open_run
from kontrast.runs.lens import augmented, look, look_at_file, picture, pictures, projected, through
from kontrast.runs.snapshots import evenly, snapshots
from kontrast.views import Views

from support import tiny_run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run():
    return open_run(tiny_run.trained())


@pytest.fixture(scope="module")
def views(run):
    return Views(run.recipe.views.policy, count=4, size=run.recipe.views.size)


@pytest.fixture(scope="module")
def looked(tmp_path_factory):
    copied = open_run(tiny_run.copy(tmp_path_factory.mktemp("looked")))
    return copied, look(copied, images=40, augmentations=4, device="cpu", say=lambda _: None)


def values(tree):
    return {n["name"]: n["value"] for n in tree["numbers"]}


def test_lens_json_holds_every_study(looked):
    run, tree = looked
    assert json.loads((run.path / "lens.json").read_text()) == tree and tree["version"] == 1
    ids = {p["id"].rstrip("0123456789-") for p in tree["plots"]}
    assert ids == {
        "entropy", "multiplier", "projections", "spectrum", "variance", "positive-cosine", "positive-variance",
        "positive-weights", "negative-weights", "neighborhood",
    }  # fmt: skip
    for plot in tree["plots"]:
        assert is_plot(plot) and plot["note"] and plot["name"], plot["id"]
    found = values(tree)
    assert {"alignment", "uniformity", "conditional entropy", "coupling multiplier", "effective rank"} <= set(found)
    assert all(math.isfinite(v) for v in found.values())
    assert 0 <= found["coupling multiplier"] <= 1 and 1 <= found["effective rank"] <= 32


def test_entropy_curve_goes_through_all_kept_checkpoints(looked):
    tree = looked[1]
    curve = next(p for p in tree["plots"] if p["id"] == "entropy")
    assert curve["series"][0]["x"] == [0, 1, 2] and curve["x"]["label"] == "epoch"
    assert curve["references"] == [{"y": pytest.approx(math.log(39)), "label": "maximum"}]
    assert curve["series"][0]["y"][-1] == values(tree)["conditional entropy"]
    assert max(curve["series"][0]["y"]) <= math.log(39) + 1e-4


def test_numbers_are_those_of_the_projections(looked, run, views):
    shown = pictures(run, 40)
    z = projected(run, snapshots(run, 9, CPU)[0][-1].student, shown, views, CPU, 2)
    found = values(looked[1])
    assert found["alignment"] == pytest.approx(metrics.alignment(z).item(), rel=1e-4)
    assert found["uniformity"] == pytest.approx(metrics.uniformity(z).item(), rel=1e-4)


def test_cosine_and_variance_of_real_views_say_the_same(looked, run, views):
    """JCL figure 3 on real features: mean cosine of all n x n pairs = 1 - D x mean diagonal of the covariance."""
    with torch.inference_mode():
        features = through(run.encoder(), augmented(run, pictures(run, 40), views, CPU))
    found = positive_statistics(features)
    assert found.cosine.min() < 0.999  # the views do differ
    torch.testing.assert_close(found.cosine, 1 - features.shape[-1] * found.variance)
    told = values(looked[1])
    assert told["positive cosine"] == pytest.approx(found.cosine.mean().item(), rel=1e-4)
    assert told["positive cosine"] == pytest.approx(1 - told["positive variance x width"], abs=1e-5)


def test_weights_come_with_their_images(looked):
    told = looked[1]["weights"]
    assert len(told) == 3
    for one in told:
        assert sum(p["weight"] for p in one["positives"]) == pytest.approx(1)
        assert len(one["positives"]) == 3 and len(one["hardest"]) == len(one["easiest"]) == 4
        assert one["hardest"][0]["weight"] >= one["hardest"][-1]["weight"] >= one["easiest"][-1]["weight"]
        for entry in [one["query"], *one["hardest"], *one["easiest"]]:
            assert entry["image"].startswith("data:image/png;base64,") and entry["name"].endswith(".png")


def test_maps_have_the_query_in_the_middle_at_each_moment(looked):
    maps = [p for p in looked[1]["plots"] if p["id"].startswith("neighborhood")]
    assert [p["title"].split(":")[0] for p in maps] == ["Before training", "At epoch 1", "At epoch 2"]
    for drawn in maps:
        middle = drawn["series"][0]
        assert middle["name"] == "the query" and (middle["x"][0], middle["y"][0]) == (0, 0)
        assert len(drawn["series"][1]["x"]) == 2 * 3


def test_an_image_has_the_same_augmentations_whatever_is_beside_it(run, views):
    shown = pictures(run, 12)
    together = augmented(run, shown, views, CPU)
    alone = augmented(run, shown.subset([7]), views, CPU)
    torch.testing.assert_close(together[:, 7:8], alone)


def test_a_view_becomes_a_picture_again(run):
    shown = pictures(run, 3)
    view = run.transform()(shown.images[:3], torch.arange(3))[0]
    assert torch.equal(picture(view, run.transform()), shown.images[:3])


def test_moments_restore_the_run(run):
    steps, word = snapshots(run, 9, CPU)
    assert word == "epoch" and [m.at for m in steps] == [0, 1, 2]
    for name, tensor in run.encoder().state_dict().items():
        assert torch.equal(tensor, steps[-1].student.encoder.state_dict()[name])
    for name, tensor in run.encoder(trained=False).state_dict().items():
        assert torch.equal(tensor, steps[0].student.encoder.state_dict()[name])
    assert [m.at for m in snapshots(run, 2, CPU)[0]] == [0, 2]
    assert evenly(list(range(10)), 3) == [2, 6, 9]


def test_a_damaged_checkpoint_is_left_out_and_without_any_the_encoder_stands_alone(tmp_path):
    run = open_run(tiny_run.copy(tmp_path))
    first, last = sorted((run.path / "checkpoints").glob("step-*"))
    (first / "state.safetensors").write_bytes(b"torn")
    said = []
    assert [m.at for m in snapshots(run, 9, CPU, said.append)[0]] == [0, 2] and "damaged" in said[0]
    (last / "manifest.json").unlink()
    tree = look(run, images=10, augmentations=2, device="cpu", say=said.append)
    assert "no readable checkpoint" in said[-1]
    assert "entropy" not in {p["id"] for p in tree["plots"]}
    (run.path / "encoder.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has not finished; resume it first"):
        look(run, images=10, device="cpu", say=said.append)


def test_an_unfinished_run_is_looked_at_and_said_to_be(tmp_path):
    run = open_run(tiny_run.copy(tmp_path))
    (run.path / "encoder.safetensors").unlink()
    del run.info["finished"]
    said = []
    assert values(look(run, images=10, augmentations=2, device="cpu", say=said.append))
    assert any("has not finished: this is its newest checkpoint, epoch 2" in line for line in said)


def test_too_few_images_or_augmentations(run):
    for arguments in ({"images": 2}, {"augmentations": 1}):
        with pytest.raises(UsageError, match="at least 3 images and 2 augmentations"):
            look(run, **arguments)


def test_a_file_of_vectors_is_looked_at_without_a_run(tmp_path):
    path = tmp_path / "v.npy"
    vectors = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)
    np.save(path, vectors)
    (tmp_path / "labels.csv").write_text("".join(f"row {i},{'ab'[i % 2]}\n" for i in range(50)))
    plain, labelled = look_at_file(path), look_at_file(path, tmp_path / "labels.csv")
    assert all(is_plot(p) for p in plain["plots"])
    assert values(plain)["uniformity"] == pytest.approx(metrics.uniformity(torch.from_numpy(vectors)).item(), rel=1e-4)
    assert set(values(labelled)) - set(values(plain)) == {"cosine within a class", "cosine between classes"}
    np.save(path, vectors[:2])
    with pytest.raises(DataError, match="at least 3"):
        look_at_file(path)


@pytest.mark.parametrize("images", [-4, 0, 2])
def test_too_few_rows_of_a_file_are_refused(tmp_path, images):
    np.save(tmp_path / "v.npy", np.eye(8, dtype=np.float32))
    with pytest.raises(UsageError, match=rf"--images {images}: .* at least 3"):
        look_at_file(tmp_path / "v.npy", images=images)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [8e37, 1e-30, 1e-40])
def test_directions_of_a_file_do_not_ask_for_the_scale(tmp_path, scale):
    """Squares and sums of such values are infinite or zero in float32; their directions are as good as any."""
    vectors = np.random.default_rng(0).uniform(-4, 4, (50, 8))
    for name, array in (("plain", vectors), ("scaled", vectors * scale)):
        np.save(tmp_path / f"{name}.npy", array.astype(np.float32))
    plain, scaled = (values(look_at_file(tmp_path / f"{name}.npy")) for name in ("plain", "scaled"))
    assert scaled == pytest.approx(plain, rel=1e-3, abs=1e-4)


def test_rows_of_length_zero_are_left_out_and_said(tmp_path):
    vectors = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)
    path, others = tmp_path / "v.npy", tmp_path / "others.npy"
    labels = tmp_path / "labels.csv"
    labels.write_text("".join(f"row {i},{'ab'[i % 2]}\n" for i in range(50)))
    np.save(others, np.delete(vectors, [7, 30], axis=0))
    vectors[[7, 30]] = 0
    np.save(path, vectors)
    tree = look_at_file(path, labels)
    told, wanted = values(tree), values(look_at_file(others))
    assert told.pop("rows of length zero") == 2
    assert "first row 7 (row 7)" in next(n["note"] for n in tree["numbers"] if n["name"] == "rows of length zero")
    assert {name: told[name] for name in wanted} == pytest.approx(wanted)
    assert "cosine within a class" in told
    vectors[2:] = 0
    np.save(path, vectors)
    with pytest.raises(DataError, match=r"2 of 50 rows are not all zeros.*row 2 \(row 2\) first; give at least 3"):
        look_at_file(path)
