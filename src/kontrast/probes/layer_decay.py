"""Layers of an encoder and its classifier from the input to the output, whose learning rates fall towards the input."""

from __future__ import annotations

from typing import Any

from torch import nn

from kontrast.optim import Optimizer, build_optimizer
from kontrast.probes.finetuning_protocols import FineTuning


def layers_of(network: nn.Sequential) -> list[nn.ParameterList]:
    """Return the trainable parameters of each layer of an encoder and its classifier, from the input to the output.

    A layer is a child of the encoder; of a sequence of blocks, each block is one. Parameters of the encoder itself,
    such as a class token, belong to the first layer. A last norm belongs to the classifier, as in MAE's code: block i
    of 12 has the decay to the power of 12 - i, and the patches have it to the power of 13.
    """
    encoder, classifier = network
    blocks: list[nn.Module] = []
    for child in encoder.children():
        blocks += child if isinstance(child, nn.Sequential | nn.ModuleList) else [child]
    layers = [layer for block in blocks if (layer := list(block.parameters()))] or [[]]
    layers[0] = [*encoder.parameters(recurse=False), *layers[0]]
    last_norm = layers.pop() if all(p.ndim == 1 for p in layers[-1]) else []
    layers.append([*last_norm, *classifier.parameters()])
    return [nn.ParameterList([p for p in layer if p.requires_grad]) for layer in layers]


def build_optimizers(network: nn.Sequential, protocol: FineTuning) -> list[tuple[Optimizer, float]]:
    """Return optimizers of an encoder and its classifier, each with its multiple of the learning rate.

    The classifier's multiple is 1. With equal rates there is one optimizer, else one per layer that is trained.
    """
    modules: list[nn.Module] = [network] if protocol.layer_decay == 1 else [*layers_of(network)]
    rule: Any = {"nesterov": True} if protocol.optimizer == "sgd" else {"exclude_1d": True}
    return [
        (
            build_optimizer(module, protocol.optimizer, weight_decay=protocol.weight_decay, **rule),
            protocol.layer_decay**height,
        )
        for height, module in zip(reversed(range(len(modules))), modules)
        if any(p.requires_grad for p in module.parameters())
    ]
