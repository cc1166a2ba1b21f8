"""Stages of an encoder, the first of which can be frozen."""

from __future__ import annotations

import pytest
import torch

from kontrast import networks
from kontrast.errors import UsageError
from kontrast.networks.stages import freeze_stages, stages_of
from kontrast.optim import build_optimizer


@pytest.mark.parametrize(
    ("name", "size", "count"),
    [("resnet-18", 32, 5), ("small-resnet", 32, 4), ("small-conv", 32, 4), ("vit-tiny", 32, 13)],
)
def test_every_parameter_belongs_to_one_stage_or_the_encoder(name, size, count):
    encoder = networks.encoder(name, size=size)
    stages = stages_of(encoder)
    assert len(stages) == count
    owned = [id(p) for stage in stages for module in stage for p in module.parameters()]
    own = [id(p) for p in encoder.parameters(recurse=False)]
    assert sorted(owned + own) == sorted(id(p) for p in encoder.parameters())


def test_frozen_stages_keep_weights_and_statistics():
    torch.manual_seed(0)
    encoder = networks.encoder("small-resnet", size=8)
    frozen = freeze_stages(encoder, 2)
    encoder.train()
    for module in frozen:
        module.eval()
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    optimizer = build_optimizer(encoder, "sgd", lr=0.1)
    encoder(torch.randn(4, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    changed = {name for name, tensor in encoder.state_dict().items() if not torch.equal(tensor, before[name])}
    assert not {name for name in changed if name.startswith(("conv1", "bn1", "layer1"))}
    assert {"layer2.0.conv1.weight", "layer2.0.bn1.running_mean", "layer3.0.conv2.weight"} <= changed


@pytest.mark.parametrize("count", [5, 9])
def test_something_must_be_left_to_train(count):
    with pytest.raises(UsageError, match="5 stages"):
        freeze_stages(networks.encoder("resnet-18", size=32), count)
