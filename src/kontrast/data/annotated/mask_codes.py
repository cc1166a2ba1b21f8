"""COCO's codes of masks: run lengths, as numbers or as text, and polygons.

A mask [H,W] is read column by column; its run lengths alternate between pixels outside and inside, from outside. Masks
of polygons equal those of COCO's own tools, which AP of masks depends on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

UPSAMPLING = 5
"""COCO draws the outline of a polygon at this multiple of the image's resolution."""


def run_lengths(mask: np.ndarray) -> list[int]:
    """Return the run lengths of a mask.

    Example:
        >>> run_lengths(np.array([[False, True], [True, True]]))
        [1, 3]
    """
    flat = np.concatenate([[False], np.asarray(mask, dtype=bool).ravel(order="F")])
    changes = np.flatnonzero(flat[1:] != flat[:-1])
    return np.diff(np.concatenate([[0], changes, [flat.size - 1]])).tolist()


def mask_of_runs(counts: Sequence[int], height: int, width: int) -> np.ndarray:
    """Return the mask of run lengths; ValueError if they don't cover the image exactly."""
    runs = np.asarray(counts, dtype=np.int64)
    if runs.ndim != 1 or (runs < 0).any() or runs.sum() != height * width:
        raise ValueError(f"run lengths that don't add up to {height} x {width} pixels")
    inside = np.arange(len(runs)) % 2 == 1
    return np.repeat(inside, runs).reshape(width, height).T


def text_of_runs(counts: Sequence[int]) -> str:
    """Write run lengths as COCO's text: differences to the last but one, five bits per character.

    Example:
        >>> text_of_runs([1, 3]), runs_of_text("13")
        ('13', [1, 3])
    """
    characters = []
    for i, count in enumerate(counts):
        value = int(count) - (int(counts[i - 2]) if i > 2 else 0)
        more = True
        while more:
            bits = value & 31
            value >>= 5
            more = value != (-1 if bits & 16 else 0)
            characters.append(chr((bits | (32 if more else 0)) + 48))
    return "".join(characters)


def runs_of_text(text: str) -> list[int]:
    """Read run lengths from COCO's text; ValueError if it ends within a number or has other characters."""
    counts: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or shift > 60:
            raise ValueError("run lengths with characters that COCO's code doesn't have")
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            if bits & 16:
                value -= 1 << shift
            counts.append(value + (counts[-2] if len(counts) > 2 else 0))
            value = shift = 0
    if shift:
        raise ValueError("run lengths that end within a number")
    return counts


def mask_of_polygon(polygon: Sequence[float], height: int, width: int) -> np.ndarray:
    """Return the mask of a polygon x1, y1, x2, y2, ...

    The outline is followed at five times the resolution; where it crosses from one column of pixels to the next, the
    pixels below change from outside to inside or back.
    """
    corners = (UPSAMPLING * np.asarray(polygon, dtype=np.float64).reshape(-1, 2) + 0.5).astype(np.int64)
    x, y = _outline(corners)
    step = np.flatnonzero(x[1:] != x[:-1]) + 1
    across = (np.minimum(x[step], x[step - 1]) + 0.5) / UPSAMPLING - 0.5
    down = (np.minimum(y[step], y[step - 1]) + 0.5) / UPSAMPLING - 0.5
    inside = (np.floor(across) == across) & (across >= 0) & (across <= width - 1)
    rows = np.ceil(np.clip(down[inside], 0, height)).astype(np.int64)
    places = across[inside].astype(np.int64) * height + rows
    changes = np.bincount(places, minlength=height * width + 1)[: height * width]
    return (np.cumsum(changes) % 2 == 1).reshape(width, height).T


def _outline(corners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the points on the edges between corners [K,2], both ends of every edge included."""
    xs, ys = [], []
    for (x0, y0), (x1, y1) in zip(corners, np.roll(corners, -1, axis=0)):
        wide, high = abs(x1 - x0), abs(y1 - y0)
        turned = (wide >= high and x0 > x1) or (wide < high and y0 > y1)
        if turned:
            x0, x1, y0, y1 = x1, x0, y1, y0
        along = np.arange(max(wide, high) + 1)
        along = along[::-1] if turned else along
        if wide >= high:
            xs.append(x0 + along)
            ys.append((y0 + (y1 - y0) / max(wide, 1) * along + 0.5).astype(np.int64))
        else:
            ys.append(y0 + along)
            xs.append((x0 + (x1 - x0) / high * along + 0.5).astype(np.int64))
    return np.concatenate(xs), np.concatenate(ys)


def decode_mask(code: Any, height: int, width: int) -> np.ndarray:
    """Return the mask bool [H,W] of a `segmentation` of COCO JSON; ValueError says what is wrong with it."""
    if isinstance(code, dict):
        counts = code.get("counts")
        if list(code.get("size", ())) != [height, width]:
            raise ValueError(f"a mask of size {code.get('size')} in an image of {height} x {width}")
        if not isinstance(counts, str | list):
            raise ValueError("a mask without run lengths")
        return mask_of_runs(runs_of_text(counts) if isinstance(counts, str) else counts, height, width)
    mask = np.zeros((height, width), dtype=bool)
    for polygon in code:
        mask |= mask_of_polygon(polygon, height, width)
    return mask


def check_code(code: Any, height: int, width: int) -> str:
    """Say what is wrong with a `segmentation`, without decoding polygons; "" if nothing is."""
    if isinstance(code, dict):
        try:
            return "" if decode_mask(code, height, width).any() else "an empty mask"
        except (ValueError, TypeError, OverflowError) as error:
            return str(error)
    if not isinstance(code, list) or not code:
        return "no mask"
    for polygon in code:
        if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
            return "a polygon of fewer than three corners"
        if not all(isinstance(value, int | float) and abs(value) < 1e6 for value in polygon):
            return "a polygon with corners that are not numbers below a million"
    return ""
