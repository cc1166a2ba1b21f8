"""Layers of an encoder from the input to the output, whose learning rates fall towards the input."""

from __future__ import annotations

from typing import Any

from torch import nn

from kontrast.optim import Optimizer, build_optimizer
from kontrast.probes.finetuning_protocols import FineTuning


def layers_of(encoder: nn.Module) -> list[nn.ParameterList]:
    """Return the trainable parameters of each layer, from the input to the output.

    A layer is a child of the encoder; of a sequence of blocks, each block is one. Parameters of the encoder itself,
    such as a class token, belong to the first layer.
    """
    own = [p for p in encoder.parameters(recurse=False) if p.requires_grad]
    found: list[list[nn.Parameter]] = []
    for child in encoder.children():
        blocks = list(child) if isinstance(child, nn.Sequential | nn.ModuleList) else [child]
        layers = ([p for p in block.parameters() if p.requires_grad] for block in blocks)
        found += [layer for layer in layers if layer]
    if not found:
        return [nn.ParameterList(own)] if own else []
    found[0] = own + found[0]
    return [nn.ParameterList(layer) for layer in found]


def build_optimizers(network: nn.Sequential, protocol: FineTuning) -> list[tuple[Optimizer, float]]:
    """Return optimizers of an encoder and its classifier, each with its multiple of the learning rate.

    The classifier's multiple is 1. With equal rates there is one optimizer, else one per layer.
    """
    encoder, classifier = network
    modules: list[nn.Module] = [network] if protocol.layer_decay == 1 else [*layers_of(encoder), classifier]
    rule: Any = {"nesterov": True} if protocol.optimizer == "sgd" else {"exclude_1d": True}
    optimizers = [
        build_optimizer(module, protocol.optimizer, weight_decay=protocol.weight_decay, **rule) for module in modules
    ]
    return [(one, protocol.layer_decay**height) for height, one in zip(reversed(range(len(modules))), optimizers)]
