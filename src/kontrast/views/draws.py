"""The random draws of the views: pure functions of (key, view, slot), the same on every device and in every order.

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

ORDERS = tuple(itertools.permutations(range(4)))  # brightness 0, contrast 1, saturation 2, hue 3
ORDER_CODES = [sum(operation << 2 * place for place, operation in enumerate(order)) for order in ORDERS]
ORDER_WORDS = [sum(code << 8 * i for i, code in enumerate(ORDER_CODES[w : w + 6])) for w in (0, 6, 12, 18)]


class Draws(NamedTuple):
    """Everything random about a batch of views. Each field is float32 [V, B] unless noted.

    Example:
        >>> drawn = draw([Policy()], keys(0, 0, torch.arange(5)), sizes=torch.full((5, 2), 64), size=32)
        >>> drawn.flip.shape, drawn.flip.dtype
        (torch.Size([1, 5]), torch.bool)
    """

    top: Tensor  # of the crop, in pixels of the image; so are the next three
    left: Tensor
    height: Tensor
    width: Tensor
    flip: Tensor  # bool
    jitter: Tensor  # bool: whether the next four are used
    brightness: Tensor
    contrast: Tensor
    saturation: Tensor
    hue: Tensor
    order: Tensor  # int64: first operation + 4 second + 16 third + 64 fourth; see `operations`
    gray: Tensor  # bool
    blur: Tensor  # bool
    sigma: Tensor
    solarize: Tensor  # bool

    def operations(self) -> Tensor:
        """Return the order of the jitter, int64 [V, B, 4]: 0 brightness, 1 contrast, 2 saturation, 3 hue."""
        return torch.stack([self.order >> shift & 3 for shift in (0, 2, 4, 6)], -1)


def keys(seed: int | Tensor, epoch: int | Tensor, indices: Tensor) -> Tensor:
    """Return one key per image, from which all its random draws follow.

    Args:
        seed: seed of the run; an integer, or a 0-dim int64 tensor for CUDA graphs.
        epoch: the epoch, so that an image looks different in each; an integer or a 0-dim int64 tensor.
        indices: the images' indices in the image set, int64 [B].

    Returns:
        Keys, int64 [B], on the device of the indices.

    Example:
        >>> keys(seed=0, epoch=1, indices=torch.arange(4)).shape
        torch.Size([4])
    """
    if not isinstance(indices, Tensor) or indices.dtype != torch.int64:
        raise UsageError(f"indices must be an int64 tensor, got {getattr(indices, 'dtype', type(indices))}")
    state = torch.zeros_like(indices)
    for part in (seed, epoch, indices):
        state = finalize_tensor(state + signed(GOLDEN) + (signed(part) if isinstance(part, int) else part))
    return state


def bits(keys: Tensor, views: Tensor, slots: Tensor) -> Tensor:
    """Return 24 random bits per (view, image, slot), int64 [V, B, S], from keys [B], view numbers [V], slots [S]."""
    stream = finalize_tensor(keys[None, :] + (views[:, None] + 1) * signed(GOLDEN))
    return finalize_tensor(stream[..., None] + (slots + 1) * signed(GOLDEN)) >> 40 & (1 << 24) - 1


# Columns of the table.
SCALE_LOW, SCALE_SPAN, LOG_LOW, LOG_SPAN, RATIO_LOW, RATIO_HIGH = range(6)
FLIP_P, JITTER_P, GRAY_P, BLUR_P, SOLARIZE_P = range(6, 11)
LOW, SPAN = 11, 16  # five each: brightness, contrast, saturation, hue, sigma
CENTER, FRACTION = 21, 22
NORMAL = 23  # three means, three inverse standard deviations
COLUMNS = 29


def table(policies: Sequence[Policy], device: torch.device | str = "cpu") -> Tensor:
    """Return the policies' numbers as a table, float64 [V, COLUMNS], that is read here and by the fused kernels.

    Each number is rounded to float32: a span times 24 bits is then exact in float64, so that fused multiply-adds can't
    change a draw.
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
    """Draw everything random about the views of B images.

    Args:
        policies: one policy per view.
        keys: one key per image, int64 [B], from `keys`.
        sizes: height and width of each image in pixels, int64 [B, 2].
        size: height and width of the views in pixels.
        first_view: number of the first view.

    Example:
        >>> drawn = draw([Policy(), Policy()], keys(0, 0, torch.arange(3)), torch.full((3, 2), 64), size=32)
        >>> drawn.brightness.shape
        torch.Size([2, 3])
    """
    return draw_rows(table(policies, keys.device), keys, sizes, size, first_view)


def draw_rows(rows: Tensor, keys: Tensor, sizes: Tensor, size: int, first_view: int = 0) -> Draws:
    """Draw as `draw` does, from a `table` that is already on the device."""
    views = torch.arange(first_view, first_view + len(rows), device=keys.device)
    integers = bits(keys, views, torch.arange(SLOTS, device=keys.device))
    uniforms = integers.double() * 2.0**-24

    flip, jitter, gray, blur, solarize = (
        uniforms[..., slot] < rows[:, None, FLIP_P + i] for i, slot in enumerate((FLIP, JITTER, GRAY, BLUR, SOLARIZE))
    )
    *factors, sigma = (
        (rows[:, None, LOW + i] + uniforms[..., slot] * rows[:, None, SPAN + i]).float()
        for i, slot in enumerate((BRIGHTNESS, CONTRAST, SATURATION, HUE, SIGMA))
    )
    order = _order_code(integers[..., ORDER] * len(ORDERS) >> 24)
    box = _boxes(rows, integers, uniforms, sizes)
    box = torch.where(rows[:, None, None, CENTER] > 0, _centers(rows, sizes, size), box).float()
    return Draws._make([*box.unbind(-1), flip, jitter, *factors, order, gray, blur, sigma, solarize])


def _order_code(rank: Tensor) -> Tensor:
    """Return the code of the order with this rank of 24. Each word has six codes, so that no table is read."""
    early, late = (torch.where(rank % 12 < 6, ORDER_WORDS[w], ORDER_WORDS[w + 1]) for w in (0, 2))
    return torch.where(rank < 12, early, late) >> rank % 6 * 8 & 255


def _boxes(rows: Tensor, integers: Tensor, uniforms: Tensor, sizes: Tensor) -> Tensor:
    """Return RandomResizedCrop's boxes (top, left, height, width), float64 [V, B, 4]: the first of ten attempts that
    fits, else the largest centered box with an allowed ratio.

    They are computed in float64, so that a difference in the last bit of exp or sqrt between devices can't move a box.
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
    """Return the boxes that Resize(size / fraction) and CenterCrop(size) read, in source pixels, float64 [V, B, 4]."""
    resized = torch.floor(size / rows[:, FRACTION] + 0.5)[:, None, None]
    shorter = sizes.amin(-1, keepdim=True).double()
    resized = torch.floor(resized * sizes / shorter)  # the longer side is rounded down, as in torchvision
    scale = sizes / resized
    start = torch.round((resized - size) / 2) * scale
    return torch.cat([start, size * scale], -1)
