"""Checks of the tensors that an objective is given.

V views, B images, W views of keys, M rows of the bank, K prototypes, D width.  z [V,B,D], keys [W,B,D], bank [M,D] or
[W,M,D], prototypes [K,D], labels and indices [B].
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from kontrast import distributed
from kontrast.kernels.dense import in_torch_func
from kontrast.kernels.row_statistics import describe, refuse

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

_values_unread: ContextVar[bool] = ContextVar("values_unread", default=False)


class OptionalInputs(TypedDict, total=False):
    """What an objective can be given besides z; `Objective` says what each of them is."""

    keys: Tensor | None
    bank: Tensor | None
    labels: Tensor | None
    prototypes: Tensor | None
    key_prototypes: Tensor | None
    indices: Tensor | None
    global_views: int | None


class Inputs(NamedTuple):
    """The checked tensors of one call. Keys, bank and the teacher's prototypes are detached."""

    z: Tensor
    keys: Tensor | None = None
    bank: Tensor | None = None
    labels: Tensor | None = None
    prototypes: Tensor | None = None
    key_prototypes: Tensor | None = None
    indices: Tensor | None = None
    global_views: int | None = None


def check_inputs(
    z: Tensor, z2: Tensor | None = None,
    keys: Tensor | None = None, bank: Tensor | None = None, labels: Tensor | None = None,
    prototypes: Tensor | None = None, key_prototypes: Tensor | None = None, indices: Tensor | None = None,
    global_views: int | None = None,
) -> Inputs:  # fmt: skip
    """Return the tensors as [V,B,D], [W,B,D], [M,D], [K,D] and [B], or raise ValueError."""
    named = {"z": z, "z2": z2, "keys": keys, "bank": bank, "prototypes": prototypes, "key_prototypes": key_prototypes}
    for name, rows in named.items():
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
        if bank.ndim not in (2, 3) or 0 in bank.shape or bank.shape[-1] != D:
            refuse("bank", bank, f"[M,{D}], the width of z, with at least one row")
    if prototypes is not None and (prototypes.ndim != 2 or len(prototypes) < 2 or prototypes.shape[1] != D):
        refuse("prototypes", prototypes, f"[K,{D}], the width of z, with at least two rows")
    if key_prototypes is not None:
        key_prototypes = key_prototypes.detach()
        if prototypes is None or key_prototypes.shape != prototypes.shape:
            refuse("key_prototypes", key_prototypes, "the shape of prototypes, which must be given too")
    labels, indices = (check_integers(n, x, B) for n, x in (("labels", labels), ("indices", indices)))
    if global_views is not None and not (type(global_views) is int and 2 <= global_views <= V):
        refuse("global_views", global_views, f"the number of global views, from 2 to the {V} views of z")
    # z is checked by its loss, in which every row counts. A bank or a key may be infinitely far away and count nothing.
    check_rows_finite(keys=keys, bank=bank, prototypes=prototypes, key_prototypes=key_prototypes)
    check_equal_on_ranks(z)
    return Inputs(z, keys, bank, labels, prototypes, key_prototypes, indices, global_views)


def check_integers(name: str, given: Tensor | None, B: int) -> Tensor | None:
    """Return one whole number per image as int64."""
    if given is None:
        return None
    if not isinstance(given, Tensor) or given.dtype not in INTEGERS or given.shape != (B,):
        refuse(name, given, f"integers of shape [{B}], one per image")
    return given.long()


def indices_below(count: int, indices: Tensor | None) -> Tensor:
    """Return the indices of images, or raise ValueError if one is negative or not below the number of images."""
    assert indices is not None
    if may_read_values(indices):
        least, most = int(indices.min()), int(indices.max())
        if least < 0 or most >= count:
            refuse("indices", f"from {least} to {most}", f"numbers from 0 to {count - 1}, or a larger images=")
    return indices


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
