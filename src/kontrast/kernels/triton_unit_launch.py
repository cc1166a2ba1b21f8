"""Launch the Triton kernels for unit rows and similarities.

V query views, W key views, B images, D width, L pairs of views.  z [V,B,D], keys [W,B,D], similarities [L,B].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kontrast.kernels import triton_unit as kernels


def block_sizes(B: int, D: int) -> tuple[int, dict[str, Any]]:
    """Return the number of programs per view, and the block sizes: about 512 numbers per program."""
    width = triton.next_power_of_2(D)
    block = max(1, 512 // width)
    return triton.cdiv(B, block), {"BLOCK": block, "BLOCK_D": width, "num_warps": 4 if width * block <= 1024 else 8}


def triton_unit_forward(z: Tensor, keys: Tensor | None, normalize: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return unit rows of z and of the keys, and the similarities. Rows that are not normalized are views."""
    V, B, D = z.shape
    W = V if keys is None else keys.shape[0]
    units = torch.empty_like(z) if normalize else z.view_as(z)
    key_units = keys if keys is None or not normalize else torch.empty_like(keys)
    pairs = V * (V - 1) // 2 if keys is None else V * W
    similarities = z.new_empty(pairs, B, dtype=torch.float32)
    programs, blocks = block_sizes(B, D)
    kernels.unit_forward[(programs,)](
        z, z if keys is None else keys, units, units if key_units is None else key_units, similarities, V, W, B, D,
        TEACHER=keys is not None, NORMALIZE=normalize, **blocks,
    )  # fmt: skip
    return units, key_units, similarities


class KeptPositives(NamedTuple):
    """Similarities [L,B] that count in the statistics of links: these statistics [P,B], their gradient, the scale."""

    similarities: Tensor
    others: Tensor
    grad: Tensor
    scale: float
    links: int


def triton_unit_backward(
    z: Tensor, keys: Tensor | None, grad_units: Tensor | None, grad_similarities: Tensor | None, normalize: bool,
    kept: KeptPositives | None = None,
) -> Tensor:  # fmt: skip
    """Return the gradient of z."""
    V, B, D = z.shape
    out = torch.empty_like(z)
    programs, blocks = block_sizes(B, D)
    strides = (0, 0) if grad_similarities is None else grad_similarities.stride()
    kernels.unit_backward[(programs, V)](
        z, z if keys is None else keys, z if grad_units is None else grad_units.contiguous(),
        z if grad_similarities is None else grad_similarities,
        *((z, z, z) if kept is None else kept[:3]), out,
        V, V if keys is None else keys.shape[0], B, D, 0.0 if kept is None else kept.scale,
        *strides, *((0, 0) if kept is None else kept.grad.stride()),
        HAS_UNITS=grad_units is not None, HAS_SIMILARITIES=grad_similarities is not None,
        POSITIVE=kept is not None, LINKS=0 if kept is None else kept.links,
        TEACHER=keys is not None, NORMALIZE=normalize, **blocks,
    )  # fmt: skip
    return out
