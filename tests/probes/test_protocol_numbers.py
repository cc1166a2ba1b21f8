"""The papers' evaluation protocols by their numbers."""

from __future__ import annotations

import inspect
from dataclasses import astuple

import pytest
import torch

from kontrast.probes import PROTOCOLS, few_shot, knn, logistic
from kontrast.probes.linear import initial_classifier

ADAM = (0.9, 0.999)

# optimizer, lr, batch, epochs, momentum, nesterov, weight decay, Adam's betas, milestones, factor, initial deviation
TABLE = {
    "cacr": ("adam", 1e-3, 128, 100, 0.9, False, 0.0, (0.5, 0.999), (60, 80), 0.2, None),
    "moco": ("sgd", 30.0, 256, 100, 0.9, False, 0.0, ADAM, (60, 80), 0.1, 0.01),
    "jcl-imagenet100": ("sgd", 10.0, 256, 100, 0.9, False, 0.0, ADAM, (60, 80), 0.1, 0.01),
    "dcl-lars": ("lars", 1.2, 4096, 90, 0.9, False, 0.0, ADAM, (), 0.1, 0.01),
    "uniclr": ("sgd", 30.0, 256, 100, 0.9, False, 0.0, ADAM, (), 0.1, 0.01),
    "uniclr-imagenet": ("lars", 0.08, 1024, 90, 0.9, False, 0.0, ADAM, (), 0.1, 0.01),  # 0.02 B/256
    "simclr": ("sgd", 0.2, 512, 100, 0.9, True, 0.0, ADAM, (), 0.1, 0.0),  # 0.1 B/256
    "simclr-imagenet": ("sgd", 1.6, 4096, 90, 0.9, True, 1e-6, ADAM, (), 0.1, 0.0),
    "hcl": ("adam", 1e-3, 512, 100, 0.9, False, 1e-6, ADAM, (100,), 1.0, None),  # a constant rate
}


@pytest.mark.parametrize("name", TABLE)
def test_protocols_have_the_papers_numbers(name):
    assert astuple(PROTOCOLS[name]) == (name, *TABLE[name])


def test_every_protocol_is_in_the_table():
    assert set(PROTOCOLS) == set(TABLE)


@pytest.mark.parametrize("deviation", [0.01, 0.0, None])
def test_initial_weights_have_the_protocols_deviation_or_are_nn_linears(deviation):
    weight, bias = initial_classifier(400, 50, deviation, torch.Generator().manual_seed(0)).parameters()
    if deviation is None:  # uniform within 1 / sqrt(width)
        assert 0.045 < bias.abs().max() < 0.05 and 0.0499 < weight.abs().max() < 0.05
        return
    assert weight.std().item() == pytest.approx(deviation, rel=0.02) and not bias.any()


def test_adams_epsilon_and_lars_trust():
    assert weight_after_a_step("cacr", weight=1.0, gradient=1e-8, lr=0.5) == pytest.approx(1 - 0.5 / 2)  # g / (g + eps)
    assert weight_after_a_step("dcl-lars", weight=3.0, gradient=7.0, lr=10.0) == pytest.approx(3 - 10 * 0.001 * 3)


def weight_after_a_step(protocol: str, weight: float, gradient: float, lr: float) -> float:
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(layer.weight, weight)
    layer.weight.grad = torch.full((1, 1), gradient)
    optimizer = PROTOCOLS[protocol].build_optimizer(layer)
    optimizer.lr = lr
    optimizer.step()
    return layer.weight.item()


def test_knn_has_200_neighbors_and_temperature_a_tenth_by_default():
    defaults = {name: p.default for name, p in inspect.signature(knn).parameters.items()}
    assert (defaults["k"], defaults["temperature"]) == (200, 0.1)


def test_numpy_arrays_give_the_same_accuracy_as_tensors():
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    given = [x, y, x + 0.1, y]
    for probe in (knn, logistic, few_shot):
        assert probe(*(part.numpy() for part in given)).accuracy == probe(*given).accuracy
