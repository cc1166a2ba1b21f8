"""Antialiased resampling of one box per image, as in PIL: separable, with a wider filter if the box shrinks.

n images with a box each, C channels, H x W source, h x w view. A box need not lie on whole pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kernel(distance: Tensor, interpolation: str) -> Tensor:
    """Return the filter at a distance >= 0 in units of its scale: triangle, or Keys' cubic with a = -1/2.

    Overwrites its input.
    """
    if interpolation == "bilinear":
        return distance.neg_().add_(1).clamp_(min=0)
    near = (1.5 * distance - 2.5) * distance * distance + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, far).masked_fill_(distance >= 2, 0)


def taps(
    start: Tensor,
    length: Tensor,
    low: Tensor,
    high: Tensor,
    source: int,
    size: int,
    interpolation: str,
    flip: Tensor | None = None,
) -> Tensor:
    """Return weights [n, size, source] that map source pixels to `size` pixels over [start, start + length).

    Only source pixels in [low, high) count. Each row sums to one. `flip` [n] bool reverses the view's pixels.
    """
    scale = length / size
    place = torch.arange(size, device=start.device, dtype=torch.float32) + 0.5
    if flip is None:
        center = start[:, None] + place * scale[:, None]
    else:
        center = start[:, None] + torch.where(flip[:, None], size - place, place) * scale[:, None]
    pixel = torch.arange(source, device=start.device, dtype=torch.float32)
    narrow = 1 / scale.clamp(min=1)[:, None, None]
    weights = kernel(((pixel + 0.5) - center[:, :, None]).mul_(narrow).abs_(), interpolation)
    weights *= ((pixel >= low[:, None]) & (pixel < high[:, None])).float()[:, None, :]
    return weights.mul_(weights.sum(2, keepdim=True).reciprocal_())


def planes(images: Tensor, vertical: Tensor, horizontal: Tensor) -> list[Tensor]:
    """Resample float images [n, C, H, W] by weights [n, h, H] and [n, w, W] to C planes [n, h, w].

    Each channel is a contiguous plane, which makes the color operations fast.
    """
    n, channels, high, wide = images.shape
    rows = torch.bmm(images.reshape(n, channels * high, wide), horizontal.transpose(1, 2)).view(n, channels, high, -1)
    return [torch.bmm(vertical, rows[:, c]) for c in range(channels)]
