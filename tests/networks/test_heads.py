"""Heads and predictors by the papers' layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kontrast.errors import UsageError
from kontrast.networks import HEADS, PREDICTORS, head, predictor


def layers(module: nn.Module) -> list[str]:
    names = {nn.Linear: "linear", nn.BatchNorm1d: "norm", nn.ReLU: "relu"}
    return [names[type(m)] + ("+bias" if isinstance(m, nn.Linear) and m.bias is not None else "") for m in module]


@pytest.mark.parametrize("name", list(HEADS))
def test_every_head_says_its_width(name):
    module = head(name, 48)
    assert module(torch.randn(6, 48)).shape == (6, module.width)


@pytest.mark.parametrize("name", list(PREDICTORS))
def test_every_predictor_keeps_the_width(name):
    assert predictor(name, 48)(torch.randn(6, 48)).shape == (6, 48)


def test_simclr_head_has_a_last_norm_with_scale_and_no_shift():
    two, three = head("simclr", 32), head("simclr", 32, layers=3)
    assert layers(two) == ["linear", "norm", "relu", "linear", "norm"]
    assert layers(three) == ["linear", "norm", "relu"] * 2 + ["linear", "norm"]
    assert [m.out_features for m in three if isinstance(m, nn.Linear)] == [32, 32, 128]
    three(torch.randn(8, 32)).square().sum().backward()
    assert three[-1].weight.grad is not None and three[-1].bias.grad is None and three[-1].bias.abs().sum() == 0


def test_moco_heads():
    assert layers(head("moco-v2", 32)) == ["linear+bias", "relu", "linear+bias"]
    v3 = head("moco-v3", 32)
    assert layers(v3) == ["linear", "norm", "relu", "linear", "norm"] and not v3[-1].affine
    assert (v3[0].out_features, v3.width) == (4096, 256)
    assert layers(head("moco-v3", 32, layers=3)) == ["linear", "norm", "relu"] * 2 + ["linear", "norm"]
    assert layers(predictor("moco-v3", 256)) == ["linear", "norm", "relu", "linear"]
    assert layers(predictor("moco-v3", 256, last_norm=True))[-1] == "norm"


def test_uniclr_head_has_three_norms_and_two_relus():
    module = head("uniclr", 512)
    assert layers(module) == ["linear", "norm", "relu", "linear", "norm", "relu", "linear", "norm"]
    assert [m.out_features for m in module if isinstance(m, nn.Linear)] == [2048, 2048, 256]


def test_expander_ends_without_norm():
    module = head("vicreg", 64, outputs=96)
    assert layers(module) == ["linear", "norm", "relu", "linear", "norm", "relu", "linear"]
    assert [m.out_features for m in module if isinstance(m, nn.Linear)] == [96, 96, 96]


def test_a_head_refuses_unknown_arguments_and_depths():
    with pytest.raises(UsageError, match="did you mean 'outputs'"):
        head("simclr", 32, output=64)
    with pytest.raises(UsageError, match="2 or 3"):
        head("simclr", 32, layers=5)
    with pytest.raises(UsageError, match="did you mean 'simclr'"):
        head("simcrl", 32)
