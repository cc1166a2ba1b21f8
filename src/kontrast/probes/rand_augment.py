"""RandAugment as vision transformers are fine-tuned with it: operations of random strength, drawn for each image.

B images, C channels.  images [B,3,h,w], red, green and blue from 0 to 1. Each operation treats many images at once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, conv2d, grid_sample

LUMA = (0.2989, 0.587, 0.114)  # red, green and blue in a gray picture, as in torchvision
LAYERS = 2  # operations that an image may go through
PROBABILITY = 0.5  # of each of them
STRONGEST = 10.0  # magnitude
DEVIATION = 0.5  # of the magnitude, which is drawn anew for each operation
DEGREES, SHEAR, SHIFT, BLEND, ADDED = 30.0, 0.3, 0.45, 0.9, 110 / 255  # at the strongest magnitude

Operation = Callable[[Tensor, Tensor], Tensor]
"""operation(images [n,3,h,w], signed strengths [n] from -1 to 1) -> images"""


def rand_augment(images: Tensor, magnitude: float, draws: np.random.Generator, fill: Tensor | None = None) -> Tensor:
    """Apply up to two operations of about this magnitude to each image.

    Args:
        images: the batch.
        magnitude: the mean strength, from 0 to 10.
        draws: the source of randomness.
        fill: the color [3] of what is outside of an image that is turned or moved; default: black.

    Shape:
        - images: [B,3,h,w]
        - output: [B,3,h,w]

    Example:
        >>> images = torch.rand(4, 3, 8, 8)
        >>> changed = rand_augment(images, 9.0, np.random.default_rng(0))
        >>> changed.shape == images.shape, bool(0 <= changed.min() and changed.max() <= 1)
        (True, True)
    """
    color = torch.zeros(3) if fill is None else fill
    color = color.to(images).view(1, 3, 1, 1)
    changed = images.clone()
    for _ in range(LAYERS):
        chosen = draws.integers(len(OPERATIONS), size=len(images))
        chosen[draws.random(len(images)) >= PROBABILITY] = -1
        strength = np.clip(draws.normal(magnitude, DEVIATION, len(images)), 0, STRONGEST) / STRONGEST
        strength *= np.where(draws.random(len(images)) < 0.5, -1, 1)
        for number, operation in enumerate(OPERATIONS.values()):
            rows = torch.from_numpy(np.flatnonzero(chosen == number)).to(images.device)
            if len(rows):
                base = color if operation in MOVING else 0  # they fill with black
                signed = torch.from_numpy(strength[chosen == number]).to(images)
                changed[rows] = (operation(changed[rows] - base, signed) + base).clamp(0, 1)
    return changed


def column(x: Tensor) -> Tensor:
    """[n] -> [n,1,1,1]"""
    return x.view(-1, 1, 1, 1)


def gray(images: Tensor) -> Tensor:
    """[n,3,h,w] -> [n,1,h,w]"""
    return (images * images.new_tensor(LUMA).view(1, 3, 1, 1)).sum(1, keepdim=True)


def levels(x: Tensor) -> Tensor:
    """The 256 levels of 8-bit images."""
    return (255 * x).round()


def blend(images: Tensor, other: Tensor, strength: Tensor) -> Tensor:
    """Move away from another picture by a positive strength, and towards it by a negative one."""
    return (other + column(1 + BLEND * strength) * (images - other)).clamp(0, 1)


def autocontrast(images: Tensor, strength: Tensor) -> Tensor:
    """Stretch each channel to the range from 0 to 1."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return torch.where(high > low, (images - low) / (high - low).clamp_min(1e-12), images)


def equalize(images: Tensor, strength: Tensor) -> Tensor:
    """Make all levels of each channel equally frequent, as far as that is possible."""
    index = levels(images).long().flatten(2).flatten(0, 1)
    counts = torch.zeros(len(index), 256, device=images.device, dtype=torch.int64)
    counts.scatter_add_(1, index, torch.ones_like(index))
    last = counts.gather(1, index.amax(1, keepdim=True))
    width = (index.shape[1] - last).div(255, rounding_mode="floor")
    table = (counts.cumsum(1) - counts + width.div(2, rounding_mode="floor")).div(
        width.clamp_min(1), rounding_mode="floor"
    )
    made = table.clamp(0, 255).gather(1, index).view(images.shape).to(images) / 255
    return torch.where(width.view(*images.shape[:2], 1, 1) > 0, made, images)


