"""Comparisons of tiny runs: the same data and budget, resumed cell by cell, with paired intervals."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kontrast.errors import CheckpointError, DataError, NumbersError, UsageError
from kontrast.files import read_json_lines
from kontrast.lens.measures import conditional_entropy
from kontrast.probes import extract_features
from kontrast.probes.intervals import over_images, over_seeds, pack_bits, unpack_bits
from kontrast.reports import ReportError, report
from kontrast.reports.report import payload, read_run
from kontrast.runs.probe import probe as probe_run
from kontrast.runs.probe import read_probes
from kontrast.runs.run import Run
from kontrast.runs.snapshots import snapshots
from kontrast.studies.compare.compare import compare
from kontrast.studies.compare.comparison_plan import make_cell, parse_sweeps, plan
from kontrast.studies.compare.comparison_summary import difference, verdict
from kontrast.training.online_probe import IMAGES
from kontrast.training.resolve import t_minus_of

from support.tiny_run import images

TINY = ["training.epochs=1", "training.batch=32", "training.warmup=0.0", "training.lr=0.1", "encoder.width=16"]
TINY += ["views.size=32", "evaluation.every=1", "evaluation.k=5"]
CPU = torch.device("cpu")


def planned(names, data=None, grid=None, seeds=1, overrides=(), say=lambda _: None):
    return plan(names, data, out=Path("out"), seeds=seeds, grid=grid or {}, overrides=overrides, device=CPU, say=say)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """Two objectives, two seeds, on a folder of real images."""
    out, said = tmp_path_factory.mktemp("comparison"), []
    found = compare(["nt-xent", "dcl"], str(images()), out=out, seeds=2, overrides=TINY, device="cpu", say=said.append)
    return out, found, said


def test_milestones_are_rescaled_to_the_epochs_of_the_first_recipe():
    names = ["quickstart", "cifar10/cl", "cifar10/sim-affinity"]
    first, steps, warm = (cell.recipe.training for cell in planned(names, "digits"))
    assert first.epochs == steps.epochs == warm.epochs != 200
    assert steps.milestones == pytest.approx([m * first.epochs / 200 for m in (155, 170, 185)])
    assert warm.warmup == 10, "two of three seeds collapsed without warm-up"
    asked = ["training.warmup=0.5", "training.milestones=[1.5]", "training.schedule=steps"]
    for cell in planned(names, "digits", overrides=asked):
        assert (cell.recipe.training.warmup, cell.recipe.training.milestones) == (0.5, (1.5,)), (
            "overrides are not rescaled"
        )


def test_sweeps_become_a_grid_of_typed_values():
    assert parse_sweeps(["objective.temperature=0.05,0.1", "training.batch=32,64"]) == {
        "objective.temperature": [0.05, 0.1],
        "training.batch": [32, 64],
    }
    cells = planned(["nt-xent"], grid=parse_sweeps(["objective.temperature=0.05,0.1", "training.batch=32,64"]), seeds=2)
    assert len(cells) == 8 and len({cell.folder for cell in cells}) == 8
    assert cells[0].folder == Path("out/runs/nt-xent-temperature0.05-batch32-seed0")
    assert cells[-1].recipe.objective.arguments["temperature"] == 0.1 and cells[-1].recipe.training.batch == 64
    assert [cell.recipe.seed for cell in cells[:2]] == [0, 1]
    later = planned(["nt-xent"], seeds=2, overrides=["seed=5"])
    assert [(cell.seed, cell.name) for cell in later] == [(n, f"nt-xent-seed{n}") for n in (5, 6)]


@pytest.mark.parametrize("text", ["objective.temperature", "=1,2", "training.lr=", "seed=1,2", "training.epochs=3"])
def test_an_invalid_sweep_is_refused(text):
    with pytest.raises(UsageError, match=f"--sweep '{text}'"):
        parse_sweeps(["training.epochs=1,2", text])


def test_all_recipes_use_the_data_views_and_budget_of_the_first():
    said: list[str] = []
    first, cacr, bits = planned(["digits/simclr", "digits/cacr-k4", "digits/randbit"], say=said.append)
    assert bits.recipe.data == first.recipe.data and bits.recipe.data.random_bits == 0
    assert cacr.recipe.views.count == 5 and cacr.recipe.views.policy == first.recipe.views.policy
    assert cacr.recipe.training.epochs == first.recipe.training.epochs and cacr.recipe.training.batch == 128
    assert said == ["digits/randbit: data.random_bits 5 -> 0, as in digits/simclr"]


def test_a_budget_in_steps_shows_the_same_number_of_images():
    first, cacr = planned(["digits/simclr", "digits/cacr-k4"], overrides=["training.max_steps=30"])
    shown = [cell.recipe.training.max_steps * cell.recipe.training.batch for cell in (first, cacr)]
    assert shown == [30 * 256, 30 * 256]


def test_impossible_cells_are_refused_before_any_training():
    with pytest.raises(UsageError, match=r"'nt-xnet' is not a recipe.*'nt-xent'"):
        planned(["nt-xnet"])
    with pytest.raises(UsageError, match=r"temperature"):
        planned(["nt-xent"], grid={"objective.temperature": [0.1, -1.0]})
    with pytest.raises(UsageError, match="nt-xent-seed0"):
        planned(["nt-xent", "nt-xent"])


def test_cell_names_are_valid_folder_names():
    (cell,) = planned(["quickstart"])
    assert make_cell(Path("out"), "a/b.toml", {"views.policy": "x/../y"}, cell.recipe).name == "a-b-policyx-..-y-seed0"


def test_rows_have_means_and_paired_differences(comparison):
    out, found, _ = comparison
    first, second = found.rows
    assert first["differences"] == {} and second["against"] == "nt-xent"
    for probe in ("knn", "linear"):
        ours, theirs, gap = second["probes"][probe], first["probes"][probe], second["differences"][probe]
        assert gap["by_seed"] == pytest.approx([a - b for a, b in zip(ours["by_seed"], theirs["by_seed"])])
        assert gap["over_images"][0] <= gap["mean"] <= gap["over_images"][1]
        assert ours["over_images"][0] <= ours["mean"] <= ours["over_images"][1]
    assert first["seconds"] > 0 and first["peak_memory_bytes"] > 1e7 and first["finished"] == 2
    assert json.loads((out / "comparison.json").read_text())["rows"] == json.loads(json.dumps(found.rows))


def test_probes_of_each_run_are_saved_for_the_report(comparison):
    _, found, _ = comparison
    for run in found.runs:
        probes = json.loads((run / "probes.json").read_text())["probes"]
        assert [(p["probe"], p["features"]) for p in probes] == [("knn", "trained"), ("linear", "trained")]


def test_probing_a_compared_run_again_gives_the_same_numbers(comparison, tmp_path):
    """Probes use the run's seed, so that the trained encoder has one result beside its controls, not two."""
    out, _, _ = comparison
    run = Run(shutil.copytree(out / "runs" / "dcl-seed1", tmp_path / "run"))
    compared = read_probes(run.path / "probes.json")
    probe_run(run, device="cpu", say=lambda _: None)
    assert [p for p in read_probes(run.path / "probes.json") if p["features"] == "trained"] == compared


