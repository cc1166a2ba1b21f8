"""Match the tensors of a weight file to those of a network by name, and say what does not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kontrast.errors import CheckpointError

EVALUATED = ("encoder_q", "teacher")
"""Parts of names in published files that mark the network to evaluate, of two: MoCo's and DINO's."""


@dataclass(frozen=True)
class MatchedWeights:
    """Which tensors of a file belong to a network.

    Attributes:
        loaded: the tensors, by the network's names.
        prefix: what their names in the file begin with.
        left_out: the names in the file that the network doesn't have, such as those of a classifier.
        new: the names in the network that the file doesn't have, such as the counters of old files.
        copies: what the names of other copies of the network in the file begin with, such as that of a teacher.
    """

    loaded: dict[str, Tensor]
    prefix: str
    left_out: list[str]
    new: list[str]
    copies: list[str]


def match_weights(network: nn.Module, tensors: Mapping[str, Tensor], place: str, name: str) -> MatchedWeights:
    """Return the tensors that belong to the network; raise, naming the first that does not fit, if it is another one.

    Names in the file may have a prefix, such as `module.` or `backbone.`: it is the one after which most names are
    the network's.

    Args:
        network: the encoder, or another network.
        tensors: those of the file.
        place: how errors call the file.
        name: how errors call the network.
    """
    expected = network.state_dict()
    prefix, *copies = find_prefixes(expected, tensors)
    if problem := mismatch(network, tensors, name):
        raise CheckpointError(f"{place} does not fit {name}: {problem}")
    found = after(prefix, tensors)
    loaded = {key: found[key].to(own.dtype) for key, own in expected.items() if key in found}
    for key, tensor in loaded.items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{place}: {prefix}{key} holds NaN or infinity")
        if key.endswith("running_var") and (tensor < 0).any():
            raise CheckpointError(f"{place}: {prefix}{key} holds a negative variance")
    used = {prefix + key for key in loaded}
    left_out = [key for key in tensors if key not in used]
    return MatchedWeights(loaded, prefix, left_out, [key for key in expected if key not in loaded], copies)


def fits(network: nn.Module, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether the tensors have the names and shapes of this network's."""
    return not mismatch(network, tensors, "")


def mismatch(network: nn.Module, tensors: Mapping[str, Tensor], name: str) -> str:
    """Return the first name or shape that is not as in the network, for an error; "" if they all are."""
    expected = network.state_dict()
    found = after(find_prefixes(expected, tensors)[0], tensors)
    trained = {key for key, parameter in network.named_parameters() if parameter.requires_grad}
    for key, own in expected.items():
        if key in found and found[key].shape != own.shape:
            return f"{key} has shape {list(found[key].shape)} there and {list(own.shape)} in {name}"
        if key not in found and key in trained:
            return f"it has no {key}, whose shape in {name} is {list(own.shape)}{first_of(tensors)}"
    for key, tensor in found.items():
        if key not in expected and _belongs(network, key):
            return f"{key} has shape {list(tensor.shape)} there and is missing in {name}"
    return ""


def find_prefixes(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return what names begin with after which most tensors are as expected, by name and by shape.

    A file with two copies of the network has two such prefixes: that of the network to evaluate comes first.
    """
    counts: Counter[str] = Counter()
    for key, tensor in tensors.items():
        parts = key.split(".")
        for cut in range(len(parts)):
            own = expected.get(".".join(parts[cut:]))
            if own is not None:
                counts[".".join([*parts[:cut], ""])] += 1 + (own.shape == tensor.shape)
    most = max(counts.values(), default=0)
    best = [prefix for prefix, count in counts.items() if count == most]
    return sorted(best, key=lambda prefix: (set(EVALUATED).isdisjoint(prefix.split(".")), prefix)) or [""]


def after(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with the prefix, by the rest of their names."""
    return {key[len(prefix) :]: tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def first_of(tensors: Mapping[str, Tensor]) -> str:
    """Describe the first tensor of a file, for errors."""
    for key, tensor in tensors.items():
        return f" (its first tensor is {key} {list(tensor.shape)})"
    return " (it has no tensors)"


def _belongs(network: nn.Module, key: str) -> bool:
    """Return whether an unknown tensor lies inside of a part that the network has, so that the file is of another
    network. A classifier, which the network lacks or has replaced by an identity, is no such part."""
    module = network
    for part in key.split(".")[:-1]:
        inner = module._modules.get(part)
        if inner is None:
            break
        module = inner
    return module is not network and bool(module.state_dict())
