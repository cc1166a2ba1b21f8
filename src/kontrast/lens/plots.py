"""Plots as plain data, in the form that a report's page draws: lines, bars, histograms and points.

Every plot has an id (the page joins plots of several runs by it), a title that states what to see, axes with their
units, and the numbers themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

BINS = 40


def series(name: str, x: Sequence[float] | Tensor, y: Sequence[float | None] | Tensor) -> dict[str, Any]:
    return {"name": name, "x": _six_digits(x), "y": _six_digits(y)}


def histogram(values: Tensor, bins: int = BINS, span: tuple[float, float] | None = None) -> tuple[Tensor, Tensor]:
    """Return the center of each bin and its share of the values; values outside the span count in the outermost bin."""
    values = values.double().flatten()
    low, high = span or (values.min().item(), values.max().item())
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-9):
        low, high = low - 0.5 * max(abs(low), 1e-6), high + 0.5 * max(abs(high), 1e-6)
    width = (high - low) / bins
    numbers = ((values - low) / width).floor().long().clamp(0, bins - 1)
    shares = torch.bincount(numbers, minlength=bins).double() / len(values)
    return low + width * (torch.arange(bins, dtype=torch.float64) + 0.5), shares


def separate_points(points: Tensor) -> tuple[list[float], list[float | None]]:
    """Return x and y of points [N,2] with a gap after each, so that the page draws no line through them."""
    x, y = [], []
    for point in points.tolist():
        x += [point[0], point[0]]
        y += [point[1], None]
    return x, y


def _six_digits(values: Sequence[float | None] | Tensor) -> list[float | None]:
    plain = values.tolist() if isinstance(values, Tensor) else values
    return [None if v is None or not math.isfinite(v) else float(f"{v:.6g}") for v in plain]