def test_a_finished_comparison_trains_nothing_again(comparison):
    out, found, _ = comparison
    before = {p: p.stat().st_mtime_ns for p in out.glob("runs/*/metrics.jsonl")}
    said: list[str] = []
    names = ["nt-xent", "dcl"]
    again = compare(names, str(images()), out=out, seeds=2, overrides=TINY, device="cpu", say=said.append)
    assert len(before) == 4 and before == {p: p.stat().st_mtime_ns for p in out.glob("runs/*/metrics.jsonl")}
    assert json.dumps(again.rows) == json.dumps(found.rows)
    assert sum("already finished" in line for line in said) == 4


def test_other_settings_in_the_same_folder_are_refused(comparison):
    out, _, _ = comparison
    with pytest.raises(UsageError, match=r"training.lr 0.1 -> 0.2.*another --out"):
        compare(["nt-xent"], str(images()), out=out, seeds=1, overrides=[*TINY, "training.lr=0.2"], say=lambda _: None)


@pytest.fixture
def half_done(comparison, tmp_path, monkeypatch):
    """The comparison without its last run; nothing can be trained in it."""
    out, _, _ = comparison
    shutil.copytree(out, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "runs" / "dcl-seed1")

    def refused(*_, **__):
        raise AssertionError("trained")

    monkeypatch.setattr("kontrast.studies.cells.pretrain", refused)

    def again(**more):
        names, said = ["nt-xent", "dcl"], []
        arguments = {"out": tmp_path / "out", "seeds": 2, "overrides": TINY, "device": "cpu", **more}
        return compare(names, str(images()), **arguments, say=said.append)

    return tmp_path / "out", again


