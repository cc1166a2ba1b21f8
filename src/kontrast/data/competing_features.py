"""Competing features (paper GCL): easy information laid over images, to see what an objective suppresses.

Everything is fixed by an image's stable index, its split and a seed, so both views of an image and every epoch agree.
Legend: N images, C channels, H x W pixels, n bits or digits.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from kontrast.counters import integers, words
from kontrast.data.image_set import ImageSet, WithPlanes
from kontrast.errors import DataError, UsageError

OFFSETS = (0.15, 0.45, 0.75)
DIGIT_SHARE = 28 / 224
SMALLEST_DIGIT = 8
_BITS, _DIGIT, _BINARY = 0xB175, 0xD161, 0xB1A2


def bits_of(index: Tensor, bits: int, seed: int = 0, part: tuple[int, ...] = ()) -> Tensor:
    """uint8 [N,n] of 0 and 1: a seeded hash of each index, every value of n bits equally likely."""
    if not 0 <= bits <= 64:
        raise UsageError(f"random bits are {bits}; allowed: 0 to 64")
    hashed = words(index.numpy(), seed, _BITS, *part)
    shifts = np.arange(bits, dtype=np.uint64)
    return torch.from_numpy(((hashed[:, None] >> shifts) & np.uint64(1)).astype(np.uint8))


def random_bits(images: ImageSet, bits: int, seed: int = 0) -> ImageSet:
    """RandBit: n constant channels of 0 or 255 behind the image's own. Views pass them untouched."""
    planes = 255 * bits_of(images.index, bits, seed, _part(images))  # type: ignore[arg-type]
    factors = {**images.factors, "bits": planes // 255}
    return dataclasses.replace(images, images=WithPlanes(images.images, planes), factors=factors)


def overlay_digits(
    images: ImageSet,
    unique: int | None,
    seed: int = 0,
    digits: tuple[Tensor, Tensor] | None = None,
    root: str | None = None,
) -> ImageSet:
    """DigitOnImageNet: nine copies of one digit by element-wise maximum, at .15, .45 and .75 of height and width.

    unique: how many different digits there are, None for all; each image's is fixed by its index. A copy takes an
    eighth of the shorter side, as 28 of 224, and 8 pixels at least. digits: (uint8 [n,h,w], labels [n]); without, the
    first n of MNIST where its files are (under `root`), else of scikit-learn's scans.
    """
    if images.ragged:
        raise DataError(
            "digit overlay needs images of one size: cut them square, and give data.size=N, the least side of any, "
            "where their sizes differ"
        )
    scans, classes = digits if digits is not None else first_digits(unique, root)
    unique = len(scans) if unique is None else unique
    if not 1 <= unique <= len(scans):
        raise UsageError(f"overlay of {unique} different digits; allowed: 1 to {len(scans)}")
    drawn = integers(images.index.numpy(), unique, seed, _DIGIT, *_part(images))  # type: ignore[union-attr]
    which = torch.from_numpy(drawn)
    pixels = images.images.clone()
    height, width = pixels.shape[-2:]
    if min(height, width) < SMALLEST_DIGIT:
        raise DataError(f"digit overlay needs images of {SMALLEST_DIGIT} pixels or more: these have {width} x {height}")
    side = max(SMALLEST_DIGIT, round(min(height, width) * DIGIT_SHARE))
    small = _shrunk(scans[:unique], side)[which][:, None]
    for down in OFFSETS:
        for across in OFFSETS:
            top, left = min(int(height * down), height - side), min(int(width * across), width - side)
            place = pixels[:, :, top : top + side, left : left + side]
            torch.maximum(place, small, out=place)
    factors = {**images.factors, "overlay": which, "overlay_class": classes[which]}
    return dataclasses.replace(images, images=pixels, factors=factors)


def _part(images: ImageSet) -> tuple[int, ...]:
    """Indices begin at 0 in every split: without the split, a test image would wear what a train image wears, and in
    folders that are ordered by class that tells the class."""
    return (1,) if images.split == "test" else ()


def _shrunk(scans: Tensor, side: int) -> Tensor:
    """uint8 [n,side,side], antialiased."""
    small = torch.nn.functional.interpolate(scans[:, None].float(), (side, side), mode="bilinear", antialias=True)
    return small[:, 0].round().clamp(0, 255).to(torch.uint8)


def first_digits(count: int | None, root: str | None = None) -> tuple[Tensor, Tensor]:
    """The first digits uint8 [n,h,w] of MNIST's training part with their labels, else of scikit-learn's 1,797 scans."""
    from kontrast.data.named_sets import mnist

    try:
        found = mnist("train", root)
        return found.images[:count, 0], found.labels[:count]  # type: ignore[index]
    except DataError:
        from sklearn.datasets import load_digits

        data = load_digits()
        scans = np.floor(data.images[:count] * 255 / 16 + 0.5).astype(np.uint8)
        return torch.from_numpy(scans), torch.from_numpy(data.target[:count].astype(np.int64))


def binary_channels(count: int, bits: int, size: int = 32, seed: int = 0) -> ImageSet:
    """The saturation study's images: k channels of 0 or 255, constant over space: k bits of entropy."""
    if bits < 1:
        raise UsageError(f"binary channels are {bits}; allowed: 1 to 64")
    index = torch.arange(count)
    planes = 255 * bits_of(index, bits, seed + _BINARY)
    pixels = planes[:, :, None, None].expand(count, bits, size, size)
    names = [f"{i:06d}" for i in range(count)]
    return ImageSet(images=pixels, names=names, factors={"bits": planes // 255}, name=f"binary-{bits}", index=index)