def invert(images: Tensor, strength: Tensor) -> Tensor:
    return 1 - images


def posterize(images: Tensor, strength: Tensor) -> Tensor:
    """Keep the highest bits of each level: 4 at no strength, none at the greatest."""
    width = column(2.0 ** (4 + (4 * strength.abs()).floor()))
    return (levels(images) / width).floor() * width / 255


def solarize(images: Tensor, strength: Tensor) -> Tensor:
    """Invert the levels above a threshold, the lower the stronger."""
    return torch.where(levels(images) >= column(256 - (256 * strength.abs()).floor()), 1 - images, images)


def solarize_add(images: Tensor, strength: Tensor) -> Tensor:
    """Make the dark half of the levels lighter."""
    return torch.where(levels(images) < 128, images + ADDED * column(strength.abs()), images).clamp(max=1)


def saturation(images: Tensor, strength: Tensor) -> Tensor:
    return blend(images, gray(images), strength)


def contrast(images: Tensor, strength: Tensor) -> Tensor:
    return blend(images, gray(images).mean((2, 3), keepdim=True), strength)


def brightness(images: Tensor, strength: Tensor) -> Tensor:
    return blend(images, torch.zeros_like(images), strength)


def sharpness(images: Tensor, strength: Tensor) -> Tensor:
    """Blend with a smoothed picture, whose border is that of the image."""
    if min(images.shape[-2:]) < 3:
        return images
    kernel = images.new_tensor([[1.0, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13
    smooth = images.clone()
    smooth[..., 1:-1, 1:-1] = conv2d(images, kernel.expand(3, 1, 3, 3), groups=3)
    return blend(images, smooth, strength)


def move(images: Tensor, matrix: Tensor) -> Tensor:
    """Sample images [n,3,h,w] at places [n,2,3] that are given in pixels from their middle; outside is 0."""
    height, width = images.shape[-2:]
    scale = matrix.new_tensor([[1, height / width, 2 / width], [width / height, 1, 2 / height]])
    places = affine_grid(matrix * scale, list(images.shape), align_corners=False)
    return grid_sample(images, places, mode="bilinear", padding_mode="zeros", align_corners=False)


def placed(strength: Tensor, *rows: tuple[Tensor | float, ...]) -> Tensor:
    """[n,2,3] from two rows of numbers, each of them for all images or [n]."""
    return torch.stack([torch.stack([x + torch.zeros_like(strength) for x in row], 1) for row in rows], 1)


def rotate(images: Tensor, strength: Tensor) -> Tensor:
    angle = torch.deg2rad(DEGREES * strength)
    cos, sin = angle.cos(), angle.sin()
    return move(images, placed(strength, (cos, -sin, 0.0), (sin, cos, 0.0)))


def shear_x(images: Tensor, strength: Tensor) -> Tensor:
    return move(images, placed(strength, (1.0, SHEAR * strength, 0.0), (0.0, 1.0, 0.0)))


def shear_y(images: Tensor, strength: Tensor) -> Tensor:
    return move(images, placed(strength, (1.0, 0.0, 0.0), (SHEAR * strength, 1.0, 0.0)))


def shift_x(images: Tensor, strength: Tensor) -> Tensor:
    return move(images, placed(strength, (1.0, 0.0, SHIFT * images.shape[-1] * strength), (0.0, 1.0, 0.0)))


def shift_y(images: Tensor, strength: Tensor) -> Tensor:
    return move(images, placed(strength, (1.0, 0.0, 0.0), (0.0, 1.0, SHIFT * images.shape[-2] * strength)))


MOVING: tuple[Operation, ...] = (rotate, shear_x, shear_y, shift_x, shift_y)
OPERATIONS: dict[str, Operation] = {
    operation.__name__: operation
    for operation in (
        autocontrast, equalize, invert, posterize, solarize, solarize_add, saturation, contrast, brightness, sharpness,
        *MOVING,
    )
}  # fmt: skip
