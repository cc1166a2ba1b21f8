"""A counter that advances in the backward pass, for objectives that draw random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kontrast.kernels.dense import in_torch_func


def advance(x: Tensor, step: Tensor) -> Tensor:
    """Return x, and add one to `step` when the gradient of x is computed.

    Calls without a backward pass (evaluation, `terms` after the loss, a numerical check of the gradient) therefore use
    the same draws, and each training step uses new ones, even in a captured graph. The transforms of torch.func leave
    `step` unchanged, because they are for functions without side effects.
    """
    return x if in_torch_func() else _Advance.apply(x, step)


class _Advance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
        ctx.step = step
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.step.add_(1)
        return grads[0], None
