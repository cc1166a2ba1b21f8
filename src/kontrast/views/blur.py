"""Gaussian blur with one sigma per view: separable, with reflected edges, as torchvision's `gaussian_blur`.

PIL's GaussianBlur(radius=sigma), which MoCo v2 calls, approximates it by three box filters.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def weights(sigma: Tensor, radius: int) -> Tensor:
    """Return Gaussian weights [n, 2 radius + 1] that sum to one."""
    distance = torch.arange(-radius, radius + 1, device=sigma.device, dtype=torch.float32)
    bell = torch.exp(-0.5 * (distance / sigma[:, None]) ** 2)
    return bell / bell.sum(1, keepdim=True)


def blur(planes: list[Tensor], sigma: Tensor, radius: int) -> list[Tensor]:
    """Blur planes [n, h, w] by sigma [n]."""
    bell = weights(sigma, radius)[:, :, None, None]
    return [_blur_axis(_blur_axis(plane, bell, radius, 2), bell, radius, 1) for plane in planes]


def _blur_axis(plane: Tensor, bell: Tensor, radius: int, axis: int) -> Tensor:
    margins = (radius, radius, 0, 0) if axis == 2 else (0, 0, radius, radius)
    padded = pad(plane[:, None], margins, mode="reflect")[:, 0]
    size = plane.shape[axis]
    total = padded.narrow(axis, radius, size) * bell[:, radius]
    for tap in range(radius):  # the bell is symmetric: two taps share a weight
        pair = padded.narrow(axis, tap, size) + padded.narrow(axis, 2 * radius - tap, size)
        total.addcmul_(pair, bell[:, tap])
    return total
