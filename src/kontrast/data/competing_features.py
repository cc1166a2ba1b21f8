"""Competing features (paper GCL): easy information added to images, to see which features an objective suppresses.

What is added depends only on the image's index, its split and a seed, so all views and epochs agree.
Legend: N images, C channels, H x W pixels, n bits or digits.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from kontrast.counters import integers, words
from kontrast.data.added_features import SMALLEST_DIGIT, DigitOverlay, ExtraChannels
from kontrast.data.image_set import ImageSet
from kontrast.errors import DataError, UsageError

_BITS, _DIGIT, _BINARY = 0xB175, 0xD161, 0xB1A2


def bits_of(index: Tensor, bits: int, seed: int = 0, part: tuple[int, ...] = ()) -> Tensor:
    """uint8 [N,n] of 0 and 1: a seeded hash of each index; all values of n bits are equally likely."""
    hashed = words(index.numpy(), seed, _BITS, *part)
    shifts = np.arange(bits, dtype=np.uint64)
    return torch.from_numpy(((hashed[:, None] >> shifts) & np.uint64(1)).astype(np.uint8))


def random_bits(images: ImageSet, bits: int, seed: int = 0) -> ImageSet:
    """RandBit: add n constant channels of 0 or 255, which views leave unchanged."""
    planes = 255 * bits_of(images.numbers(), bits, seed, _split_key(images))
    factors = {**images.factors, "bits": planes // 255}
    return dataclasses.replace(images, images=ExtraChannels(images.images, planes), factors=factors)


def overlay_digits(
    images: ImageSet,
    unique: int | None,
    seed: int = 0,
    digits: tuple[Tensor, Tensor] | None = None,
    root: str | None = None,
) -> ImageSet:
    """DigitOnImageNet: put nine copies of one digit on each image when it is read, as `DigitOverlay` says.

    Args:
        images: the images, which may differ in size.
        unique: how many different digits there are; None for all. The index of an image decides which one it gets.
        seed: decides too.
        digits: (uint8 [n,h,w], labels [n]); default: the first n digits of MNIST if its files are found, else of
            scikit-learn's scans.
        root: where MNIST's files are looked for.
    """
    scans, classes = digits if digits is not None else first_digits(unique, root)
    unique = len(scans) if unique is None else unique
    if not 1 <= unique <= len(scans):
        raise UsageError(f"data.overlay_digits is {unique}; allowed: 1 to {len(scans)}")
    drawn = integers(images.numbers().numpy(), unique, seed, _DIGIT, *_split_key(images))
    which = torch.from_numpy(drawn)
    if not images.ragged and min(images.base.shape[-2:]) < SMALLEST_DIGIT:
        height, width = images.base.shape[-2:]
        smallest = f"images of {SMALLEST_DIGIT} pixels or more"
        raise DataError(f"data.overlay_digits needs {smallest}: these have {width} x {height}")
    factors = {**images.factors, "overlay": which, "overlay_class": classes[which]}
    return dataclasses.replace(images, images=DigitOverlay(images.images, scans[:unique], which), factors=factors)


def _split_key(images: ImageSet) -> tuple[int, ...]:
    """Makes the hash depend on the split. Otherwise the test image of an index would get what the train image of that
    index gets, which in a folder sorted by class gives the class away."""
    return (1,) if images.split == "test" else ()


def first_digits(count: int | None, root: str | None = None) -> tuple[Tensor, Tensor]:
    """The first digits uint8 [n,h,w] of MNIST's train split, or of scikit-learn's 1,797 scans, and their labels."""
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
    """Images for the saturation study: k channels, each all 0 or all 255, which is k bits of entropy."""
    index = torch.arange(count)
    planes = 255 * bits_of(index, bits, seed + _BINARY)
    pixels = planes[:, :, None, None].expand(count, bits, size, size)
    names = [f"{i:06d}" for i in range(count)]
    return ImageSet(images=pixels, names=names, factors={"bits": planes // 255}, name=f"binary-{bits}", index=index)
