"""Launches the fused kernels: uint8 images on a CUDA device to views, with no wait for the device and nothing copied to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from kontrast.views import fused_draws, fused_kernels
from kontrast.views.policies import Policy
from kontrast.views.reference import picture_channels

WHOLE = 64  # up to this size one program holds a whole view
LANES = 64  # views a program of the draws
TILE = (32, 32)  # of larger views
WARPS = 4
BLUR_TILE = 32
BLUR_WARPS = 4


def draw(rows: Tensor, keys: Tensor, sizes: Tensor | None, shape: tuple[int, int], size: int, first_view: int) -> Tensor:
    """The draws as the kernels read them, float32 [V * B, 16]: the fields of `Draws` in their order."""
    total = len(rows) * len(keys)
    parameters = torch.empty((total, fused_draws.PARAMETERS.value), device=keys.device)
    grid = (triton.cdiv(total, LANES),)
    fused_draws.draw_kernel[grid](
        keys, keys if sizes is None else sizes, rows, parameters, len(keys), total, first_view, *shape,
        SIZED=sizes is not None, SIZE=size, LANES=LANES, num_warps=2,
    )  # fmt: skip
    return parameters


def render(images: Tensor, sizes: Tensor | None, parameters: Tensor, policies: Sequence[Policy], out: Tensor) -> None:
    """Fills out [V, B, C, h, w] as `reference.render` does."""
    views, batch, channels, size, _ = out.shape
    policy, total = policies[0], views * batch
    colours = picture_channels(policy, channels)
    jitters = any(p.jitter_p and any(p.jitter) for p in policies)
    radius = policy.radius(size) if any(p.blur for p in policies) else 0
    whole = size <= WHOLE
    tile = (triton.next_power_of_2(size),) * 2 if whole else TILE
    tiles = triton.cdiv(size, tile[0]) * triton.cdiv(size, tile[1])
    split = jitters and not whole
    buffer = torch.empty((total, colours, size, size) if split or radius else 1, dtype=torch.int16, device=out.device)
    sums = torch.empty((total, tiles) if split else 1, device=out.device)
    flat = out.flatten(0, 1)
    target = (flat, *flat.stride(), buffer)
    normal = (*_three(policy.mean), *(1 / std for std in _three(policy.std)))
    warps = 2 * WARPS if whole and size > 32 else WARPS
    fused_kernels.view_kernel[(total * tiles,)](
        images, *images.stride(), images if sizes is None else sizes, *images.shape[2:], parameters, batch, *target, sums, *normal,
        SIZED=sizes is not None, SIZE=size, COLOURS=colours, CUBIC=policy.interpolation == "bicubic",
        BOXED=policy.crop_scale is not None, JITTERS=jitters, BLURS=radius > 0, WHOLE=whole, R=tile[0], Q=tile[1], num_warps=warps,
    )  # fmt: skip
    if split:
        fused_kernels.colour_kernel[(total * tiles,)](
            parameters, *target, sums, *normal,
            SIZE=size, COLOURS=colours, BLURS=radius > 0, R=tile[0], Q=tile[1], SUMS=triton.next_power_of_2(tiles), num_warps=WARPS,
        )  # fmt: skip
    if radius:
        grid = (total * triton.cdiv(size, BLUR_TILE) ** 2,)
        edge = triton.next_power_of_2(BLUR_TILE + 2 * radius)
        fused_kernels.blur_kernel[grid](
            parameters, *target, *normal, SIZE=size, COLOURS=colours, RADIUS=radius, T=BLUR_TILE, E=edge, num_warps=BLUR_WARPS
        )
    if channels > colours:
        out[:, :, colours:] = images[:, colours:, :1, :1] / 255.0


def _three(values: Sequence[float]) -> tuple[float, float, float]:
    return tuple(values[c % len(values)] for c in range(3))
