"""Launch the Triton kernels for unit rows and similarities.

V query views, W key views, B images, D width, L pairs of views.  z [V,B,D], keys [W,B,D], similarities [L,B].
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kontrast.kernels import triton_unit as kernels
from kontrast.kernels.triton_fast_launch import FastKernel
from kontrast.kernels.triton_operands import ceil_div, power_of_two

UNIT_FORWARD, UNIT_BACKWARD = FastKernel(kernels.unit_forward), FastKernel(kernels.unit_backward)


@functools.cache
def block_sizes(B: int, D: int) -> tuple[int, dict[str, Any]]:
    """Return the number of programs per view, and the block sizes: about 512 numbers per program."""
    width = power_of_two(D)
    block = max(1, 512 // width)
    return ceil_div(B, block), {"BLOCK": block, "BLOCK_D": width, "num_warps": 4 if width * block <= 1024 else 8}


def triton_unit_forward(z: Tensor, keys: Tensor | None, normalize: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return unit rows of z and of the keys, and the similarities. Rows that are not normalized are views."""
    V, B, D = z.shape
    W = V if keys is None else keys.shape[0]
    units = torch.empty_like(z) if normalize else z.view_as(z)
    key_units = None
    if keys is not None:
        key_units = torch.empty_like(keys, dtype=z.dtype) if normalize else keys.to(z.dtype)
    pairs = V * (V - 1) // 2 if keys is None else V * W
    similarities = z.new_empty(pairs, B, dtype=torch.float32)
    programs, blocks = block_sizes(B, D)
    arguments = [
        z, z if keys is None else keys, units, units if key_units is None else key_units, similarities, V, W, B, D,
    ]  # fmt: skip
    constants = {"TEACHER": keys is not None, "NORMALIZE": normalize, **blocks}
    UNIT_FORWARD.launch((programs, 1, 1), D, arguments, constants)
    return units, key_units, similarities


class LinkGradients(NamedTuple):
    """Gradients through the similarity [L,B] of each link's two views, at a scale.

    The similarity may count in the statistics `others` of the link, and the attraction is -scale times the similarity:
    both [P,B], with their gradients. `kind` says which links.
    """

    similarities: Tensor
    others: Tensor
    grad_others: Tensor | None
    grad_attraction: Tensor | None
    scale: float
    kind: int


def triton_unit_backward(
    z: Tensor, keys: Tensor | None, grad_units: Tensor | None, grad_similarities: Tensor | None, normalize: bool,
    links: LinkGradients | None = None,
) -> Tensor:  # fmt: skip
    """Return the gradient of z."""
    V, B, D = z.shape
    grad_others, grad_attraction = (None, None) if links is None else (links.grad_others, links.grad_attraction)
    out = torch.empty_like(z)
    programs, blocks = block_sizes(B, D)
    strides = (0, 0) if grad_similarities is None else grad_similarities.stride()
    arguments = [
        z, z if keys is None else keys, z if grad_units is None else grad_units.contiguous(),
        z if grad_similarities is None else grad_similarities,
        *((z, z) if links is None else links[:2]), z if grad_others is None else grad_others,
        z if grad_attraction is None else grad_attraction, out,
        V, V if keys is None else keys.shape[0], B, D, 0.0 if links is None else links.scale,
        *strides, *((0, 0) if grad_others is None else grad_others.stride()),
        *((0, 0) if grad_attraction is None else grad_attraction.stride()),
    ]  # fmt: skip
    constants = {
        "HAS_UNITS": grad_units is not None, "HAS_SIMILARITIES": grad_similarities is not None,
        "POSITIVE": grad_others is not None, "ATTRACTION": grad_attraction is not None,
        "LINKS": 0 if links is None else links.kind, "TEACHER": keys is not None, "NORMALIZE": normalize, **blocks,
    }  # fmt: skip
    UNIT_BACKWARD.launch((programs, V, 1), D, arguments, constants)
    return out
