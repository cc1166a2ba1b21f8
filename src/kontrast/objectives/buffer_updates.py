"""Buffers that change in the backward pass: a counter of random draws, or a running estimate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kontrast import distributed
from kontrast.kernels.dense import in_torch_func


def advance(x: Tensor, step: Tensor) -> Tensor:
    """Return x, and add one to `step` when the gradient of x is computed.

    Calls without a backward pass (evaluation, `terms` after the loss, a numerical check of the gradient) therefore use
    the same draws, and each training step uses new ones, even in a captured graph. The transforms of torch.func leave
    `step` unchanged, because they are for functions without side effects.
    """
    return x if in_torch_func() else _Advance.apply(x, step)


def update_in_backward(x: Tensor, buffer: Tensor, value: Tensor, places: Tensor | None = None) -> Tensor:
    """Return x, and overwrite a buffer, or its rows at `places`, when the gradient of x is computed.

    So a running estimate follows the training steps alone, and a loss that is only evaluated leaves it unchanged. The
    transforms of torch.func leave it unchanged too.
    """
    return x if in_torch_func() else _Update.apply(x, buffer, value.detach(), places)


def gather_updates(places: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places in a buffer and the new values of all ranks. A repeated place has its last value everywhere.

    So it doesn't matter in which order repeated places are written, which no device promises.

    Shape:
        places [B] and values [B] or [k,B] of each rank; the result [N], and [N] or [k,N].
    """
    if distributed.world() > 1:
        both = torch.cat([places[None].double(), values.double().view(-1, len(places))])  # exact below 2^53
        gathered = distributed.gather(both, dim=1)
        places, values = gathered[0].long(), gathered[1:].view(*values.shape[:-1], -1)
    ordered, order = torch.sort(places, stable=True)
    last = order.index_select(0, torch.searchsorted(ordered, places, right=True) - 1)
    return places, values.index_select(-1, last)


def buffer_on(device: torch.device, objective: nn.Module, name: str) -> Tensor:
    """Return a buffer of the objective on a device, and keep it there if it was on the CPU.

    A captured graph can read and change a buffer on its own device alone, and nothing can be moved there while it is
    captured. The buffer never moves away from such a device, because the graph continues to use its memory.
    """
    buffer = objective.get_buffer(name)
    if buffer.device == device or buffer.device.type != "cpu" or torch.compiler.is_compiling() or in_torch_func():
        return buffer.to(device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{type(objective).__name__} is on the CPU while a CUDA graph is captured: move it to {device}, or call it "
            "once before the capture"
        )
    setattr(objective, name, buffer.to(device))
    return objective.get_buffer(name)


class _Advance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
        ctx.step = step
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.step.add_(1)
        return grads[0], None


class _Update(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor, value: Tensor, places: Tensor | None) -> Tensor:
        ctx.buffer, ctx.value, ctx.places = buffer, value, places
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        value = ctx.value.to(ctx.buffer.dtype)
        if ctx.places is None:
            ctx.buffer.copy_(value)
        else:
            ctx.buffer.index_copy_(0, ctx.places, value)
        return grads[0], None, None, None
