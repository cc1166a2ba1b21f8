"""Match the tensors of a weight file to those of a network by name, and say what does not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kontrast.errors import CheckpointError


@dataclass(frozen=True)
class MatchedWeights:
    """Which tensors of a file belong to a network.

    Attributes:
        loaded: the tensors, by the network's names.
        prefix: what their names in the file begin with.
        left_out: the names in the file that the network doesn't have, such as those of a classifier.
        new: the names in the network that the file doesn't have, such as the counters of old files.
    """

    loaded: dict[str, Tensor]
    prefix: str
    left_out: list[str]
    new: list[str]


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
    prefix = find_prefix(expected, tensors)
    found = {key[len(prefix) :]: tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    trained = {key for key, parameter in network.named_parameters() if parameter.requires_grad}
    for key, own in expected.items():
        if key in found and found[key].shape != own.shape:
            problem = f"{key} has shape {list(found[key].shape)} there and {list(own.shape)} in {name}"
        elif key not in found and key in trained:
            problem = f"it has no {key}, whose shape in {name} is {list(own.shape)}{first_of(tensors)}"
        elif key in found and not torch.isfinite(found[key].to(own.dtype)).all():
            problem = f"{key} holds NaN or infinity"
        else:
            continue
        raise CheckpointError(f"{place} does not fit {name}: {problem}")
    for key, tensor in found.items():
        if key not in expected and _belongs(network, key):
            problem = f"{key} has shape {list(tensor.shape)} there and is missing in {name}"
            raise CheckpointError(f"{place} does not fit {name}: {problem}")
    loaded = {key: found[key].to(own.dtype) for key, own in expected.items() if key in found}
    used = {prefix + key for key in loaded}
    left_out = [key for key in tensors if key not in used]
    return MatchedWeights(loaded, prefix, left_out, [key for key in expected if key not in loaded])


def fits(network: nn.Module, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether the tensors belong to this network."""
    try:
        match_weights(network, tensors, "", "")
    except CheckpointError:
        return False
    return True


def find_prefix(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> str:
    """Return what most of the names begin with whose rest is expected; the first one of equals."""
    counts: Counter[str] = Counter()
    for key in tensors:
        parts = key.split(".")
        for cut in range(len(parts)):
            if ".".join(parts[cut:]) in expected:
                counts[".".join([*parts[:cut], ""])] += 1
    return max(counts, key=lambda prefix: counts[prefix], default="")


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
