"""Chance as a pure function: every draw is a hash of (key, view, slot), the same on every device and in every order.

V views, B images, S slots. Keys are int64 [B]; a draw is 24 bits, as an integer or as a uniform float in [0, 1).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kontrast.counters import GOLDEN, finalize_tensor, signed
from kontrast.errors import UsageError
from kontrast.views.policies import Policy

ATTEMPTS = 10
AREA, RATIO, TOP, LEFT, FLIP = 0, ATTEMPTS, 2 * ATTEMPTS, 2 * ATTEMPTS + 1, 2 * ATTEMPTS + 2
JITTER, BRIGHTNESS, CONTRAST, SATURATION, HUE, ORDER, GRAY, BLUR, SIGMA, SOLARIZE = range(FLIP + 1, FLIP + 11)
SLOTS = SOLARIZE + 1

ORDERS = tuple(itertools.permutations(range(4)))  # of brightness 0, contrast 1, saturation 2, hue 3
ORDER_CODES = [sum(operation << 2 * place for place, operation in enumerate(order)) for order in ORDERS]
ORDER_WORDS = [sum(code << 8 * i for i, code in enumerate(ORDER_CODES[w : w + 6])) for w in (0, 6, 12, 18)]


class Draws(NamedTuple):
    """All that chance decides about a batch of views; each [V, B] float32 unless said."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor
    flip: Tensor  # bool
    jitter: Tensor  # bool: whether the four factors below are used
    brightness: Tensor
    contrast: Tensor
    saturation: Tensor
    hue: Tensor
    order: Tensor  # int64: the first operation + 4 second + 16 third + 64 fourth; see `operations`
    gray: Tensor  # bool
    blur: Tensor  # bool
    sigma: Tensor
    solarize: Tensor  # bool

    def operations(self) -> Tensor:
        """The jitter's order as torchvision has it, int64 [V, B, 4]: 0 brightness, 1 contrast, 2 saturation, 3 hue."""
        return torch.stack([self.order >> shift & 3 for shift in (0, 2, 4, 6)], -1)


def keys(seed: int | Tensor, epoch: int | Tensor, indices: Tensor) -> Tensor:
    """One int64 key an image from (seed, epoch, index), [B]. Seed and epoch may be 0-d int64 tensors, for graphs."""
    if not isinstance(indices, Tensor) or indices.dtype != torch.int64:
        given = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
        raise UsageError(f"keys needs indices as an int64 tensor, got {given}")
    state = torch.zeros_like(indices)
    for part in (seed, epoch, indices):
        state = finalize_tensor(state + signed(GOLDEN) + (signed(part) if isinstance(part, int) else part))
    return state


def bits(keys: Tensor, views: Tensor, slots: Tensor) -> Tensor:
    """24 random bits for each (view, image, slot), int64 [V, B, S], from keys [B], view numbers [V] and slots [S]."""
    stream = finalize_tensor(keys[None, :] + (views[:, None] + 1) * signed(GOLDEN))
    return finalize_tensor(stream[..., None] + (slots + 1) * signed(GOLDEN)) >> 40 & (1 << 24) - 1


# columns of the table
SCALE_LOW, SCALE_SPAN, LOG_LOW, LOG_SPAN, RATIO_LOW, RATIO_HIGH = range(6)
FLIP_P, JITTER_P, GRAY_P, BLUR_P, SOLARIZE_P = range(6, 11)
LOW, SPAN = 11, 16  # brightness, contrast, saturation, hue, sigma
CENTRE, FRACTION = 21, 22
NORMAL = 23  # three means, three of one over the standard deviation
COLUMNS = 29


def table(policies: Sequence[Policy], device: torch.device | str = "cpu") -> Tensor:
    """The numbers that chance is scaled by, float64 [V, COLUMNS]; one row a view, read here and by the fused kernels.

    Each is a float32: a span times 24 bits is then exact in float64, so that fused multiply-adds can't change a draw.
    """
    rows = []
    for p in policies:
        scale, ratio = p.crop_scale or (1.0, 1.0), p.crop_ratio
        crop = [scale[0], scale[1] - scale[0], math.log(ratio[0]), math.log(ratio[1]) - math.log(ratio[0]), *ratio]
        chances = [p.flip, p.jitter_p if any(p.jitter) else 0.0, p.gray, p.blur, p.solarize]
        low = [max(0.0, 1 - s) for s in p.jitter[:3]] + [-p.jitter[3], p.blur_sigma[0]]
        high = [1 + s for s in p.jitter[:3]] + [p.jitter[3], p.blur_sigma[1]]
        spans = [h - lo for lo, h in zip(low, high)]
        normal = [p.mean[c % len(p.mean)] for c in range(3)] + [1 / p.std[c % len(p.std)] for c in range(3)]
        rows.append([*crop, *chances, *low, *spans, float(p.crop_scale is None), p.center_fraction, *normal])
    return torch.tensor(rows, dtype=torch.float32).double().to(device)


