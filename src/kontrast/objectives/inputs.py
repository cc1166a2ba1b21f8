"""Checks of the tensors that an objective is given.

V views, B images, W views of keys, M rows of the bank, D width.  z [V,B,D], keys [W,B,D], bank [M,D], labels [B].
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from kontrast import distributed
from kontrast.kernels.dense import in_torch_func
from kontrast.kernels.row_statistics import describe, refuse

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

_values_unread: ContextVar[bool] = ContextVar("values_unread", default=False)


class Inputs(NamedTuple):
    """The checked tensors of one call. Keys and bank are detached."""

    z: Tensor
    keys: Tensor | None = None
    bank: Tensor | None = None
    labels: Tensor | None = None


def check_inputs(
    z: Tensor, z2: Tensor | None = None,
    keys: Tensor | None = None, bank: Tensor | None = None, labels: Tensor | None = None,
) -> Inputs:  # fmt: skip
    """Return the tensors as [V,B,D], [W,B,D], [M,D] and [B], or raise ValueError."""
    for name, rows in (("z", z), ("z2", z2), ("keys", keys), ("bank", bank)):
        if rows is not None and not (isinstance(rows, Tensor) and rows.is_floating_point()):
            refuse(name, rows, "a floating point tensor")
    z = stack_views(z, z2, with_keys=keys is not None)
    V, B, D = z.shape
    if B * distributed.world() < 2:
        refuse("z", z, "at least 2 images, one and another to repel")
    if keys is not None:
        keys = (keys[None] if keys.ndim == 2 else keys).detach()
        if keys.ndim != 3 or keys.shape[1:] != (B, D) or keys.shape[0] < min(V, 2):
            refuse("keys", keys, f"[W,{B},{D}], the images and width of z, with W at least {min(V, 2)}")
    if bank is not None:
        bank = bank.detach()
        if bank.ndim != 2 or bank.shape[0] == 0 or bank.shape[1] != D:
            refuse("bank", bank, f"[M,{D}], the width of z, with at least one row")
    if labels is not None:
        if not isinstance(labels, Tensor) or labels.dtype not in INTEGERS or labels.shape != (B,):
            refuse("labels", labels, f"integers of shape [{B}], one label per image")
        labels = labels.long()
    # z is checked by its loss, in which every row counts. A bank or a key may be infinitely far away and count nothing.
    check_rows_finite(keys=keys, bank=bank)
    check_equal_on_ranks(z)
    return Inputs(z, keys, bank, labels)


def stack_views(z: Tensor, z2: Tensor | None, with_keys: bool) -> Tensor:
    """Return [V,B,D] from z [V,B,D], from two views [B,D], or, with keys, from one view [B,D]."""
    if z2 is not None:
        if z.ndim != 2 or z.shape != z2.shape or z.dtype != z2.dtype or z.device != z2.device:
            refuse("z2", z2, f"two tensors of the same shape [B,D] and type; z is {describe(z)}")
        z = torch.stack([z, z2])
    elif z.ndim == 2 and with_keys:
        z = z[None]
    if z.ndim != 3 or 0 in z.shape:
        refuse("z", z, "[views, images, width], none of them 0, or two tensors [images, width]")
    if z.shape[0] == 1 and not with_keys:
        refuse("z", z, "at least 2 views, or a teacher's as keys=")
    return z


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


def check_finite(views: Sequence[Tensor | None], *losses: Tensor) -> None:
    """Raise if a loss is not finite because z is not: one number is read, and z only if that number is bad."""
    if may_read_values(losses[0]) and not all(math.isfinite((x.sum() if x.ndim else x).item()) for x in losses):
        for view in views:
            check_rows_finite(z=view)


def check_rows_finite(**named: Tensor | None) -> None:
    for name, rows in named.items():
        if rows is not None and may_read_values(rows) and not all_finite(rows):
            raise ValueError(f"{name} holds NaN or infinity: give finite numbers")


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