@pytest.fixture
def changed_image():
    """An image with a newer modification time, as if it had been rewritten; restored afterwards."""
    path = sorted(images().rglob("*.png"))[0]
    before = path.stat()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
    yield path
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_runs_on_other_images_are_not_compared(half_done, changed_image):
    """Images that were replaced between two calls are refused before the missing run trains."""
    out, again = half_done
    with pytest.raises(DataError, match=r"images changed since .*nt-xent-seed0 .*--out"):
        again()
    with pytest.raises(DataError, match="images changed"):  # detected by cell.json alone
        (out / "runs" / "nt-xent-seed0" / "recipe.toml").unlink()
        again()


def test_cells_of_older_versions_have_no_fingerprints(half_done):
    out, again = half_done
    for path in out.glob("runs/*/cell.json"):
        record = json.loads(path.read_text())
        assert set(record.pop("images")) == {"train", "test", "trained"}
        path.write_text(json.dumps(record))
    with pytest.raises(AssertionError, match="trained"):  # nothing is refused: the missing run starts
        again()


@pytest.mark.parametrize("content", ["[]", "{}", '{"status": "done"}', "{"])
def test_a_damaged_record_is_refused(content, half_done):
    out, again = half_done
    (out / "runs" / "dcl-seed0" / "cell.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"cell\.json is damaged"):
        again()


def test_differences_are_taken_on_the_same_test_images():
    def cell(n, test, bits):
        probe = {"accuracy": 0.5, "n": n, "correct": bits}
        return {"seed": 0, "status": "finished", "images": {"test": test}, "probes": {"knn": probe}}

    first = cell(8, "x", "f0")
    assert difference([cell(8, "x", "fe")], [first], "knn")["mean"] == pytest.approx(3 / 8)
    assert difference([cell(8, "y", "fe")], [first], "knn") is None
    assert difference([cell(9, None, "fe00")], [first], "knn") is None


@pytest.mark.parametrize(
    ("right", "words"),
    [
        ([3, 2], "a has the highest linear probe accuracy, 0.750, followed by b with 0.500;"),
        ([3, 3, 2], "a and b have the same linear probe accuracy, 0.750;"),
        ([2, 3, 3, 3], "b, c and d have the same linear probe accuracy, 0.750;"),
    ],
)
def test_the_verdict_names_all_recipes_that_tie(right, words):
    groups = {name: [cell_with(right=count)] for name, count in zip("abcd", right)}
    rows = [
        {"configuration": name, "failed": [], "probes": {"linear": {"mean": count / 4}}}
        for name, count in zip("abcd", right)
    ]
    said = verdict(rows, groups)
    assert said.startswith(words) and said.endswith("not significant."), said


@pytest.mark.parametrize("seeds", [1, 2])
def test_seeds_that_agree_on_few_images_are_not_significant(seeds):
    """Two seeds that differ in the same image have an interval of zero width."""
    groups = {name: [cell_with(right, seed) for seed in range(seeds)] for name, right in (("a", 3), ("b", 2))}
    rows = [
        {"configuration": name, "failed": [], "probes": {"linear": {"mean": right / 4}}}
        for name, right in (("a", 3), ("b", 2))
    ]
    said = verdict(rows, groups)
    assert said.endswith("not significant.") and ("+0.250 to +0.250 over seeds but +0.000" in said) == (seeds == 2), (
        said
    )


def test_a_difference_of_accuracies_lies_between_minus_one_and_one():
    """Student's interval of two seeds that disagree would be wider."""
    ours, others = ([cell_with(right, seed) for seed, right in enumerate(pair)] for pair in ((4, 0), (0, 4)))
    assert difference(ours, others, "linear")["over_seeds"] == (-1.0, 1.0)


def cell_with(right: int, seed: int = 0) -> dict:
    """A finished cell whose probe classified this many of four test images correctly."""
    bits = pack_bits(torch.arange(4) < right)
    return {"status": "finished", "seed": seed, "probes": {"linear": {"n": 4, "correct": bits, "accuracy": right / 4}}}


def test_arguments_that_differ_between_objectives_are_reported():
    """Objectives have different default temperatures, which may explain a difference between them."""

    def temperatures(**more):
        said: list[str] = []
        cells = planned(["dcl", "nt-xent"], str(images()), **more, say=said.append)
        lines = [line for line in said if line.startswith("objective.")]
        return [cell.recipe.objective.arguments["temperature"] for cell in cells], lines

    values, (line,) = temperatures()
    assert values == [0.1, 0.2]
    assert "dcl 0.1, nt-xent 0.2" in line and "objective.temperature=" in line
    assert temperatures(overrides=["objective.temperature=0.3"]) == ([0.3, 0.3], [])
    assert temperatures(grid={"objective.temperature": [0.3]}) == ([0.3, 0.3], [])


def test_an_unfinished_cell_is_resumed_from_its_checkpoint(comparison, tmp_path):
    """A resumed run reaches the same numbers as an uninterrupted one."""
    out, found, _ = comparison
    from kontrast.training.pretrain import pretrain
    from kontrast.training.run_folder import RunFolder

    names = ["nt-xent"]
    (tmp_path / "runs").mkdir()
    cell = tmp_path / "runs" / "nt-xent-seed0"
    pretrain(recipe=str(out / "recipes" / "nt-xent-seed0.toml"), out=cell, say=lambda _: None)
    (cell / "encoder.safetensors").unlink()
    RunFolder(cell).update_info(finished=None)
    said: list[str] = []
    again = compare(names, str(images()), out=tmp_path, seeds=1, overrides=TINY, device="cpu", say=said.append)
    assert any("resuming" in line for line in said)
    knn_before = found.rows[0]["probes"]["knn"]["by_seed"][0]
    assert again.rows[0]["probes"]["knn"]["by_seed"] == [knn_before]


def test_a_cell_with_nan_is_recorded_as_failed_and_the_others_continue(tmp_path):
    arguments = {"out": tmp_path, "seeds": 1, "sweeps": ["training.lr=1e30,0.1"], "overrides": TINY, "device": "cpu"}
    found = compare(["nt-xent"], str(images()), **arguments, say=lambda _: None)
    broken, fine = found.rows
    assert broken["finished"] == 0 and "not finite" in broken["failed"][0]["reason"]
    assert fine["finished"] == 1 and fine["probes"] and fine["differences"]["knn"] is None
    assert "1 run failed" in found.verdict
    said: list[str] = []
    compare(["nt-xent"], str(images()), **arguments, say=said.append)
    assert any("already failed" in line for line in said)


def test_a_comparison_fails_if_all_cells_fail(tmp_path):
    with pytest.raises(NumbersError, match="not finite"):
        compare(["nt-xent"], str(images()), out=tmp_path, seeds=1, overrides=[*TINY, "training.lr=1e30"], device="cpu",
                say=lambda _: None)  # fmt: skip


def test_records_and_probes_have_the_same_accuracy(comparison):
    for cell in comparison[1].cells:
        for found in cell["probes"].values():
            assert float(unpack_bits(found["correct"], found["n"]).double().mean()) == found["accuracy"]


def test_intervals_are_students_and_the_bootstraps():
    assert over_seeds([0.5]) is None
    low, high = over_seeds([0.1, 0.2, 0.3])
    assert (high - low) / 2 == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-5)
    scores = torch.cat([torch.ones(300), torch.zeros(100)])
    low, high = over_images(scores)
    assert low == pytest.approx(0.75 - 1.96 * math.sqrt(0.75 * 0.25 / 400), abs=0.006)
    assert high == pytest.approx(0.75 + 1.96 * math.sqrt(0.75 * 0.25 / 400), abs=0.006)


