"""Numbers that depend on what they should: the seed of the run, the scale of the features."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from kontrast.errors import NumbersError
from kontrast.papers.measure import probe_run
from kontrast.runs import export as exporting
from kontrast.runs.probe import PROBES
from kontrast.runs.run import Run

from support import tiny_run


@pytest.mark.fault(53)
def test_reproduce_probes_with_the_seed_of_the_run(monkeypatch):
    """Every probe of a table's cell draws from the run's seed, as `kontrast probe` does."""
    run, used = Run(tiny_run.trained()), {}
    run.recipe = replace(run.recipe, seed=7)
    for name in ("knn", "linear", "few-shot", "cacr"):

        def observed(*sets, name=name, fit=PROBES[name], **arguments):
            result = fit(*sets, **arguments)
            used[name] = result.seed
            return result

        monkeypatch.setitem(PROBES, name, observed)
    probe_run(run, ("knn", "linear", "few-shot", "cacr"), torch.device("cpu"))
    assert used == {"knn": 7, "linear": 7, "few-shot": 21, "cacr": 7}


@pytest.mark.fault(54)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_difference_of_an_export_is_measured_relative_to_the_features(scale):
    """The same relative error counts alike, however large the features are."""
    expected = scale * torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    assert exporting.relative_difference(expected * (1 + 1e-6), expected) < exporting.TOLERANCE
    assert exporting.relative_difference(expected * 1.01, expected) > exporting.TOLERANCE
    assert not exporting.relative_difference(expected * float("nan"), expected) <= exporting.TOLERANCE


class Scaled(nn.Module):
    def __init__(self, encoder: nn.Module, scale: float):
        super().__init__()
        self.encoder, self.scale = encoder, scale

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.scale * self.encoder(images)


@pytest.mark.slow
@pytest.mark.fault(54)
def test_onnx_of_an_encoder_with_large_or_small_features(monkeypatch):
    """A right file is written though its features are large; a wrong one is refused (exit 5) though they are small."""
    for name in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(name)
    run = Run(tiny_run.trained())
    images = exporting.real_images(run, None)
    content, difference = exporting.checked_onnx(run, Scaled(run.encoder("cpu"), 1e6), images)
    assert content and difference < 1e-4
    wrong = exporting.onnx_bytes(Scaled(run.encoder("cpu", trained=False), 1e-6), torch.zeros(2, 3, 32, 32))
    monkeypatch.setattr(exporting, "onnx_bytes", lambda encoder, x: wrong)
    with pytest.raises(NumbersError, match="of the largest feature"):
        exporting.checked_onnx(run, Scaled(run.encoder("cpu"), 1e-6), images)
