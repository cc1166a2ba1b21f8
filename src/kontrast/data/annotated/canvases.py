"""The embedded set `canvases`: two to five digit scans scattered over a tinted photograph patch of 96x96 pixels.

Their boxes, masks and keypoints are exact. Made, like `digits`, from what scikit-learn ships. Train and test share no
scan, the digits of an image don't touch, and every number is a hash of (seed, split, image, digit), so all machines
make the same pixels. A mask has the pixels that its digit covers by half or more; the box is the smallest one around
the mask; the keypoints are the ends of the digit: the middle of its uppermost, lowest, leftmost and rightmost pixels.

Legend: N images, D digits of all images, K of one.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from kontrast.counters import integers, permutation, uniform
from kontrast.data import digits
from kontrast.data.annotated.annotated_images import AnnotatedImages, Keypoints, stored
from kontrast.data.annotated.objects import Objects, boxes_of_masks
from kontrast.data.image_set import ImageSet

SIDE = 96
COUNTS = {"train": 1024, "test": 256}
DIGITS = (2, 5)
SIZES = (14.0, 28.0)
TRIES = 24
"""How often a place is drawn for a digit before it is left out."""
ENDS = Keypoints(("top", "bottom", "left", "right"), (0, 1, 3, 2), (0.05, 0.05, 0.05, 0.05))
_SEED = 9697


@lru_cache(maxsize=2)
def canvases(split: str = "train") -> ImageSet:
    """The images of the embedded canvases, without labels: an image has several digits."""
    images = _draw(split)[0]
    return ImageSet(images, _names(split), name="canvases", split=split, has_test=True)


@lru_cache(maxsize=2)
def canvas_objects(split: str = "train") -> AnnotatedImages:
    """The images of the embedded canvases with their objects.

    Example:
        >>> image, objects = canvas_objects("test").read(0, masks=True)
        >>> image.shape, objects.masks.shape[0] == len(objects.boxes)
        (torch.Size([3, 96, 96]), True)
    """
    images, objects = _draw(split)
    settings = {"split": split, "source": "canvases", "keypoints": ENDS}
    return stored(images, objects, names=_names(split), classes=tuple("0123456789"), **settings)


def _names(split: str) -> list[str]:
    return [f"{split}-{i:05d}.png" for i in range(COUNTS[split])]


@lru_cache(maxsize=2)
def _draw(split: str) -> tuple[torch.Tensor, list[Objects]]:
    scans, labels, photographs = digits.digit_scans()
    order = permutation(len(scans), _SEED)
    pool = order[: digits.TEST_SCANS] if split == "test" else order[digits.TEST_SCANS :]
    count, part = COUNTS[split], int(split == "test")

    def draw(factor: int) -> np.ndarray:
        return uniform(count, _SEED, part, factor)

    tint = digits.color_of(draw(0), 0.2 + 0.8 * draw(1), 0.2 + 0.8 * draw(2))
    behind = tint[:, None, None, :] + digits.TEXTURE * _textures(photographs, draw(3), draw(4))
    images = np.clip(behind, 0, 255).astype(np.float32)
    wanted = DIGITS[0] + integers(count, DIGITS[1] - DIGITS[0] + 1, _SEED, part, 5)
    owner = np.repeat(np.arange(count), wanted)
    tiles, source, colors = _tiles(scans, pool, tint[owner], part)
    objects = []
    for i in range(count):
        rows = np.flatnonzero(owner == i)
        objects.append(_scatter(images[i], tiles[rows], colors[rows], labels[source[rows]], (part, i)))
    pixels = np.floor(images + np.float32(0.5)).astype(np.uint8)
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))), objects


def _textures(photographs: list[np.ndarray], down: np.ndarray, across: np.ndarray) -> np.ndarray:
    """Patches of both photographs at half size, at seeded places, with mean zero: float64 [N,96,96,3]."""
    halves = [digits.half_size(photograph) for photograph in photographs]
    patches = np.empty((len(down), SIDE, SIDE, 3))
    for i in range(len(down)):
        photograph = halves[i % len(halves)]
        top, left = int(down[i] * (photograph.shape[0] - SIDE)), int(across[i] * (photograph.shape[1] - SIDE))
        patches[i] = photograph[top : top + SIDE, left : left + SIDE]
    return patches - patches.mean(axis=(1, 2), keepdims=True)


def _tiles(
    scans: np.ndarray, pool: np.ndarray, tint: np.ndarray, part: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How much each pixel of a tile is covered [D,32,32], the scans that they show [D] and their colors [D,3]."""
    count, side = len(tint), digits.SIDE

    def draw(factor: int) -> np.ndarray:
        return uniform(count, _SEED, part, factor)

    source = pool[integers(count, len(pool), _SEED, part, 10)]
    size = SIZES[0] + (SIZES[1] - SIZES[0]) * draw(11)
    position = (side - 1) / 2 + np.stack([draw(12), draw(13)], axis=1) - 0.5
    cover = np.minimum(1.5 * digits.enlarge(scans[source], position, size), 1.0).astype(np.float32)
    color = digits.contrasting(digits.color_of(draw(14), 0.2 + 0.8 * draw(15), 0.2 + 0.8 * draw(16)), tint)
    return cover, source, color.astype(np.float32)


def _scatter(
    canvas: np.ndarray, tiles: np.ndarray, colors: np.ndarray, labels: np.ndarray, path: tuple[int, int]
) -> Objects:
    """Draw tiles [K,32,32] on a canvas [96,96,3], each at the first of its places where it touches no other."""
    taken = np.zeros((SIDE, SIDE), dtype=bool)
    masks, kept = [], []
    for k, (cover, color) in enumerate(zip(tiles, colors)):
        inked = np.argwhere(cover > 0)
        (up, left), (down, right) = inked.min(0), inked.max(0) + 1
        ink = cover[up:down, left:right, None]
        height, width = ink.shape[:2]
        places = uniform(2 * TRIES, _SEED, *path, 20, k).reshape(TRIES, 2)
        tops, lefts = (places * (SIDE - np.array([height, width]) + 1)).astype(int).T
        for y, x in zip(tops, lefts):
            if not taken[max(0, y - 1) : y + height + 1, max(0, x - 1) : x + width + 1].any():
                taken[y : y + height, x : x + width] = True
                window = canvas[y : y + height, x : x + width]
                window += ink * (color - window)
                mask = np.zeros((SIDE, SIDE), dtype=bool)
                mask[y : y + height, x : x + width] = ink[..., 0] >= 0.5
                masks.append(mask)
                kept.append(k)
                break
    stacked = torch.from_numpy(np.stack(masks))
    ends = torch.stack([_ends(mask) for mask in stacked])
    none, areas = torch.zeros(len(kept), dtype=torch.bool), stacked.flatten(1).sum(1).float()
    return Objects(boxes_of_masks(stacked), torch.from_numpy(labels[kept]), none, stacked, ends, areas)


def _ends(mask: torch.Tensor) -> torch.Tensor:
    """Return the middle of the uppermost, lowest, leftmost and rightmost pixels of a mask [H,W]: [4,3]."""
    y, x = mask.nonzero(as_tuple=True)
    sides = (y == y.min(), y == y.max(), x == x.min(), x == x.max())
    return torch.tensor([[float(x[s].float().mean()) + 0.5, float(y[s].float().mean()) + 0.5, 2.0] for s in sides])
