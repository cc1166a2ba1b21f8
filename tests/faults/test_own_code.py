"""Code of the user that is wrong inside: an encoder with a false width, a head or a loss that raises."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kontrast import plugins
from kontrast.networks import ENCODERS, HEADS
from kontrast.objectives import OBJECTIVES

from support.command_line import TINY, kontrast, one_line

NETWORK = """
import torch
from kontrast.networks import ENCODERS, HEADS

@ENCODERS.register("own")
class Own(torch.nn.Module):
    def __init__(self, channels: int = 3, size: int = 32, width: int = 16):
        super().__init__()
        self.width, self.layer = ENCODER_WIDTH, torch.nn.Linear(channels * size * size, 16)

    def forward(self, images):
        return self.layer(ENCODER_INPUT)

@HEADS.register("own")
class OwnHead(torch.nn.Linear):
    def __init__(self, inputs: int, width: int = 8):
        super().__init__(inputs, 8)
        self.width = HEAD_WIDTH
"""
RIGHT = {"ENCODER_WIDTH": "16", "ENCODER_INPUT": "images.flatten(1)", "HEAD_WIDTH": "8"}
LOSS = """
from kontrast.objectives import OBJECTIVES, Objective

@OBJECTIVES.register("own")
class OwnLoss(Objective):
    def contrast(self, pairs):
        return pairs.no_such_thing
"""


@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    """The user's file; its names are forgotten after the test."""
    monkeypatch.setenv(plugins.VARIABLE, "")
    yield tmp_path / "own_faulty_code.py"
    sys.modules.pop("own_faulty_code", None)
    for registry in (ENCODERS, HEADS, OBJECTIVES):
        registry.pop("own", None)


def pretrain(own: Path, *settings: str):
    options = ["--device", "cpu", "--no-probes", "--out", str(own.parent / "run")]
    return kontrast("--import", str(own), "pretrain", *TINY[:3], "evaluation.every=0", *settings, *options)


@pytest.mark.fault(50)
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"ENCODER_WIDTH": "12"}, ("encoder 'own' returns [2, 16]", "[2, 12]")),
        ({"HEAD_WIDTH": "5"}, ("head 'own' returns [2, 8]", "[2, 5]")),
        ({"ENCODER_INPUT": "images"}, ("encoder 'own' fails on a batch [2, 3, 32, 32]: RuntimeError:", "mat1")),
        ({"ENCODER_INPUT": "images.flatten(1)), 1 / (0"}, ("encoder 'own' fails", "ZeroDivisionError")),
    ],
)
def test_own_network_that_is_wrong_inside(own, wrong, words):
    """Exit 2 before the first step, with what the network returned or raised; no run folder is left."""
    text = NETWORK
    for name, value in {**RIGHT, **wrong}.items():
        text = text.replace(name, value)
    own.write_text(text)
    one_line(pretrain(own, "encoder.name=own", "head.name=own"), 2, *words)
    assert not (own.parent / "run").exists()


@pytest.mark.fault(50)
def test_own_network_that_is_right(own):
    """The same file without a mistake trains."""
    text = NETWORK
    for name, value in RIGHT.items():
        text = text.replace(name, value)
    own.write_text(text)
    done = pretrain(own, "encoder.name=own", "head.name=own")
    assert done.returncode == 0, done.stderr


@pytest.mark.fault(50)
def test_own_objective_that_raises(own):
    """Exit 2 with the line of the user's file."""
    own.write_text(LOSS)
    done = pretrain(own, "objective.name=own", "encoder.name=small-conv", "encoder.width=8")
    one_line(done, 2, f"{own}, line 7: AttributeError", "no_such_thing", "--import")
    assert os.environ[plugins.VARIABLE] == str(own)
