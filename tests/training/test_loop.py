"""The loop: how long it trains, what it logs, when it evaluates and saves, and arguments that grow during training."""

from __future__ import annotations

import contextlib
import math
import signal
from pathlib import Path

import pytest
import torch

from kontrast.config.recipe import Recipe, read_recipe
from kontrast.data import ImageSet
from kontrast.errors import Stopped, UsageError
from kontrast.files import read_json_lines
from kontrast.objectives.scheduled_number import on_device
from kontrast.training.build import algorithms
from kontrast.training.checkpoints import checkpoints
from kontrast.training.loop import Loop
from kontrast.training.run_folder import RunFolder
from kontrast.training.signals import StopSignals

TREE = {
    "encoder": {"name": "small-conv", "width": 8},
    "head": {"name": "simclr", "outputs": 8},
    "views": {"count": 2, "size": 16, "policy": "digits"},
}


def recipe(**sections) -> Recipe:
    training = {"batch": 8, "epochs": 3, "lr": 0.1, "log_every": 4, **sections.pop("training", {})}
    return read_recipe({**TREE, **sections, "training": training})


def pictures(count: int = 40) -> ImageSet:
    pixels = torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return ImageSet(pixels, names=[str(n) for n in range(count)])


def loop(path: Path, chosen: Recipe, say=lambda _: None) -> Loop:
    folder = RunFolder(path / "run")
    folder.create()
    return Loop(chosen, folder, pictures(), torch.device("cpu"), say)


def lines(path: Path) -> tuple[list[dict], list[dict]]:
    found = read_json_lines(path / "run" / "metrics.jsonl")
    return [r for r in found if "loss" in r], [r for r in found if "loss" not in r]


@pytest.mark.parametrize(("training", "total"), [({}, 15), ({"max_steps": 7}, 7), ({"max_steps": 90}, 15)])
def test_epochs_and_max_steps(tmp_path, training, total):
    """Training ends after the epochs or after max_steps, whichever comes first."""
    made = loop(tmp_path, recipe(training=training))
    made.run(None, StopSignals(), "")
    assert made.position.step == total == made.position.total
    assert lines(tmp_path)[0][-1]["step"] == total


def test_the_schedule_spans_the_steps_that_are_taken(tmp_path):
    training = {"max_steps": 7, "log_every": 1, "schedule": "cosine"}
    loop(tmp_path, recipe(training=training)).run(None, StopSignals(), "")
    expected = [0.1 * (1 + math.cos(math.pi * step / 7)) / 2 for step in range(7)]
    assert [r["lr"] for r in lines(tmp_path)[0]] == pytest.approx(expected)


def test_the_last_window_of_terms_is_logged(tmp_path):
    """Steps 5 to 7 are fewer than the four of a window; their mean is logged too."""
    loop(tmp_path / "a", recipe(training={"max_steps": 7})).run(None, StopSignals(), "")
    loop(tmp_path / "b", recipe(training={"max_steps": 7, "log_every": 1})).run(None, StopSignals(), "")
    coarse, fine = lines(tmp_path / "a")[0], lines(tmp_path / "b")[0]
    assert [r["step"] for r in coarse] == [4, 7]
    for record, steps in zip(coarse, (fine[:4], fine[4:])):
        for name in ("loss", "attraction", "repulsion"):
            assert record[name] == pytest.approx(sum(r[name] for r in steps) / len(steps), rel=1e-5)


def test_every_line_has_its_step_epoch_terms_and_rate(tmp_path):
    loop(tmp_path, recipe()).run(None, StopSignals(), "")
    for record in lines(tmp_path)[0]:
        assert record["epoch"] == pytest.approx(record["step"] / 5)
        assert record["loss"] == pytest.approx(record["attraction"] + record["repulsion"], abs=1e-5)
        assert record["lr"] > 0


@pytest.mark.parametrize(
    ("every", "steps", "measured"),
    [(1, 0, [5, 10, 15]), (2, 0, [10, 15]), (1, 7, [5, 7]), (0, 7, [7]), (2, 13, [10, 13])],
)
def test_it_evaluates_every_few_epochs_and_at_the_end(tmp_path, every, steps, measured):
    made = loop(tmp_path, recipe(training={"max_steps": steps}, evaluation={"every": every}))
    made.run(lambda student: {"effective_rank": 4.0}, StopSignals(), "")
    assert [r["step"] for r in lines(tmp_path)[1]] == measured
    assert lines(tmp_path)[1][-1]["epoch"] == pytest.approx(measured[-1] / 5)


@pytest.mark.parametrize("when", [5, 15])
def test_an_interrupted_evaluation_is_logged_once_however_often_the_run_is_resumed(tmp_path, when):
    """The checkpoint of its step does not change, so each resumed run evaluates again."""

    def measure(student):
        if made.position.step == when and not resumed:
            signal.raise_signal(signal.SIGTERM)
        return {"effective_rank": 4.0}

    chosen = recipe(evaluation={"every": 1}, checkpoints={"every": 0})
    made, resumed = loop(tmp_path, chosen), False
    with StopSignals() as stop, pytest.raises(Stopped):
        stop.patient = True
        made.run(measure, stop, "")
    resumed = True
    for killed in (True, False, False):
        made = Loop(chosen, made.folder, pictures(), torch.device("cpu"), lambda _: None)
        made.restore()
        made.feeder = None if killed else made.feeder  # it ends after the evaluation, before another checkpoint
        with contextlib.suppress(AttributeError):
            made.run(measure, StopSignals(), "")
    assert [r["step"] for r in lines(tmp_path)[1]] == [5, 10, 15]


