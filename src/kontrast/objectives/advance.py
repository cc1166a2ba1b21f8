"""A counter that moves on with the backward pass, for objectives that draw random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kontrast.kernels.dense import transformed


def advance(x: Tensor, step: Tensor) -> Tensor:
    """x; when its gradient is computed, `step` grows by one.

    Calls without a backward pass (evaluation, `terms` after the loss, a numerical check of the gradient) see the same
    draws, and each training step sees new ones, in a captured graph too. torch.func's transforms, of functions that
    change nothing, leave it where it is.
    """
    return x if transformed() else _Advance.apply(x, step)


class _Advance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
        ctx.step = step
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.step.add_(1)
        return grads[0], None
