"""Layers, widths and initial weights of heads, predictors and SmallAlexNet."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kontrast.errors import UsageError
from kontrast.networks import HEADS, PREDICTORS, encoder, head, predictor


def layers(module: nn.Module) -> str:
    """Describe a network: `32>64` is a linear layer without bias, `32>64+` one with a bias."""
    words = []
    for m in module:
        if isinstance(m, nn.Linear):
            words.append(f"{m.in_features}>{m.out_features}" + ("+" if m.bias is not None else ""))
        elif isinstance(m, nn.BatchNorm1d):
            words.append("norm" + ("(plain)" if not m.affine else "" if m.bias.requires_grad else "(scale)"))
        else:
            words.append({nn.ReLU: "relu", nn.GELU: "gelu"}[type(m)])
    return " ".join(words)


HEADS_TABLE = [
    ("simclr", {}, "32>32 norm relu 32>128 norm(scale)"),
    ("simclr", {"layers": 1}, "32>128 norm(scale)"),
    ("simclr", {"layers": 3}, "32>32 norm relu 32>32 norm relu 32>128 norm(scale)"),
    ("linear", {}, "32>128+"),
    ("fc8", {}, "32>128+"),
    ("hcl", {}, "32>512 norm relu 512>128+"),
    ("moco-v2", {}, "32>32+ relu 32>128+"),
    ("moco-v3", {}, "32>4096 norm relu 4096>256 norm(plain)"),
    ("moco-v3", {"layers": 3}, "32>4096 norm relu 4096>4096 norm relu 4096>256 norm(plain)"),
    ("uniclr", {}, "32>2048 norm relu 2048>2048 norm relu 2048>256 norm"),
    ("uniclr", {"outputs": 2048}, "32>2048 norm relu 2048>2048 norm relu 2048>2048 norm"),
    ("convn", {}, "32>64 norm relu 64>16"),
    ("byol", {}, "32>4096 norm relu 4096>256+"),
    ("simsiam", {}, "32>2048 norm relu 2048>2048 norm relu 2048>2048 norm(plain)"),
    ("expander", {}, "32>2048 norm relu 2048>2048 norm relu 2048>2048"),
    ("vicreg", {"outputs": 96}, "32>96 norm relu 96>96 norm relu 96>96"),
    ("barlow", {}, "32>2048 norm relu 2048>2048 norm relu 2048>2048"),
    ("swav", {}, "32>2048 norm relu 2048>128+"),
    ("dino", {}, "32>2048+ gelu 2048>2048+ gelu 2048>256+"),
    ("dino", {"batch_norm": True}, "32>2048 norm gelu 2048>2048 norm gelu 2048>256+"),
]
PREDICTORS_TABLE = [
    ("uniclr", {}, "32>512 norm relu 512>32"),
    ("uniclr", {"hidden": 4096}, "32>4096 norm relu 4096>32"),
    ("moco-v3", {}, "32>4096 norm relu 4096>32"),
    ("moco-v3", {"last_norm": True}, "32>4096 norm relu 4096>32 norm(plain)"),
    ("byol", {}, "32>4096 norm relu 4096>32+"),
    ("simsiam", {}, "32>8 norm relu 8>32+"),
]


@pytest.mark.parametrize(("name", "arguments", "expected"), HEADS_TABLE)
def test_the_layers_of_heads(name, arguments, expected):
    assert layers(head(name, 32, **arguments)) == expected


@pytest.mark.parametrize(("name", "arguments", "expected"), PREDICTORS_TABLE)
def test_the_layers_of_predictors(name, arguments, expected):
    assert layers(predictor(name, 32, **arguments)) == expected


def test_every_head_and_predictor_is_in_the_tables():
    assert {name for name, _, _ in HEADS_TABLE} | {"identity"} == set(HEADS)
    assert {name for name, _, _ in PREDICTORS_TABLE} == set(PREDICTORS)


def test_fc8_starts_normal_with_deviation_0_02_and_zero_bias():
    torch.manual_seed(0)
    weight, bias = head("fc8", 1000).parameters()
    assert weight.std().item() == pytest.approx(0.02, rel=0.02) and abs(weight.mean().item()) < 5e-4
    assert weight.abs().max() > 0.06 and not bias.any()  # a uniform distribution would end at 0.035


def test_dinos_head_starts_normal_with_deviation_0_02_and_zero_biases():
    torch.manual_seed(0)
    for batch_norm in (False, True):
        linear = [m for m in head("dino", 500, batch_norm=batch_norm) if isinstance(m, nn.Linear)]
        for m in linear:
            assert m.weight.std().item() == pytest.approx(0.02, rel=0.03)
            assert m.bias is None or not m.bias.any()


def test_every_layer_of_small_alexnet_starts_normal_with_deviation_0_02():
    torch.manual_seed(0)
    modules = list(encoder("small-alexnet", size=16).modules())
    weighted = [m for m in modules if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert [m.weight.shape[0] for m in weighted] == [96, 192, 384, 384, 192, 4096, 4096]
    for m in weighted:
        assert m.bias is None and m.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert m.weight.abs().max() > 0.06
    norms = [m for m in modules if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert len(norms) == 7 and all((m.weight == 1).all() and not m.bias.any() for m in norms)


@pytest.mark.parametrize("name", list(HEADS))
def test_every_head_has_its_width(name):
    module = head(name, 48)
    assert module(torch.randn(6, 48)).shape == (6, module.width)


@pytest.mark.parametrize("name", list(PREDICTORS))
def test_every_predictor_keeps_the_width(name):
    assert predictor(name, 48)(torch.randn(6, 48)).shape == (6, 48)


def test_the_last_norm_of_simclrs_head_has_no_shift():
    module = head("simclr", 32)
    module(torch.randn(8, 32)).square().sum().backward()
    assert module[-1].weight.grad is not None and module[-1].bias.grad is None and not module[-1].bias.any()


def test_unknown_heads_arguments_and_depths_are_errors():
    for name, arguments, fact in (
        ("simclr", {"output": 64}, "'outputs'"),
        ("simclr", {"layers": 5}, "layers = 5"),
        ("simclr", {"layers": 0}, "layers = 0"),
        ("moco-v3", {"layers": 1}, "layers = 1"),
        ("simclr", {"hidden": 0}, "hidden = 0"),
        ("simcrl", {}, "'simclr'"),
    ):
        with pytest.raises(UsageError, match=fact):
            head(name, 32, **arguments)
