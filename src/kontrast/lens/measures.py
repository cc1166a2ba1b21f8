"""Numbers of a representation, on mini-batches of one size and at one scale for every method, so that runs compare.

V views, N images, M images of a mini-batch, D width.  rows [N,D] of one view, or z [V,N,D] of several.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kontrast.errors import DataError
from kontrast.kernels import row_statistics
from kontrast.objectives import metrics

T_MINUS = 2.0
BATCH = 256


def mini_batches(z: Tensor, size: int) -> list[Tensor]:
    """z [V,N,D] as whole mini-batches [V,M,D], each evenly over the set, which may be sorted by class; what is too few
    for one more is left out, and fewer images than M are one batch."""
    size = min(size, z.shape[1])
    count = z.shape[1] // size
    kept = torch.arange(count * size) * z.shape[1] // (count * size)
    return [z[:, kept[start::count]] for start in range(count)]


def conditional_entropy(rows: Tensor, t_minus: float = T_MINUS, batch: int = BATCH) -> tuple[float, float]:
    """H(X-|X) in nats, the mean over anchors and mini-batches, and its maximum ln(M - 1) (CACR, figures 3 to 5).

    H = lse(a) - a mean(a) at a = 2 t-, over the other images of the same view: `objectives.metrics` has the same of one
    batch over all ranks, but a probe is one rank's own work and must not wait for the others.
    """
    z, a = directions(views(rows)), 2 * t_minus
    parts = [view for part in mini_batches(z, batch) for view in part]
    ids = torch.arange(len(parts[0]), device=z.device)
    found = [row_statistics(part.contiguous(), None, scale=a, query_ids=ids) for part in parts]
    value = sum((rows.lse - a * rows.mean).mean().item() for rows in found) / len(found)
    return value, math.log(len(ids) - 1)


def directions(rows: Tensor) -> Tensor:
    """Rows [...,D] of length one; a row that is zero or not finite becomes zero, so that its cosines are zero."""
    x = torch.where(rows.isfinite().all(-1, keepdim=True), rows, 0.0)
    largest = x.abs().amax(-1, keepdim=True)  # lengths of very large and very small rows are past what float32 can hold
    return normalize(x / torch.where(largest > 0, largest, 1.0), dim=-1)


def coupling(z: Tensor, temperature: float, batch: int) -> Tensor:
    """The coupling multiplier q of every anchor [V,N'], in mini-batches of the size that training had (DCL)."""
    return torch.cat([metrics.coupling_multiplier(part, temperature) for part in mini_batches(z, batch)], dim=1)


def class_cosines(rows: Tensor, labels: Tensor) -> tuple[float, float]:
    """Mean cosine of two images of one class, and of two of different classes; NaN where there is no such pair."""
    unit = normalize(rows.double(), dim=1)
    _, groups = torch.unique(labels, return_inverse=True)
    sums = unit.new_zeros(int(groups.max()) + 1, unit.shape[1]).index_add(0, groups, unit)
    sizes = torch.bincount(groups).double()
    own = unit.square().sum()  # a row with itself is no pair
    within, pairs = sums.square().sum() - own, (sizes * (sizes - 1)).sum()
    between = sums.sum(0).square().sum() - sums.square().sum()
    others = len(unit) * (len(unit) - 1) - pairs
    # Without a pair, rounding may leave a sum beside zero, and its quotient infinite.
    return (within / pairs).item() if pairs else math.nan, (between / others).item() if others else math.nan


def views(rows: Tensor) -> Tensor:
    """z [V,N,D] whatever was given; at least two images, since every number compares images."""
    rows = torch.as_tensor(rows)
    z = rows[None] if rows.ndim == 2 else rows
    if z.ndim != 3 or z.shape[1] < 2:
        raise DataError(f"the lens needs rows [N,D] or [V,N,D] of at least 2 images, given {list(rows.shape)}")
    return z.detach().float()
