"""A loss or gradient that is not finite: noticed before the weights move; the run stops, or skips the step if told."""

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


def poisoned(argv: list[str], steps: set[int], what: str) -> int:
    """Train; at these steps, counted from 1, a gradient, or all activations and so the loss, become NaN."""
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
def test_a_step_that_is_not_finite_stops_the_run_before_the_weights_move(tmp_path, what):
    """Seen: exit 5, the step, lr and terms. Remains: finite checkpoints, and not-finite.json with the step's images."""
    run = tmp_path / "run"
    argv = [*SHORT, "--out", str(run)]
    said = Command(tmp_path / "log", instead=partial(poisoned, argv, {9}, what)).ended(5)
    assert re.search(r"not finite at step 9 \(lr \S+, attraction .*, repulsion ", said), said
    assert "the last good checkpoint is" in said and "lower training.lr" in said
    saved = sorted((run / "checkpoints").glob("step-*"))
    assert int(saved[-1].name[5:]) < 9 and finite(saved[-1] / "state.safetensors")
    told = json.loads((run / "not-finite.json").read_text())["steps"]
    assert [step["step"] for step in told] == [9]
    assert len(told[0]["images"]) == 16 and len({image["id"] for image in told[0]["images"]}) == 16
    Command(tmp_path / "log", "--resume", "--out", str(run)).ended(0)
    assert finite(run / "encoder.safetensors")


@pytest.mark.fault(21)
def test_a_learning_rate_that_explodes_stops_before_the_first_checkpoint(tmp_path):
    """Seen: exit 5 and that there is no checkpoint yet. Remains: a run folder without weights."""
    argv = [*SHORT, "training.lr=1e30", "training.warmup=0", "checkpoints.every=0", "--out", str(tmp_path / "run")]
    assert "there is no checkpoint before it" in Command(tmp_path / "log", *argv).ended(5)


@pytest.mark.fault(21)
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_skipped_steps_leave_no_trace_in_the_weights(tmp_path, what):
    """Seen: a line for each of up to 10 skipped steps. Remains: finite weights, statistics, bank and metrics."""
    run = tmp_path / "run"
    argv = [*SHORT, *MOCO, "--on-nan", "skip", "--out", str(run)]
    said = Command(tmp_path / "log", instead=partial(poisoned, argv, {5, 6, 9}, what)).ended(0)
    assert re.findall(r"skipped a step, (\d+) of 10 allowed: .* not finite at step (\d+)", said) == [
        ("1", "5"), ("2", "6"), ("3", "9")
    ]  # fmt: skip
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    assert finite(last / "state.safetensors") and finite(run / "encoder.safetensors")
    assert "NaN" not in (run / "metrics.jsonl").read_text()
    assert [s["step"] for s in json.loads((run / "not-finite.json").read_text())["steps"]] == [5, 6, 9]


@pytest.mark.fault(21)
def test_the_eleventh_skipped_step_stops_the_run(tmp_path):
    """Seen: ten lines, then exit 5. Remains: the last good checkpoint."""
    argv = [*SHORT, "--on-nan", "skip", "--out", str(tmp_path / "run")]
    said = Command(tmp_path / "log", instead=partial(poisoned, argv, set(range(5, 30)), "loss")).ended(5)
    assert said.count("skipped a step") == 10 and "not finite at step 15 " in said


@pytest.mark.fault(21)
def test_an_unknown_way_is_refused(tmp_path):
    """Seen: exit 2 and the two ways. Remains: no folder."""
    argv = [*SHORT, "--on-nan", "skp", "--out", str(tmp_path / "run")]
    assert "did you mean 'skip'? allowed: stop, skip" in Command(tmp_path / "log", *argv).ended(2)
    assert not (tmp_path / "run").exists()
