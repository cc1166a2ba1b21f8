"""Devices that have no float64: what needs its digits is computed on the CPU for them.

Apple's GPUs (the device "mps") are the only ones. Moving rows to the CPU and a result back is slow, and exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

WITHOUT_FLOAT64 = {"mps"}
"""The types of devices that have no float64."""


def has_float64(device: torch.device) -> bool:
    return device.type not in WITHOUT_FLOAT64


def float64_device(device: torch.device) -> torch.device:
    """Return the device, or the CPU if the device has no float64."""
    return device if has_float64(device) else torch.device("cpu")


def where_float64_is(x: Tensor) -> Tensor:
    """Return x on its own device or, if that has no float64, on the CPU. The gradient goes back to where x is."""
    return x.to(float64_device(x.device))
