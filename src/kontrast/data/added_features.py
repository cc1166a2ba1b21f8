"""Images with something added to them when they are read: constant channels, or digits drawn over the picture.

Nothing is stored but what is added, whatever the number and size of the images.

Legend: N images of C channels and H x W pixels (h, w if they differ from image to image), n extra channels, m digits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

OFFSETS = (0.15, 0.45, 0.75)
DIGIT_SHARE = 28 / 224
SMALLEST_DIGIT = 8


def select(images: Any, indices: Tensor) -> Any:
    """The images at these positions, in this order."""
    return images[indices] if isinstance(images, Tensor) else images.select(indices)


def add_features(images: Any, pixels: Tensor, indices: Tensor, sizes: Tensor | None) -> Tensor:
    """Add to stored pixels [B,C,H,W], which were read elsewhere, what these images add to theirs at these indices."""
    return images.joined(pixels, indices, sizes) if isinstance(images, ExtraChannels | DigitOverlay) else pixels


class ExtraChannels:
    """Images with extra channels that are constant over each image, such as random bits.

    Args:
        base: the images [N,C,H,W], or one of the classes that are indexed like them.
        planes: uint8 [N,n], the value of each extra channel; it is expanded to H x W only when a batch is made.
    """

    def __init__(self, base: Any, planes: Tensor):
        self.base, self.planes = base, planes

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: Any) -> Tensor:
        return self._join(self.base[index], self.planes[index])

    def padded(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        images, sizes = self.base.padded(indices)
        return self._join(images, self.planes[indices]), sizes

    def joined(self, pixels: Tensor, indices: Tensor, sizes: Tensor | None) -> Tensor:
        return self._join(add_features(self.base, pixels, indices, sizes), self.planes[indices])

    def images_at(self, indices: Tensor) -> list[Tensor]:
        return [self._join(*pair) for pair in zip(self.base.images_at(indices), self.planes[indices])]

    def to(self, device: torch.device) -> ExtraChannels:
        return ExtraChannels(self.base.to(device), self.planes.to(device))

    def select(self, indices: Tensor) -> ExtraChannels:
        return ExtraChannels(select(self.base, indices), self.planes[indices])

    @staticmethod
    def _join(images: Tensor, planes: Tensor) -> Tensor:
        constant = planes[..., None, None].expand(*planes.shape, *images.shape[-2:])
        return torch.cat([images, constant], dim=-3)


class DigitOverlay:
    """Images with nine copies of a digit over each of them, by maximum, at .15, .45 and .75 of its height and width.

    A copy takes an eighth of the image's shorter side, as 28 of 224 pixels, and at least 8 pixels.

    Args:
        base: the images [N,C,H,W], or one of the classes that are indexed like them, whose images may differ in size.
        scans: uint8 [m,h,w], the digits.
        which: int64 [N], the digit of each image.
        scaled: uint8 [m,side,side], the digits at the size of the copies, if all images have one size.
    """

    def __init__(self, base: Any, scans: Tensor, which: Tensor, scaled: Tensor | None = None):
        self.base, self.scans, self.which, self.scaled = base, scans, which, scaled
        if scaled is None and isinstance(base, Tensor):
            self.scaled = resize(scans, digit_side(*base.shape[-2:]))

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: Any) -> Tensor:
        images, which = self.base[index], self.which[index]
        if images.ndim == 3:
            return self._draw(images[None], which[None])[0]
        return self._draw(images, which)

    def padded(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        images, sizes = self.base.padded(indices)
        return self.joined(images, indices, sizes), sizes

    def joined(self, pixels: Tensor, indices: Tensor, sizes: Tensor | None) -> Tensor:
        if sizes is None:
            return self._draw(pixels, self.which[indices])
        pixels = pixels.clone()
        for row, (height, width), which in zip(pixels, sizes.tolist(), self.which[indices, None]):
            place = row[None, :, :height, :width]  # the rest is padding
            place.copy_(self._draw(place, which))
        return pixels

    def images_at(self, indices: Tensor) -> list[Tensor]:
        pairs = zip(self.base.images_at(indices), self.which[indices, None])
        return [self._draw(image[None], which)[0] for image, which in pairs]

    def to(self, device: torch.device) -> DigitOverlay:
        scaled = None if self.scaled is None else self.scaled.to(device)
        return DigitOverlay(self.base.to(device), self.scans, self.which.to(device), scaled)

    def select(self, indices: Tensor) -> DigitOverlay:
        return DigitOverlay(select(self.base, indices), self.scans, self.which[indices], self.scaled)

    def _draw(self, images: Tensor, which: Tensor) -> Tensor:
        """Draw over images of one size."""
        if self.scaled is not None:
            return draw(images, self.scaled[which])
        return draw(images, resize(self.scans[which], digit_side(*images.shape[-2:])))


def digit_side(height: int, width: int) -> int:
    """The side of a digit on an image of this size, in pixels."""
    shorter = min(height, width)
    return min(shorter, max(SMALLEST_DIGIT, round(shorter * DIGIT_SHARE)))


def draw(images: Tensor, digits: Tensor) -> Tensor:
    """Copies of images [B,C,H,W] with nine copies of digits [B,side,side]."""
    images, (height, width), side = images.clone(), images.shape[-2:], digits.shape[-1]
    for down in OFFSETS:
        for across in OFFSETS:
            top, left = min(int(height * down), height - side), min(int(width * across), width - side)
            place = images[:, :, top : top + side, left : left + side]
            torch.maximum(place, digits[:, None], out=place)
    return images


def resize(scans: Tensor, side: int) -> Tensor:
    """uint8 [n,side,side], antialiased."""
    small = torch.nn.functional.interpolate(scans[:, None].float(), (side, side), mode="bilinear", antialias=True)
    return small[:, 0].round().clamp(0, 255).to(torch.uint8)
