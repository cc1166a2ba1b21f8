"""Checks of an objective's tensors: each says what was given and what is needed.

V views, B images, W views of keys, M rows of the bank, D width.  z [V,B,D], keys [W,B,D], bank [M,D], ids [B].
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from kontrast import distributed
from kontrast.kernels.dense import transformed

_unread: ContextVar[bool] = ContextVar("unread", default=False)


class Inputs(NamedTuple):
    """What an objective is given, in its full form; keys and bank carry no gradient."""

    z: Tensor
    keys: Tensor | None
    bank: Tensor | None
    ids: Tensor | None


def checked(z: Tensor, z2: Tensor | None, keys: Tensor | None, bank: Tensor | None, ids: Tensor | None) -> Inputs:
    """The inputs in their full form [V,B,D], [W,B,D], [M,D], [B], or a ValueError."""
    z = stacked(z, z2, with_keys=keys is not None)
    _, B, D = z.shape
    if D == 0:
        raise ValueError(f"z has shape {list(z.shape)}: give a width of at least 1")
    if B * distributed.world() < 2:
        raise ValueError(f"z holds {B} image (shape {list(z.shape)}): give at least 2, contrast needs another image")
    if keys is not None:
        keys = keys_like(z, keys)
    if bank is not None:
        floating("bank", bank)
        if bank.ndim != 2 or bank.shape[0] == 0 or bank.shape[1] != D:
            raise ValueError(f"bank has shape {list(bank.shape)}: give [M,{D}], the width of z, with at least one row")
        bank = bank.detach()
    if ids is not None:
        ids = whole_numbers(ids, B)
    for name, rows in (("z", z), ("keys", keys), ("bank", bank)):
        if rows is not None and may_read(rows) and not finite(rows):
            raise ValueError(f"{name} holds NaN or infinity: give finite numbers")
    alike_on_ranks(z)
    return Inputs(z, keys, bank, ids)


def alike_on_ranks(z: Tensor) -> None:
    """Refuse ranks of different shares, on all of them: counts and means over all images would be wrong."""
    if distributed.world() == 1 or not may_read(z):
        return
    sizes = torch.tensor(z.shape, device=z.device)
    most, least = distributed.greatest(torch.stack([sizes, -sizes])).abs().tolist()
    if most != least:
        raise ValueError(
            f"z has shape {list(z.shape)}, and the ranks' shapes reach from {least} to {most}: give as many images on "
            "every rank, for example by drop_last=True"
        )


def whole_numbers(ids: Tensor, B: int) -> Tensor:
    """One id an image, as int64 [B]."""
    kinds = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    if not isinstance(ids, Tensor) or ids.dtype not in kinds or ids.shape != (B,):
        given = f"{ids.dtype} of shape {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"ids are {given}: give whole numbers, a tensor of shape [{B}], one for each image")
    return ids.long()


def stacked(z: Tensor, z2: Tensor | None, with_keys: bool) -> Tensor:
    """One tensor [V,B,D] from z [V,B,D], from two views [B,D], or, where keys are given, from one view [B,D]."""
    floating("z", z)
    if z2 is not None:
        floating("z2", z2)
        if z.ndim != 2 or z.shape != z2.shape or z.dtype != z2.dtype or z.device != z2.device:
            given = f"{list(z.shape)} {z.dtype} and {list(z2.shape)} {z2.dtype}"
            raise ValueError(f"the two views are {given}: give two of one shape [B,D], type and device")
        z = torch.stack([z, z2])
    elif z.ndim == 2 and with_keys:
        z = z[None]
    if z.ndim != 3 or z.shape[0] == 0:
        raise ValueError(f"z has shape {list(z.shape)}: give [views, images, width], or two tensors [images, width]")
    if z.shape[0] == 1 and not with_keys:
        raise ValueError(f"z holds one view (shape {list(z.shape)}): give at least 2, or teacher keys as keys=")
    return z


def keys_like(z: Tensor, keys: Tensor) -> Tensor:
    """Teacher keys [W,B,D] of the same images, without gradient, in the precision of z."""
    floating("keys", keys)
    keys = keys[None] if keys.ndim == 2 else keys
    V, B, D = z.shape
    if keys.ndim != 3 or keys.shape[0] == 0 or keys.shape[1:] != (B, D):
        raise ValueError(f"keys have shape {list(keys.shape)}: give [W,{B},{D}], the images and width of z")
    if V > 1 and keys.shape[0] == 1:
        raise ValueError(
            f"{V} query views but one key view, the first query's own picture: give keys of at least 2 views"
        )
    return keys.detach()


def finite(x: Tensor) -> bool:
    """Whether all numbers are finite: most often told by their sum, in one pass; it may also be just too large."""
    summed = x.detach().sum(dtype=torch.promote_types(x.dtype, torch.float32))
    return math.isfinite(summed.item()) or bool(torch.isfinite(x).all())


def floating(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        given = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} is {given}: give a floating point tensor")


@contextlib.contextmanager
def unread() -> Iterator[None]:
    """Within, no values are looked at: for a loop that watches its loss itself, without waiting for the device at each
    step, and with all ranks stopping together where one of them alone has the NaN."""
    token = _unread.set(True)
    try:
        yield
    finally:
        _unread.reset(token)


def may_read(x: Tensor) -> bool:
    """Whether values may be looked at: that waits for the device, which compiled and captured graphs can't do."""
    if torch.compiler.is_compiling() or _unread.get() or transformed():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())