def test_packed_bits_can_be_unpacked():
    correct = torch.rand(77, generator=torch.Generator().manual_seed(1)) > 0.5
    assert torch.equal(unpack_bits(pack_bits(correct), 77), correct)


def test_peak_memory_includes_a_large_tensor():
    """It runs in its own process, because some systems can't reset the peak, which earlier tests may have raised."""
    work = """
import torch
from kontrast.training.peak_memory import PeakMemory
with PeakMemory(torch.device("cpu")) as small:
    pass
with PeakMemory(torch.device("cpu")) as large:
    torch.ones(30_000_000).sum()
print(0 if small.bytes is None else large.bytes - small.bytes)
"""
    done = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True, check=True)
    if done.stdout.strip() == "0":
        pytest.skip("this system does not report peak memory")
    assert int(done.stdout) > 5e7


def test_the_online_entropy_is_that_of_projections(comparison):
    """The last line of metrics.jsonl has the entropy of the finished student's projections of the test images."""
    _, found, _ = comparison
    run = Run(found.runs[0])
    saved = snapshots(run, 1, CPU, lambda _: None)[0][-1].student
    images = (run.data("test") if run.data("train").has_test else run.data("train")).first(IMAGES)
    value, maximum = conditional_entropy(extract_features(saved, images, run.transform(), device="cpu"))
    last = [line for line in read_json_lines(run.path / "metrics.jsonl") if "conditional_entropy" in line][-1]
    assert last["conditional_entropy"] == pytest.approx(value, rel=1e-4)
    assert last["conditional_entropy_max"] == pytest.approx(maximum)
    z, own = extract_features(saved, images, run.transform(), device="cpu"), t_minus_of(run.recipe)
    assert own is not None and abs(own - 2) > 0.1
    assert last["conditional_entropy_own"] == pytest.approx(conditional_entropy(z, own)[0], rel=1e-4)
    encoder = conditional_entropy(extract_features(saved.encoder, images, run.transform(), device="cpu"))[0]
    assert abs(encoder - value) > 1e-4


def test_entropy_curves_share_one_plot_with_the_maximum(comparison):
    _, found, _ = comparison
    lines = read_json_lines(found.runs[0] / "metrics.jsonl")
    assert 0 < lines[-1]["conditional_entropy"] <= lines[-1]["conditional_entropy_max"] + 1e-6
    plots = {plot["id"]: plot for plot in payload([read_run(run) for run in found.runs])["curves"]}
    assert len(plots["conditional_entropy"]["series"]) == 4 and "conditional_entropy_max" not in plots
    assert plots["conditional_entropy"]["references"][0]["y"] == pytest.approx(
        lines[-1]["conditional_entropy_max"], rel=1e-4
    )


@pytest.mark.parametrize("content", ["", "[]", "{}", "{"])
def test_a_report_refuses_a_file_that_is_not_a_study(content, tmp_path):
    (tmp_path / "comparison.json").write_text(content)
    with pytest.raises(ReportError, match=r"comparison.json"):
        report([], tmp_path / "page.html", tmp_path / "comparison.json")