def draw(policies: Sequence[Policy], keys: Tensor, sizes: Tensor, size: int, first_view: int = 0) -> Draws:
    """What chance decides for len(policies) views of B images with (height, width) `sizes` int64 [B, 2]."""
    rows = table(policies, keys.device)
    return draw_rows(rows, keys, sizes, size, first_view)


def draw_rows(rows: Tensor, keys: Tensor, sizes: Tensor, size: int, first_view: int = 0) -> Draws:
    """`draw` from a prepared `table`, so that nothing moves from host to device."""
    views = torch.arange(first_view, first_view + len(rows), device=keys.device)
    integers = bits(keys, views, torch.arange(SLOTS, device=keys.device))
    uniforms = integers.double() * 2.0**-24

    def happens(slot: int, column: int) -> Tensor:
        return uniforms[..., slot] < rows[:, None, column]

    def within(slot: int, column: int) -> Tensor:
        return (rows[:, None, LOW + column] + uniforms[..., slot] * rows[:, None, SPAN + column]).float()

    box = _boxes(rows, integers, uniforms, sizes)
    box = torch.where(rows[:, None, None, CENTRE] > 0, _centers(rows, sizes, size), box)
    top, left, height, width = box.float().unbind(-1)
    return Draws(
        top,
        left,
        height,
        width,
        flip=happens(FLIP, FLIP_P),
        jitter=happens(JITTER, JITTER_P),
        brightness=within(BRIGHTNESS, 0),
        contrast=within(CONTRAST, 1),
        saturation=within(SATURATION, 2),
        hue=within(HUE, 3),
        order=_order_code(integers[..., ORDER] * len(ORDERS) >> 24),
        gray=happens(GRAY, GRAY_P),
        blur=happens(BLUR, BLUR_P),
        sigma=within(SIGMA, 4),
        solarize=happens(SOLARIZE, SOLARIZE_P),
    )


def _order_code(rank: Tensor) -> Tensor:
    """The code of the order with this rank of 24. Six codes lie in each word: nothing is looked up in memory."""
    early, late = (torch.where(rank % 12 < 6, ORDER_WORDS[w], ORDER_WORDS[w + 1]) for w in (0, 2))
    return torch.where(rank < 12, early, late) >> rank % 6 * 8 & 255


def _boxes(rows: Tensor, integers: Tensor, uniforms: Tensor, sizes: Tensor) -> Tensor:
    """RandomResizedCrop's boxes (top, left, height, width), float64 [V, B, 4]: the first of ten attempts that fits.

    In float64, so that a last bit of exp or sqrt that differs between devices can't move a box by a pixel.
    """
    high, wide = sizes[:, 0].double(), sizes[:, 1].double()
    column = rows[:, None, None]
    area = (high * wide)[:, None] * (
        column[..., SCALE_LOW] + uniforms[..., AREA : AREA + ATTEMPTS] * column[..., SCALE_SPAN]
    )
    ratio = torch.exp(column[..., LOG_LOW] + uniforms[..., RATIO : RATIO + ATTEMPTS] * column[..., LOG_SPAN])
    heights, widths = torch.floor(torch.sqrt(area / ratio) + 0.5), torch.floor(torch.sqrt(area * ratio) + 0.5)
    fits = (heights >= 1) & (heights <= high[:, None]) & (widths >= 1) & (widths <= wide[:, None])
    attempts = torch.arange(ATTEMPTS, device=fits.device)
    first = torch.where(fits, attempts, ATTEMPTS - 1).amin(-1, keepdim=True)
    narrow, broad = wide / high < rows[:, None, RATIO_LOW], wide / high > rows[:, None, RATIO_HIGH]
    fallback_height = torch.where(narrow, torch.floor(wide / rows[:, None, RATIO_LOW] + 0.5), high).clamp(min=1)
    fallback_width = torch.where(broad, torch.floor(high * rows[:, None, RATIO_HIGH] + 0.5), wide).clamp(min=1)
    found = fits.any(-1)
    height = torch.where(found, heights.gather(-1, first).squeeze(-1), torch.minimum(fallback_height, high))
    width = torch.where(found, widths.gather(-1, first).squeeze(-1), torch.minimum(fallback_width, wide))
    free_rows, free_columns = (high - height).long(), (wide - width).long()
    top = torch.where(found, integers[..., TOP] * (free_rows + 1) >> 24, free_rows // 2)
    left = torch.where(found, integers[..., LEFT] * (free_columns + 1) >> 24, free_columns // 2)
    return torch.stack([top.double(), left.double(), height, width], -1)


def _centers(rows: Tensor, sizes: Tensor, size: int) -> Tensor:
    """The boxes that Resize(size / fraction) and CenterCrop(size) read, in source pixels, float64 [V, B, 4]."""
    resized = torch.floor(size / rows[:, FRACTION] + 0.5)[:, None, None]
    shorter = sizes.amin(-1, keepdim=True).double()
    resized = torch.floor(resized * sizes / shorter)  # the longer side is cut down to whole pixels, as torchvision's
    scale = sizes / resized
    start = torch.round((resized - size) / 2) * scale
    return torch.cat([start, size * scale], -1)
