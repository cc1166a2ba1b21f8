"""Fit the first layer of weights for images of other channels: repeat its filters over the channels that there are.

A filter that saw red, green and blue sees channels 1, 4, ... with its weights for red, 2, 5, ... with those for green
and 3, 6, ... with those for blue. All are scaled by the old number of channels over the new one, so that the layer
gives numbers of the same size. One channel gets the sum of all weights: it counts as the same value in each.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from kontrast.training.weight_matching import find_prefixes


def with_channels(tensors: Mapping[str, Tensor], encoder: nn.Module) -> tuple[Mapping[str, Tensor], str]:
    """The tensors with a first convolution that has as many input channels as the encoder's, and a line about it (""
    if it had them already, or if it differs in more than its channels, which matching the tensors reports)."""
    expected = encoder.state_dict()
    first = next((name for name, module in encoder.named_modules() if isinstance(module, nn.Conv2d)), None)
    if first is None:
        return tensors, ""
    name, own = f"{first}.weight", expected[f"{first}.weight"]
    key = find_prefixes(expected, tensors)[0] + name
    given = tensors.get(key)
    if given is None or given.ndim != 4 or given.shape == own.shape:
        return tensors, ""
    old, new = given.shape[1], own.shape[1]
    if (given.shape[0], *given.shape[2:]) != (own.shape[0], *own.shape[2:]) or 0 in given.shape:
        return tensors, ""
    return {**tensors, key: repeated(given, new)}, f"{name} takes {old} channels there; repeated for {new}"


def repeated(weight: Tensor, channels: int) -> Tensor:
    """Filters [O,c,k,k] for c channels as filters [O,C,k,k] for C channels."""
    old = weight.shape[1]
    if channels == 1:
        return weight.sum(1, keepdim=True)
    return weight[:, torch.arange(channels) % old] * (old / channels)
