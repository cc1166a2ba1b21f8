"""Launch the Triton kernels for unit rows and similarities.

V query views, W key views, B images, D width, L pairs of views.  z [V,B,D], keys [W,B,D], similarities [L,B].
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kontrast.kernels import triton_unit as kernels
from kontrast.kernels.triton_operands import ceil_div, power_of_two
from kontrast.kernels.unit_rows import SHORTEST
from kontrast.kernels.view_links import ALL


@functools.cache
def block_sizes(B: int, D: int) -> tuple[int, dict[str, Any]]:
    """Return the number of programs per view, and the block sizes: about 512 numbers per program."""
    width = power_of_two(D)
    block = max(1, 512 // width)
    return ceil_div(B, block), {"BLOCK": block, "BLOCK_D": width, "num_warps": 4 if width * block <= 1024 else 8}


def triton_unit_forward(
    z: Tensor, keys: Tensor | None, normalize: bool, z2: Tensor | None = None, shortest: float = SHORTEST,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Return unit rows of z and of the keys, and the similarities. Rows that are not normalized are views.

    Two views may be two tensors z and z2 [B,D]; they are normalized. The index of each row's image is written to
    `ids` [V*B] if they are given.
    """
    V, B, D = z.shape if z2 is None else (2, *z.shape)
    W = V if keys is None else keys.shape[0]
    if z2 is not None:
        units = z.new_empty(2, B, D)
    else:
        units = torch.empty_like(z) if normalize else z.view_as(z)
    key_units = None
    if keys is not None:
        key_units = torch.empty_like(keys, dtype=z.dtype) if normalize else keys.to(z.dtype)
    pairs = V * (V - 1) // 2 if keys is None else V * W
    similarities = z.new_empty(pairs, B, dtype=torch.float32)
    launch_units(z, z2, keys, units, key_units, similarities, W, normalize, shortest, ids)
    return units, key_units, similarities


def triton_wide_units(
    z: Tensor, shortest: float, z2: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the unit rows of z [V,B,D], or of z and z2 [B,D], computed in float32.

    Rows that are not longer than `shortest` stay as they are.
    """
    units = torch.empty_like(z, dtype=dtype) if z2 is None else z.new_empty(2, *z.shape, dtype=dtype)
    launch_units(z, z2, None, units, None, units, 0, True, shortest)
    return units


def launch_units(
    z: Tensor, z2: Tensor | None, keys: Tensor | None, units: Tensor, key_units: Tensor | None, similarities: Tensor,
    W: int, normalize: bool, shortest: float, ids: Tensor | None = None,
) -> None:  # fmt: skip
    """Write unit rows, the similarities with W views, and the ids if they are wanted."""
    V, B, D = units.shape
    programs, blocks = block_sizes(B, D)
    arguments = [
        z, z if z2 is None else z2, z if keys is None else keys, units, units if key_units is None else key_units,
        similarities, units if ids is None else ids, V, W, B, D, shortest,
    ]  # fmt: skip
    constants = {
        "PAIRED": z2 is not None, "TEACHER": keys is not None, "NORMALIZE": normalize, "WRITE_IDS": ids is not None,
        **blocks,
    }  # fmt: skip
    kernels.unit_forward[(programs,)](*arguments, **constants)


class LinkGradients(NamedTuple):
    """Gradients through the similarity [L,B] of each link's two views, at a scale.

    The similarity may count in the statistics `others` of the link, and the attraction is -pull times the similarity:
    both [P,B], with their gradients. `kind` says which links.
    """

    similarities: Tensor
    others: Tensor
    grad_others: Tensor | None
    grad_attraction: Tensor | None
    scale: float
    pull: float
    kind: int


NO_LINKS = None, None, 0.0, 0.0, ALL


def triton_unit_backward(
    z: Tensor, keys: Tensor | None, grad_units: Tensor | None, grad_similarities: Tensor | None, normalize: bool,
    links: LinkGradients | None = None, z2: Tensor | None = None, shortest: float = SHORTEST,
) -> Tensor:  # fmt: skip
    """Return the gradient of z [V,B,D]."""
    V, B, D = z.shape if z2 is None else (2, *z.shape)
    similarities, others = (z, z) if links is None else links[:2]
    grad_others, grad_attraction, scale, pull, kind = NO_LINKS if links is None else links[2:]
    out = torch.empty_like(z) if z2 is None else z.new_empty(2, B, D)
    programs, blocks = block_sizes(B, D)
    strides = [x.stride() if x is not None else (0, 0) for x in (grad_similarities, grad_others, grad_attraction)]
    arguments = [
        z, z if z2 is None else z2, z if keys is None else keys, z if grad_units is None else grad_units.contiguous(),
        z if grad_similarities is None else grad_similarities, similarities, others,
        z if grad_others is None else grad_others, z if grad_attraction is None else grad_attraction, out,
        V, V if keys is None else keys.shape[0], B, D, scale, pull, shortest, *strides[0], *strides[1], *strides[2],
    ]  # fmt: skip
    constants = {
        "HAS_UNITS": grad_units is not None, "HAS_SIMILARITIES": grad_similarities is not None,
        "POSITIVE": grad_others is not None, "ATTRACTION": grad_attraction is not None,
        "LINKS": kind, "PAIRED": z2 is not None, "TEACHER": keys is not None, "NORMALIZE": normalize, **blocks,
    }  # fmt: skip
    kernels.unit_backward[(programs, V)](*arguments, **constants)
    return out
