"""A number of an objective that may be changed between the steps of a captured CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kontrast.float64 import has_float64
from kontrast.objectives.arguments import Number, bits, fixed


def scheduled_number(name: str, check: Callable[[str, Any], Number]) -> property:
    """Return a property that is a float and also sets a buffer on the objective's device, which its formula uses.

    The buffer has the bits of a float64 as int64, because casting the module would round a float. It is not saved: the
    schedule sets it again. A constructor checks its argument with `fixed` before it sets the property, because torch
    would register a parameter instead.

    Args:
        name: the name of the argument.
        check: called with the name and the value, returns the number.
    """
    buffer, stored = f"_{name}", f"{name}_as_float"

    def get(objective: nn.Module) -> float:
        value: float = vars(objective)[stored]
        return value

    def set_both(objective: nn.Module, value: Any) -> None:
        vars(objective)[stored] = number = fixed(name, check(name, value))
        if buffer not in dict(objective.named_buffers(recurse=False)):
            objective.register_buffer(buffer, torch.zeros((), dtype=torch.int64), persistent=False)
        objective.get_buffer(buffer).fill_(bits(number))

    return property(get, set_both)


def on_device(objective: nn.Module, name: str) -> Tensor:
    """Return the present value of a scheduled number as a tensor of shape [], float64 if the device has it."""
    buffer = objective.get_buffer(f"_{name}")
    if not has_float64(buffer.device):  # which captures no graphs either, for which the buffer is
        return torch.full((), getattr(objective, name), dtype=torch.float32, device=buffer.device)
    return buffer.view(torch.float64)
