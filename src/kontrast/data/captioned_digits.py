"""Captions of the embedded digits, made from the factors that they were drawn with: digit, color, size and place.

    a small red 3 at the upper left        upper left: small red three

One in eight combinations of a digit and a color is held out: no training image shows it, and `factors["unseen"]` marks
the test images that do. A model that names them right has learned digit and color separately. N images.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from kontrast.data.captions import Captions
from kontrast.data.digits import SIDE, digits
from kontrast.data.image_set import ImageSet

COLORS = ("white", "gray", "black", "red", "yellow", "green", "blue", "purple")
SIZES, PLACES = ("small", "large"), ("upper left", "upper right", "lower left", "lower right")
HUES = (("red", 20), ("yellow", 70), ("green", 165), ("blue", 255), ("purple", 335), ("red", 361))
"""Colors by the largest hue, in degrees, that has their name."""
CHROMA = 50
"""Below this difference of the largest and the smallest of red, green and blue a color is a gray."""
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COMBINATIONS = [f"{color} {digit}" for digit in range(10) for color in COLORS]
"""The names of `factors["combination"]`."""
LARGE = 22.0
"""Pixels from which a digit is large."""
HELD_OUT_OF = 8


@lru_cache(maxsize=2)
def captioned_digits(split: str = "train") -> ImageSet:
    """The embedded digits with two captions each; the train split is without the combinations that are held out."""
    images = digits(split)
    assert images.labels is not None
    label, color = images.labels.numpy(), color_names(images.factors["colour"].numpy().astype(np.int64))
    size, place = size_names(images.factors["size"].numpy()), place_names(images.factors["position"].numpy())
    captions = Captions.of(
        (f"a {s} {c} {d} at the {p}", f"{p}: {s} {c} {WORDS[d]}")
        for d, c, s, p in zip(label.tolist(), color, size, place)
    )
    unseen = torch.from_numpy(held_out_combinations(label, color))
    combination = torch.tensor([d * len(COLORS) + COLORS.index(c) for d, c in zip(label.tolist(), color)])
    factors = {**images.factors, "unseen": unseen, "combination": combination}
    found = ImageSet(
        images.images, images.names, images.labels, images.classes, factors, "digits", split, True, captions=captions
    )
    return found.subset(torch.nonzero(~unseen)[:, 0]) if split == "train" else found


def held_out_combinations(label: np.ndarray, color: list[str]) -> np.ndarray:
    """bool [N]: whether the digit in this color is held out. Each digit lacks one color."""
    number = np.array([COLORS.index(name) for name in color])
    return (3 * label + number) % HELD_OUT_OF == 0


def color_names(rgb: np.ndarray) -> list[str]:
    """The names of colors int64 [N,3]."""
    high, low = rgb.max(axis=1), rgb.min(axis=1)
    chroma = np.maximum(high - low, 1)
    r, g, b = rgb.T
    sector = np.select([high == r, high == g], [(g - b) / chroma % 6, (b - r) / chroma + 2], (r - g) / chroma + 4)
    hue = 60 * sector
    names = []
    for degrees, distance, light in zip(hue.tolist(), (high - low).tolist(), ((high + low) / 2).tolist()):
        if distance < CHROMA:
            names.append("white" if light > 190 else "black" if light < 65 else "gray")
        else:
            names.append(next(name for name, limit in HUES if degrees < limit))
    return names


def size_names(size: np.ndarray) -> list[str]:
    """The names of sizes float64 [N] in pixels."""
    return [SIZES[int(large)] for large in size >= LARGE]


def place_names(position: np.ndarray) -> list[str]:
    """The names of places float64 [N,2], centers (y, x) in pixels."""
    below, right = (position >= (SIDE - 1) / 2).astype(int).T
    return [PLACES[number] for number in 2 * below + right]