def test_the_best_checkpoint_by_knn_is_kept(tmp_path):
    scores = iter([0.1, 0.9, 0.3, 0.2])
    made = loop(tmp_path, recipe(training={"epochs": 4}, evaluation={"every": 1}, checkpoints={"keep": 1}))
    made.run(lambda student: {"effective_rank": 4.0, "knn": next(scores)}, StopSignals(), "")
    assert [p.name for p in checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000010", "step-00000020"]


def test_a_collapse_is_reported(tmp_path):
    said = []
    made = loop(tmp_path, recipe(training={"epochs": 4}, evaluation={"every": 1}), said.append)
    ranks = iter([3.0, 1.2, 1.6, 1.1])
    made.run(lambda student: {"effective_rank": next(ranks)}, StopSignals(), "")
    found = [s for s in said if "collapse" in s]
    assert ["rank 1.2 at epoch 2 " in found[0], "rank 1.1 at epoch 4 " in found[1]] == [True, True]
    assert len(found) == 2 and "training.warmup" in found[0]


def test_an_argument_of_the_objective_that_grows(tmp_path):
    """JCL's code: lambda (epoch + 1) / epochs, over the epochs that are trained."""
    objective = {"name": "jcl", "covariance_weight": 2.0, "ramp": "covariance_weight"}
    made = loop(tmp_path, recipe(objective=objective, views={**TREE["views"], "count": 3}))
    judge, seen = made.learner.objective, []
    contrast = judge.contrast
    judge.contrast = lambda pairs: (seen.append(on_device(judge, "covariance_weight").item()), contrast(pairs))[1]
    made.run(None, StopSignals(), "")
    assert seen == pytest.approx([2 * (epoch + 1) / 3 for epoch in range(3) for _ in range(5)])


@pytest.mark.parametrize(("name", "ramp"), [("nt-xent", "temperature"), ("jcl", "temperature"), ("jcl", "lambda")])
def test_only_arguments_that_can_be_set_later_may_grow(tmp_path, name, ramp):
    with pytest.raises(UsageError, match=f"objective.ramp = '{ramp}' can't be used here"):
        loop(tmp_path, recipe(objective={"name": name, "ramp": ramp}, views={**TREE["views"], "count": 3}))


def test_dropout_is_the_same_after_resuming(tmp_path):
    """Dropout is seeded by the step's number, so that a resumed run drops the same units."""

    def with_dropout(path: Path, steps: int) -> Loop:
        folder = RunFolder(path)
        chosen = recipe(training={"max_steps": steps, "schedule": "constant"})
        made = Loop(chosen, folder, pictures(), torch.device("cpu"), lambda _: None)
        made.learner.student.head.insert(0, torch.nn.Dropout(0.5))
        return made

    whole = with_dropout(tmp_path / "whole", 8)
    RunFolder(tmp_path / "whole").create()
    whole.run(None, StopSignals(), "")
    RunFolder(tmp_path / "parts").create()
    with_dropout(tmp_path / "parts", 6).run(None, StopSignals(), "")
    rest = with_dropout(tmp_path / "parts", 8)
    rest.restore()
    rest.run(None, StopSignals(), "")
    for mine, theirs in zip(rest.learner.parameters(), whole.learner.parameters()):
        assert torch.equal(mine, theirs)


def test_dropout_is_recognized():
    from kontrast.training.learner import has_dropout

    assert has_dropout(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1)))
    assert not has_dropout(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.0)))


def test_the_learning_rate_can_change_between_epochs_only(tmp_path):
    made = loop(tmp_path, recipe(training={"epochs": 4, "batch": 8, "log_every": 1, "lr_per_epoch": True}))
    made.run(None, StopSignals(), "")
    rates = [line["lr"] for line in lines(tmp_path)[0]]
    assert len(set(rates)) == 4 and len(rates) > 4


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("already", [False, True])
def test_the_choice_of_algorithms_is_restored(deterministic, already):
    """If the calling program uses deterministic algorithms, a run does so too."""
    cudnn = torch.backends.cudnn
    torch.use_deterministic_algorithms(already)
    before = cudnn.benchmark, cudnn.deterministic
    try:
        with pytest.raises(KeyError), algorithms(deterministic):
            assert torch.are_deterministic_algorithms_enabled() == (deterministic or already)
            assert (cudnn.benchmark, cudnn.deterministic) == (not (deterministic or already), deterministic or already)
            raise KeyError
        assert torch.are_deterministic_algorithms_enabled() == already
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert (cudnn.benchmark, cudnn.deterministic) == before
    finally:
        torch.use_deterministic_algorithms(False)
