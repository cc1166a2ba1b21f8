"""The embedded set `digits`: real digit scans in random colors on tinted photograph patches, 32x32, ten classes.

Made from what scikit-learn ships (1,797 scans of 8x8 pixels, two photographs), so it needs no download. A digit's class
is hidden from raw pixels by nuisance factors that are drawn independently and recorded:

    background [N]   number of the patch behind the digit              hue      [N]    eighth of the color circle
    colour   [N,3]   color of the digit, 0-255                         position [N,2]  its center (y, x), pixels
    size     [N]     width of the 8x8 scan in the image, pixels        source   [N]    number of the scan
    tint     [N,3]   mean color of the background, 0-255

Train and test share no scan. Every number is a hash of (seed, split, image), and the arithmetic is elementwise, so all
machines make the same pixels. Legend: N images, P patches, D scans.

The texture behind a digit is faint on purpose. At full contrast it would distinguish images so easily that contrastive
learning would keep it and suppress the digit, which is what the audit is about.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from kontrast.counters import integers, permutation, uniform
from kontrast.data.image_set import ImageSet

SIDE = 32
PATCHES = 16
COUNTS = {"train": 6144, "test": 1536}
TEST_SCANS = 360
SIZES = (16.0, 28.0)
SHIFT = 3.5
CONTRAST = 95.0
TEXTURE = 0.12
LUMINANCE = np.array([0.299, 0.587, 0.114])
_SEED = 1797


@lru_cache(maxsize=2)
def digits(split: str = "train") -> ImageSet:
    """The train or test split of the embedded set."""
    scans, labels, photographs = digit_scans()
    order = permutation(len(scans), _SEED)
    pool = order[:TEST_SCANS] if split == "test" else order[TEST_SCANS:]
    count, part = COUNTS[split], int(split == "test")
    source = pool[np.arange(count) % len(pool)]
    images, factors = _render(scans[source], _patches(photographs), part)
    factors["source"] = source
    return ImageSet(
        images=torch.from_numpy(images),
        names=[f"{split}/{labels[s]}/{i:05d}-scan{s:04d}" for i, s in enumerate(source)],
        labels=torch.from_numpy(labels[source]),
        classes=[str(d) for d in range(10)],
        factors={name: torch.from_numpy(values) for name, values in factors.items()},
        name="digits",
        split=split,
        has_test=True,
    )


def digit_scans() -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Scans float64 [D,8,8] in 0..1, labels int64 [D], and the photographs uint8 [H,W,3]."""
    from sklearn.datasets import load_digits, load_sample_image

    data = load_digits()
    photographs = [load_sample_image(name) for name in ("china.jpg", "flower.jpg")]
    return data.images / 16.0, data.target.astype(np.int64), photographs


def _patches(photographs: list[np.ndarray]) -> np.ndarray:
    """float64 [P,32,32,3]: patches of both photographs at half size, at seeded positions, with mean zero."""
    patches = np.empty((PATCHES, SIDE, SIDE, 3))
    halves = [half_size(photograph) for photograph in photographs]
    down, across = uniform(PATCHES, _SEED, 2, 0), uniform(PATCHES, _SEED, 2, 1)
    for number in range(PATCHES):
        photograph = halves[number % len(halves)]
        top = int(down[number] * (photograph.shape[0] - SIDE))
        left = int(across[number] * (photograph.shape[1] - SIDE))
        patches[number] = photograph[top : top + SIDE, left : left + SIDE]
    return patches - patches.mean(axis=(1, 2), keepdims=True)


def half_size(photograph: np.ndarray) -> np.ndarray:
    even = photograph[: photograph.shape[0] // 2 * 2, : photograph.shape[1] // 2 * 2].astype(np.uint16)
    return ((even[::2, ::2] + even[1::2, ::2] + even[::2, 1::2] + even[1::2, 1::2] + 2) // 4).astype(np.uint8)


def _render(scans: np.ndarray, patches: np.ndarray, part: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Images uint8 [N,3,32,32] and the factors they were drawn with."""
    count = len(scans)

    def draw(factor: int) -> np.ndarray:
        return uniform(count, _SEED, 3 + part, factor)

    size = SIZES[0] + (SIZES[1] - SIZES[0]) * draw(0)
    position = (SIDE - 1) / 2 + SHIFT * (2 * np.stack([draw(1), draw(2)], axis=1) - 1)
    background = integers(count, len(patches), _SEED, 3 + part, 3)
    tint = color_of(draw(7), 0.2 + 0.8 * draw(8), 0.2 + 0.8 * draw(9))
    behind = np.clip(tint[:, None, None, :] + TEXTURE * patches[background], 0, 255).astype(np.float32)
    hue = draw(4)
    color = contrasting(color_of(hue, 0.2 + 0.8 * draw(5), 0.2 + 0.8 * draw(6)), tint)
    cover = np.minimum(1.5 * enlarge(scans, position, size), 1.0).astype(np.float32)[..., None]
    mixed = behind + cover * (color[:, None, None, :].astype(np.float32) - behind)
    images = np.floor(mixed + np.float32(0.5)).astype(np.uint8)
    factors = {
        "background": background,
        "hue": (hue * 8).astype(np.int64),
        "colour": np.floor(color + 0.5).astype(np.uint8),
        "tint": np.floor(tint + 0.5).astype(np.uint8),
        "position": position,
        "size": size,
    }
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2)), factors


def color_of(hue: np.ndarray, saturation: np.ndarray, value: np.ndarray) -> np.ndarray:
    """float64 [N,3] in 0..255 from hue, saturation and value in 0..1."""
    sector = (np.array([5.0, 3.0, 1.0]) + hue[:, None] * 6) % 6
    ramp = np.clip(np.minimum(sector, 4 - sector), 0, 1)
    return 255 * value[:, None] * (1 - saturation[:, None] * ramp)


def contrasting(color: np.ndarray, tint: np.ndarray) -> np.ndarray:
    """The color, moved towards white or black until its luminance differs from the tint's by CONTRAST."""
    ground, light = (tint * LUMINANCE).sum(axis=1), (color * LUMINANCE).sum(axis=1)
    # A digit stays lighter or darker than the background, unless the background leaves no room on that side.
    lighter = np.where(ground < CONTRAST + 5, True, np.where(ground > 250 - CONTRAST, False, light > ground))
    goal = np.where(lighter, 255.0, 0.0)
    missing = CONTRAST - np.where(lighter, light - ground, ground - light)
    amount = np.clip(missing / (np.abs(goal - light) + 1e-9), 0, 1)[:, None]
    return color + (goal[:, None] - color) * amount


def enlarge(scans: np.ndarray, position: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Scans [N,8,8] enlarged bilinearly to `size` pixels around `position`: float64 [N,32,32], else zero."""
    framed = np.pad(scans, ((0, 0), (1, 1), (1, 1)))
    rows = np.arange(len(scans))[:, None]
    for axis in (0, 1):
        place = (np.arange(SIDE) - position[:, axis, None]) * (8 / size[:, None]) + 3.5
        below = np.floor(place)
        share = (place - below)[:, :, None]
        first = np.clip(below.astype(np.int64) + 1, 0, 9)
        second = np.clip(below.astype(np.int64) + 2, 0, 9)
        # Interpolate one axis, then swap the axes: after two rounds both are done and in order again.
        framed = (framed[rows, first] * (1 - share) + framed[rows, second] * share).transpose(0, 2, 1)
    return framed
