"""A loss or gradient that is not finite: the run stops before the weights change, or skips the step if allowed."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kontrast.cli import main as cli
from kontrast.training.step import Step

from support.commands import TINY, Command

SHORT = [*TINY, "training.max_steps=24", "training.log_every=2", "--recipe", "quickstart"]
MOCO = ["objective.name=info-nce", "teacher.momentum=0.9", "bank.size=50"]


def train_with_nan(argv: list[str], steps: set[int], what: str) -> int:
    """Train, and make a gradient infinite or the loss NaN at these steps, counted from 1."""
    inner, taken = Step._forward_backward, [0]

    def outer(self: Step, views: torch.Tensor, *rest: object) -> object:
        taken[0] += 1
        bad = taken[0] in steps
        outcome = inner(self, views * float("nan") if bad and what == "loss" else views, *rest)
        if bad and what == "gradient":
            next(iter(self.optimizer.parameters.values())).grad[0] = float("inf")
        return outcome

    Step._forward_backward = outer
    return cli.run(["pretrain", *argv, "--device", "cpu", "--no-probes"])


def finite(path: Path) -> bool:
    return all(torch.isfinite(t).all() for t in load_file(path).values() if t.is_floating_point())


@pytest.mark.fault(21)
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_not_finite_step_stops_before_the_weights_change(tmp_path, what):
    """Exit 5 with step, lr and terms; checkpoints are finite, and not-finite.json has the step's images."""
    run = tmp_path / "run"
    argv = [*SHORT, "--out", str(run)]
    said = Command(tmp_path / "log", instead=partial(train_with_nan, argv, {9}, what)).ended(5)
    assert re.search(r"not finite at step 9\b.*lr.*attraction.*repulsion", said), said
    assert "training.lr" in said
    saved = sorted((run / "checkpoints").glob("step-*"))
    assert int(saved[-1].name[5:]) < 9 and finite(saved[-1] / "state.safetensors")
    steps = json.loads((run / "not-finite.json").read_text())["steps"]
    assert [step["step"] for step in steps] == [9]
    assert len(steps[0]["images"]) == 16 and len({image["id"] for image in steps[0]["images"]}) == 16
    Command(tmp_path / "log", "--resume", "--out", str(run)).ended(0)
    assert finite(run / "encoder.safetensors")


@pytest.mark.fault(21)
def test_exploding_learning_rate_before_the_first_checkpoint(tmp_path):
    """Exit 5; the run folder has no weights."""
    argv = [*SHORT, "training.lr=1e30", "training.warmup=0", "checkpoints.every=0", "--out", str(tmp_path / "run")]
    Command(tmp_path / "log", *argv).ended(5)
    assert not list((tmp_path / "run").rglob("*.safetensors"))


@pytest.mark.fault(21)
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_skipped_steps_leave_no_trace(tmp_path, what):
    """One line for each of up to 10 skipped steps; weights, statistics, bank and metrics stay finite."""
    run = tmp_path / "run"
    argv = [*SHORT, *MOCO, "--on-nan", "skip", "--out", str(run)]
    said = Command(tmp_path / "log", instead=partial(train_with_nan, argv, {5, 6, 9}, what)).ended(0)
    assert re.findall(r"(\d+) of 10\b.* not finite at step (\d+)", said) == [
        ("1", "5"), ("2", "6"), ("3", "9")
    ]  # fmt: skip
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    assert finite(last / "state.safetensors") and finite(run / "encoder.safetensors")
    assert "NaN" not in (run / "metrics.jsonl").read_text()
    assert [s["step"] for s in json.loads((run / "not-finite.json").read_text())["steps"]] == [5, 6, 9]


@pytest.mark.fault(21)
def test_eleventh_skipped_step_stops_the_run(tmp_path):
    """Ten lines, then exit 5."""
    argv = [*SHORT, "--on-nan", "skip", "--out", str(tmp_path / "run")]
    said = Command(tmp_path / "log", instead=partial(train_with_nan, argv, set(range(5, 30)), "loss")).ended(5)
    assert len(re.findall(r"\d+ of 10\b", said)) == 10 and "not finite at step 15" in said


@pytest.mark.fault(21)
def test_unknown_on_nan(tmp_path):
    """Exit 2 names both choices; there is no folder."""
    argv = [*SHORT, "--on-nan", "skp", "--out", str(tmp_path / "run")]
    assert all(word in Command(tmp_path / "log", *argv).ended(2) for word in ("skp", "stop", "skip"))
    assert not (tmp_path / "run").exists()
