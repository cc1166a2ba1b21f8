"""Numbers of a representation, for every method on mini-batches of one size and at one scale, so that runs compare.

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
    """Split z [V,N,D] into whole mini-batches [V,M,D], each spread evenly over the set, which may be sorted by class.

    A remainder of fewer than M images is dropped; a set of fewer than M images is one batch.
    """
    size = min(size, z.shape[1])
    count = z.shape[1] // size
    kept = torch.arange(count * size) * z.shape[1] // (count * size)
    return [z[:, kept[start::count]] for start in range(count)]


def conditional_entropy(rows: Tensor, t_minus: float = T_MINUS, batch: int = BATCH) -> tuple[float, float]:
    """Return H(X-|X) in nats, the mean over anchors and mini-batches, and its maximum ln(M - 1) (CACR, figures 3 to 5).

        H = lse(a) - a mean(a) at a = 2 t-, over the other images of the same view

    `objectives.metrics.conditional_entropy` is the same for one batch over all ranks; this one must not wait for them.

    Args:
        rows: Features or projections.
        t_minus: The temperature t-; larger values concentrate the weights on near negatives.
        batch: The number of images M of a mini-batch.

    Shape:
        rows: [N,D] or [V,N,D], N at least 2.

    Example:
        >>> import torch, kontrast
        >>> value, maximum = kontrast.lens.conditional_entropy(torch.eye(10))  # all images equally far apart
        >>> round(value, 4) == round(maximum, 4)
        True
    """
    z, a = directions(as_views(rows)), 2 * t_minus
    parts = [view for part in mini_batches(z, batch) for view in part]
    ids = torch.arange(len(parts[0]), device=z.device)
    found = [row_statistics(part.contiguous(), None, scale=a, query_ids=ids) for part in parts]
    value = sum((rows.lse - a * rows.mean).mean().item() for rows in found) / len(found)
    return value, math.log(len(ids) - 1)


def directions(rows: Tensor) -> Tensor:
    """Scale rows [...,D] to length one; a row that is zero or not finite becomes zero, so that its cosines are zero."""
    x = torch.where(rows.isfinite().all(-1, keepdim=True), rows, 0.0)
    largest = x.abs().amax(-1, keepdim=True)  # the length of a very large or very small row does not fit float32
    return normalize(x / torch.where(largest > 0, largest, 1.0), dim=-1)


def coupling(z: Tensor, temperature: float, batch: int) -> Tensor:
    """Return the coupling multiplier q [V,N'] of every anchor, in mini-batches of the training batch size (DCL).

    Args:
        z: Projections of two or more views.
        temperature: tau of the objective.
        batch: The number of images of a mini-batch.

    Shape:
        z: [V,N,D] -> [V,N'], N' = N without the last, incomplete mini-batch.

    Example:
        >>> import torch, kontrast
        >>> kontrast.lens.coupling(torch.eye(8).expand(2, 8, 8), temperature=0.1, batch=4).shape
        torch.Size([2, 8])
    """
    return torch.cat([metrics.coupling_multiplier(part, temperature) for part in mini_batches(z, batch)], dim=1)


def class_cosines(rows: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the mean cosine of two images of one class, and of two of different classes; NaN if no such pair exists.

    Args:
        rows: Features or projections.
        labels: The class number of each row.

    Shape:
        rows: [N,D], labels: [N].

    Example:
        >>> import torch, kontrast
        >>> kontrast.lens.class_cosines(torch.tensor([[1.0, 0], [1, 0], [0, 1]]), torch.tensor([0, 0, 1]))
        (1.0, 0.0)
    """
    unit = normalize(rows.double(), dim=1)
    _, groups = torch.unique(labels, return_inverse=True)
    sums = unit.new_zeros(int(groups.max()) + 1, unit.shape[1]).index_add(0, groups, unit)
    sizes = torch.bincount(groups).double()
    own = unit.square().sum()  # of each row with itself, which is not a pair
    within, pairs = sums.square().sum() - own, (sizes * (sizes - 1)).sum()
    between = sums.sum(0).square().sum() - sums.square().sum()
    others = len(unit) * (len(unit) - 1) - pairs
    # Without a pair, rounding may leave a sum that is not quite zero, and the quotient would be infinite.
    return (within / pairs).item() if pairs else math.nan, (between / others).item() if others else math.nan


def as_views(rows: Tensor) -> Tensor:
    """Return rows [N,D] or [V,N,D] as z [V,N,D]; at least two images, because every number compares images."""
    rows = torch.as_tensor(rows)
    z = rows[None] if rows.ndim == 2 else rows
    if z.ndim != 3 or z.shape[1] < 2:
        raise DataError(f"the lens needs rows [N,D] or [V,N,D] of at least 2 images, given {list(rows.shape)}")
    return z.detach().float()
