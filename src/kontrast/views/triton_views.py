"""Launch the fused kernels, which make views of uint8 images on a CUDA device without waiting for the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from kontrast.views import triton_draws, triton_kernels
from kontrast.views.policies import Policy
from kontrast.views.reference import blur_radius

LANES = 64  # views per program of the draws
WHOLE = 64  # up to this size one program makes a whole view
WIDEST, PIXELS = 256, 1024  # of the tiles of larger views: wide ones, because rows are contiguous in memory
THREAD = 8  # pixels per thread


def draw(rows: Tensor, keys: Tensor, sizes: Tensor | None, shape: Sequence[int], size: int, first_view: int) -> Tensor:
    """Return the draws as the kernels read them, float32 [V * B, 24]: fields of `Draws`, means, inverse deviations."""
    total = len(rows) * len(keys)
    parameters = torch.empty((total, triton_draws.PARAMETERS.value), device=keys.device)
    triton_draws.draw_kernel[(triton.cdiv(total, LANES),)](
        keys, keys if sizes is None else sizes, rows, parameters, len(keys), total, first_view, *shape,
        SIZED=sizes is not None, SIZE=size, LANES=LANES, num_warps=2,
    )  # fmt: skip
    return parameters


def render(images: Tensor, sizes: Tensor | None, parameters: Tensor, policies: Sequence[Policy], out: Tensor) -> None:
    """Fill out [V, B, C, h, w] as `reference.render` does."""
    views, batch, channels, size, _ = out.shape
    policy, total = policies[0], views * batch
    colors = policy.picture_channels(channels)
    jitters = any(p.jitter_p and any(p.jitter) for p in policies)
    radius = blur_radius(policies, size)
    high, wide = _tile(size)
    tiles = triton.cdiv(size, high) * triton.cdiv(size, wide)
    split = jitters and tiles > 1
    buffer = out.new_empty((total, colors, size, size) if split or radius else 1, dtype=torch.int16)
    sums = out.new_empty((total, tiles) if split else 1, dtype=torch.float32)
    flat, grid = out.flatten(0, 1), (total * tiles,)
    view, interleaved = (flat, *flat.stride()), colors == 3 and flat.stride()[1::2] == (1, 3)
    tile = {"SIZE": size, "COLORS": colors, "R": high, "Q": wide, "INTERLEAVED": interleaved}
    tile["num_warps"] = max(1, high * wide // (32 * THREAD))
    triton_kernels.view_kernel[grid](
        images, *images.stride(), images if sizes is None else sizes, *images.shape[2:], parameters, batch,
        *view, buffer, sums, SIZED=sizes is not None, CUBIC=policy.interpolation == "bicubic",
        BOXED=policy.crop_scale is not None, JITTERS=jitters, BLURS=radius > 0, WHOLE=tiles == 1, **tile,
    )  # fmt: skip
    if split:
        powers = triton.next_power_of_2(tiles)
        triton_kernels.color_kernel[grid](parameters, *view, buffer, sums, BLURS=radius > 0, SUMS=powers, **tile)
    if radius:
        blurred = torch.empty_like(buffer)
        for source, to, along_rows in ((buffer, blurred, True), (blurred, buffer, False)):
            triton_kernels.blur_kernel[grid](
                parameters, *view, source, to, RADIUS=radius, ALONG_ROWS=along_rows, **tile
            )
    if channels > colors:
        out[:, :, colors:] = images[:, colors:, :1, :1] / 255.0


def _tile(size: int) -> tuple[int, int]:
    """Return rows and columns of a program's tile; each is a power of two."""
    if size <= WHOLE:
        return (triton.next_power_of_2(size),) * 2
    wide = min(WIDEST, triton.next_power_of_2(size))
    return max(1, PIXELS // wide), wide
