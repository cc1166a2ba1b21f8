"""Runs that are planned by minutes: trial steps leave no trace, and a resumed run keeps its plan."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import kontrast
from kontrast.errors import Stopped, UsageError
from kontrast.training import trial
from kontrast.training.loop import Loop
from kontrast.training.pretrain import pretrain
from kontrast.training.splits import Splits
from kontrast.training.time_budget import REPORT_SECONDS, AfterTraining, fit_work

from support import tiny_run

BASE = {"training": {"batch": 32, "lr": 0.1}, "encoder.width": 16, "evaluation": {"every": 1, "k": 5}}
METHODS = {
    "simclr": {},
    "moco": {
        "objective.name": "info-nce", "teacher.momentum": 0.9, "teacher.symmetric": False, "bank.size": 64,
        "batch_norm.kind": "split", "batch_norm.splits": 4,
    },
    "swav": {"objective.name": "swav", "prototypes": {"count": 8, "frozen_epochs": 1}},
    "jcl": {"objective.name": "jcl", "views.count": 3, "objective.ramp": "covariance_weight"},
    "sogclr": {"objective.name": "sogclr"},
}  # fmt: skip


@pytest.fixture
def two_epochs(monkeypatch):
    """Plan two epochs, whatever the speed of this machine, after real trial steps."""
    monkeypatch.setattr(trial, "SHORTEST", 0.05)
    monkeypatch.setattr(trial, "SHARE", 0.0)
    plan = trial.plan_epochs
    monkeypatch.setattr(
        trial, "plan_epochs", lambda *given: trial.Plan(**{**vars(plan(*given)), "epochs": 2, "every": 1})
    )


def train(out, lines=None, **settings):
    say = (lambda line: None) if lines is None else lines.append
    return kontrast.pretrain(tiny_run.images(), "quickstart", out=out, device="cpu", say=say, **{**BASE, **settings})


@pytest.mark.parametrize("method", METHODS)
def test_planned_run_has_the_bits_of_its_recipe(two_epochs, tmp_path, method):
    """A run with --minutes ends like one that was given the planned epochs: trial steps are undone to the bit."""
    lines: list[str] = []
    planned = train(tmp_path / "planned", lines, minutes=10, **METHODS[method])
    settings = {"epochs": 2, "warmup": planned.recipe.training.warmup}
    given = train(tmp_path / "given", **METHODS[method], training={**BASE["training"], **settings})
    assert planned.recipe == given.recipe and planned.info["minutes"] == 10
    for name in ("encoder.safetensors", "metrics.jsonl", "recipe.toml"):
        ours, theirs = ((run.path / name).read_bytes() for run in (planned, given))
        if name == "recipe.toml":
            ours, theirs = (content.partition(b"\n")[2] for content in (ours, theirs))
        assert ours == theirs, name
    assert sum(line.startswith("plan: 10 minutes") for line in lines) == 1


def test_resumed_run_keeps_its_plan(two_epochs, tmp_path, monkeypatch):
    """A stopped run resumes with the planned epochs, with or without --minutes, and ends with the same bits."""
    whole = train(tmp_path / "whole", minutes=10)

    def stop_early(self, *given):
        if self.position.step == 5:
            self.save()
            raise Stopped("stopped")
        return take(self, *given)

    take = Loop.take_step
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        begun = trial.plan_run

        def planned_then_stopped(*given):
            plan = begun(*given)
            patch.setattr(Loop, "take_step", stop_early)
            return plan

        patch.setattr("kontrast.training.pretrain.plan_run", planned_then_stopped)
        train(tmp_path / "cut", minutes=10)
    lines: list[str] = []
    resumed = kontrast.pretrain(out=tmp_path / "cut", resume=True, minutes=99, device="cpu", say=lines.append)
    assert lines.count("--minutes 99 has no effect: a resumed run keeps its 2 epochs") == 1
    assert resumed.recipe == whole.recipe
    assert (resumed.path / "encoder.safetensors").read_bytes() == (whole.path / "encoder.safetensors").read_bytes()
    assert (resumed.path / "metrics.jsonl").read_bytes() == (whole.path / "metrics.jsonl").read_bytes()


def test_real_plan_trains_its_epochs(tmp_path, monkeypatch):
    """A budget of some seconds, of which nothing but a margin is left unused, gives the epochs that the recipe has."""
    monkeypatch.setattr(trial, "SHORTEST", 0.1)
    monkeypatch.setattr(trial, "MARGIN", 0.9)
    run = train(tmp_path / "run", minutes=0.3)
    last = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()][-1]
    t = run.recipe.training
    assert last["step"] == (t.max_steps or t.epochs * 6)


def test_minutes_may_be_a_number_of_numpy(two_epochs, tmp_path):
    assert train(tmp_path / "run", minutes=np.float32(10)).info["minutes"] == 10


def test_budget_of_less_than_an_epoch_says_what_one_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "SHORTEST", 0.05)
    monkeypatch.setattr(trial, "SHARE", 0.0)
    plan, lines = trial.plan_epochs, []
    monkeypatch.setattr(trial, "plan_epochs", lambda *given: plan(*given[:3], 1e-6, given[4]))
    train(tmp_path / "run", lines, minutes=2)
    (line,) = [line for line in lines if line.startswith("plan: the budget is too short")]
    assert "an epoch needs about --minutes 0." in line


def test_budget_that_is_over_before_training_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "SHORTEST", 0.05)
    with pytest.raises(UsageError, match=r"^--minutes 0\.001 was over before training began: an epoch"):
        train(tmp_path / "run", minutes=0.001)
    assert not (tmp_path / "run").exists()


def test_linear_probe_that_does_not_fit_is_left_out(two_epochs, tmp_path, monkeypatch):
    """A budget goes to training rather than to the linear probe, the plan says so, and kNN is still measured."""
    monkeypatch.setattr(trial, "PROBES", 0.0)
    lines: list[str] = []
    path = pretrain(
        tiny_run.images(), recipe="quickstart", overrides=BASE, out=tmp_path / "run", device="cpu", minutes=10,
        probed=True, say=lines.append,
    )  # fmt: skip
    assert not kontrast.Run(path).recipe.evaluation.linear
    assert "by kNN (a linear probe takes " in next(line for line in lines if line.startswith("plan:"))
    assert {result.probe for result in kontrast.probe(path, device="cpu")} == {"knn"}
    assert {result.probe for result in kontrast.probe(path, "linear", device="cpu")} == {"linear"}


def test_minutes_and_epochs_contradict(tmp_path):
    with pytest.raises(UsageError, match="give one of them"):
        train(tmp_path / "run", minutes=1, training={"epochs": 3})


def test_estimate_of_the_probes_is_a_positive_time():
    """It grows with the images, and unlabeled or unprobed runs need less."""
    run = kontrast.Run(tiny_run.trained())
    train, test = run.data("train"), run.data("test")
    network, parts = run.untrained(), Splits(train, train, train, test)
    probed, alone = (AfterTraining(run.recipe, parts, torch.device("cpu"), probes) for probes in (True, False))
    seconds, linear, evaluation = probed(network)
    assert seconds > REPORT_SECONDS + linear > REPORT_SECONDS and evaluation > 0 and alone(network)[:2] == (0, 0)
    ticks = itertools.count()
    few, few_linear, _ = probed(network, lambda: next(ticks))
    probed.counts = (10 * len(train), 10 * len(test))
    many, many_linear, _ = probed(network, lambda: next(ticks))
    assert many > 5 * few and many_linear > 5 * few_linear
    probed.recipe = replace(run.recipe, evaluation=replace(run.recipe.evaluation, linear=False))
    assert probed(network)[1] == 0
    assert fit_work(6000, 128) > 3 * fit_work(1500, 128) and fit_work(6000, 3072) > 4 * fit_work(1500, 3072)
