"""An encoder with dropout that is stopped and resumed: the draws depend only on the seed and the step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from kontrast.errors import Stopped
from kontrast.networks import ENCODERS
from kontrast.training.loop import Loop
from kontrast.training.pretrain import pretrain

OVERRIDES = {
    "encoder.name": "dropping",
    "training": {"batch": 64, "max_steps": 12, "log_every": 1, "deterministic": True},
    "evaluation.every": 0,
}


class Dropping(nn.Module):
    """An encoder in which half of the pixels and features are dropped."""

    def __init__(self, channels: int = 3, size: int = 32, width: int = 16):
        super().__init__()
        layers = [nn.Flatten(), nn.Dropout(0.5), nn.Linear(channels * size * size, width), nn.ReLU(), nn.Dropout(0.5)]
        self.width, self.layers = width, nn.Sequential(*layers)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


@pytest.fixture(autouse=True)
def registered():
    ENCODERS.register("dropping")(Dropping)
    yield
    del ENCODERS["dropping"]


def train(run: Path, device: str, **options: object) -> Path:
    return pretrain(recipe="quickstart", overrides=OVERRIDES, out=run, device=device, say=lambda _: None, **options)


def stop_and_resume(folder: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Train once as a whole, and once with a stop after step 7; draws of other programs lie between."""
    whole = train(folder / "whole", device)
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(Loop, "must_stop", lambda self, stop: self.position.step == 7)
        train(folder / "parts", device)
    torch.rand(1000, device=device)
    return whole, train(folder / "parts", device, resume=True)


def check_equal(whole: Path, parts: Path) -> None:
    first, second = (load_file(run / "encoder.safetensors") for run in (whole, parts))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (whole / "metrics.jsonl").read_bytes() == (parts / "metrics.jsonl").read_bytes()


@pytest.mark.fault(55)
def test_dropout_on_the_cpu(tmp_path, monkeypatch):
    """The resumed run ends with the same bits."""
    check_equal(*stop_and_resume(tmp_path, "cpu", monkeypatch))


@pytest.mark.fault(55)
def test_every_step_seeds_the_generator_of_its_device(tmp_path, monkeypatch):
    """Draws between two steps, by any other code of the process, change nothing."""
    whole = train(tmp_path / "whole", "cpu")
    inner = Loop.take_step

    def draw_before(self: Loop, batch: object) -> None:
        torch.rand(3)
        inner(self, batch)

    monkeypatch.setattr(Loop, "take_step", draw_before)
    check_equal(whole, train(tmp_path / "drawn", "cpu"))


@pytest.mark.gpu
@pytest.mark.fault(55)
@pytest.mark.parametrize("compiled", ["no", "yes"])
def test_dropout_on_a_gpu(tmp_path, monkeypatch, compiled):
    """The resumed run ends with the same bits, with captured graphs and with compiled networks."""
    monkeypatch.setitem(OVERRIDES, "training", {**OVERRIDES["training"], "compile": compiled})
    check_equal(*stop_and_resume(tmp_path, "cuda", monkeypatch))
