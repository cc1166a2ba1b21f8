"""Checks of the tensors that an objective is given.

V views, B images, W views of keys, M rows of the bank, D width.  z [V,B,D], keys [W,B,D], bank [M,D], labels [B].
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kontrast import distributed
from kontrast.kernels.dense import in_torch_func

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

_values_unread: ContextVar[bool] = ContextVar("values_unread", default=False)


class Inputs(NamedTuple):
    """The checked tensors of one call. Keys and bank are detached."""

    z: Tensor
    keys: Tensor | None = None
    bank: Tensor | None = None
    labels: Tensor | None = None


def check_inputs(
    z: Tensor,
    z2: Tensor | None = None,
    keys: Tensor | None = None,
    bank: Tensor | None = None,
    labels: Tensor | None = None,
) -> Inputs:
    """Return the tensors as [V,B,D], [W,B,D], [M,D] and [B], or raise ValueError."""
    z = stack_views(z, z2, with_keys=keys is not None)
    V, B, D = z.shape
    if D == 0:
        raise ValueError(f"z has shape {list(z.shape)}: give a width of at least 1")
    if B * distributed.world() < 2:
        raise ValueError(f"z holds {B} image (shape {list(z.shape)}): give at least 2, an image and another to repel")
    if keys is not None:
        check_floating("keys", keys)
        keys = (keys[None] if keys.ndim == 2 else keys).detach()
        if keys.ndim != 3 or keys.shape[0] == 0 or keys.shape[1:] != (B, D):
            raise ValueError(f"keys has shape {list(keys.shape)}: give [W,{B},{D}], the images and width of z")
        if V > 1 and keys.shape[0] == 1:
            raise ValueError(f"z has {V} views and there is one key view, of the first: give keys of at least 2 views")
    if bank is not None:
        check_floating("bank", bank)
        if bank.ndim != 2 or bank.shape[0] == 0 or bank.shape[1] != D:
            raise ValueError(f"bank has shape {list(bank.shape)}: give [M,{D}], the width of z, with at least one row")
        bank = bank.detach()
    if labels is not None:
        if not isinstance(labels, Tensor) or labels.dtype not in INTEGERS or labels.shape != (B,):
            raise ValueError(f"labels is {describe(labels)}: give integers of shape [{B}], one label per image")
        labels = labels.long()
    for name, rows in (("z", z), ("keys", keys), ("bank", bank)):
        if rows is not None and may_read_values(rows) and not all_finite(rows):
            raise ValueError(f"{name} holds NaN or infinity: give finite numbers")
    check_equal_on_ranks(z)
    return Inputs(z, keys, bank, labels)


def stack_views(z: Tensor, z2: Tensor | None, with_keys: bool) -> Tensor:
    """Return [V,B,D] from z [V,B,D], from two views [B,D], or, with keys, from one view [B,D]."""
    check_floating("z", z)
    if z2 is not None:
        check_floating("z2", z2)
        if z.ndim != 2 or z.shape != z2.shape or z.dtype != z2.dtype or z.device != z2.device:
            raise ValueError(f"z is {describe(z)} and z2 {describe(z2)}: give two of the same shape [B,D] and type")
        z = torch.stack([z, z2])
    elif z.ndim == 2 and with_keys:
        z = z[None]
    if z.ndim != 3 or z.shape[0] == 0:
        raise ValueError(f"z has shape {list(z.shape)}: give [views, images, width], or two tensors [images, width]")
    if z.shape[0] == 1 and not with_keys:
        raise ValueError(f"z holds one view (shape {list(z.shape)}): give at least 2, or a teacher's as keys=")
    return z


def check_floating(name: str, x: Any) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise ValueError(f"{name} is {describe(x)}: give a floating point tensor")


def describe(x: Any) -> str:
    return f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def check_equal_on_ranks(z: Tensor) -> None:
    """Raise on every rank if the shapes differ: counts and means over all images would be wrong."""
    if distributed.world() == 1 or not may_read_values(z):
        return
    sizes = torch.tensor(z.shape, device=z.device)
    most, least = distributed.greatest(torch.stack([sizes, -sizes])).abs().tolist()
    if most != least:
        raise ValueError(
            f"z has shape {list(z.shape)} here, and between {least} and {most} on the ranks: give every rank the same "
            "number of images, for example with drop_last=True"
        )


def all_finite(x: Tensor) -> bool:
    """Return whether all numbers are finite. Their sum usually shows it in one pass, but it may overflow."""
    summed = x.detach().sum(dtype=torch.promote_types(x.dtype, torch.float32))
    return math.isfinite(summed.item()) or bool(torch.isfinite(x).all())


@contextlib.contextmanager
def values_unread() -> Iterator[None]:
    """Skip the checks that read values, for a training loop that checks its loss itself.

    The loop then need not wait for the device at each step, and all ranks stop together if one of them has a NaN.
    """
    token = _values_unread.set(True)
    try:
        yield
    finally:
        _values_unread.reset(token)


def may_read_values(x: Tensor) -> bool:
    """Return whether values may be read: that waits for the device, which compiled and captured graphs can't do."""
    if torch.compiler.is_compiling() or _values_unread.get() or in_torch_func():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())
