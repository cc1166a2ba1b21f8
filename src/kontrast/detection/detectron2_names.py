"""The names that detectron2 gives to the tensors of a ResNet."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

PREFIXES = {"fpn": "backbone.bottom_up.", "c4": "backbone. (res5: roi_heads.)"}
"""What precedes the names in the state dict of a whole detector."""


def detectron2_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a ResNet under detectron2's names; its batch norms don't count their batches.

    Args:
        state: the state dict of a ResNet with torchvision's names: conv1, bn1, layer1 to layer4.

    Example:
        >>> import torch
        >>> list(detectron2_names({"layer1.0.downsample.1.bias": torch.zeros(1), "bn1.weight": torch.zeros(1)}))
        ['res2.0.shortcut.norm.bias', 'stem.conv1.norm.weight']
    """
    return {_name(name): tensor for name, tensor in state.items() if not name.endswith("num_batches_tracked")}


def _name(name: str) -> str:
    name = re.sub(r"^layer(\d+)\.", lambda found: f"res{int(found[1]) + 1}.", name)
    name = re.sub(r"\bdownsample\.0\.", "shortcut.", name)
    name = re.sub(r"\bdownsample\.1\.", "shortcut.norm.", name)
    name = re.sub(r"\bbn(\d)\.", r"conv\1.norm.", name)
    return name if name.startswith("res") else f"stem.{name}"
