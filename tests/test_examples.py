"""The examples of the README run as they are."""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from support import tiny_run

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run_example(monkeypatch, capsys):
    """A function that runs an example and returns what it prints."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with torch.random.fork_rng():
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", ["own_loop.py", pytest.param("lightning_loop.py", marks=pytest.mark.slow)])
def test_training_loop_lowers_the_loss(run_example, name):
    if "lightning" in name and importlib.util.find_spec("pytorch_lightning") is None:
        pytest.skip("pytorch_lightning is not installed")
    last = run_example(name).splitlines()[-1]
    assert "attraction" in last and "repulsion" in last
    attraction, repulsion = (float(x) for x in re.findall(r"-?\d+\.\d+", last))
    assert attraction + repulsion < -0.2  # if all rows were equal the loss would be log 254, or 0 for CACR


@pytest.mark.slow
@pytest.mark.parametrize("trained", [True, False], ids=["run", "from-the-start"])
def test_fine_tuning_prints_both_accuracies(run_example, trained):
    """The example takes a run; without one it trains its own, which takes longer."""
    output = run_example("fine_tune.py", *([str(tiny_run.trained())] if trained else []))
    assert re.search(r"accuracy 0\.\d+ +from scratch 0\.\d+", output), output


def test_every_example_is_tested():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"own_loop.py", "lightning_loop.py", "fine_tune.py"}
