"""Choose rows that stand for all others: the images that are worth labeling first.

N rows, F width, K rows to choose, L rows that are chosen already.  Distances are Euclidean; give unit vectors for
cosines.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kontrast.errors import UsageError

ITERATIONS = 25
ROWS_AT_ONCE = 8_192


def select_diverse(
    rows: Tensor,
    count: int,
    *,
    method: str = "k-means",
    weights: Tensor | None = None,
    chosen: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    """Choose rows that are spread over all of them, in the order in which they were chosen.

    "k-means" clusters the rows into `count` groups around fixed centers at the chosen rows, starting as k-means++ does,
    and takes the row nearest to each center: typical rows, those of the largest group first. "k-center" takes the row
    farthest from all chosen ones, again and again: unusual rows, including outliers (Sener and Savarese, "Active
    learning for convolutional neural networks: a core-set approach").

    Args:
        rows: What to choose from.
        count: K, how many to choose.
        method: "k-means" (default) or "k-center".
        weights: How much each row counts, at least 0; default: all the same.
        chosen: Rows that were chosen earlier, from which the new ones shall differ.
        seed: Seed of the random start.

    Returns:
        The positions of the chosen rows.

    Shape:
        rows: [N,F], weights: [N], chosen: [L,F] -> [K].

    Example:
        >>> rows = torch.tensor([[0.0], [0.1], [5.0], [5.1], [9.0]])
        >>> sorted(select_diverse(rows, 3).tolist())[-1]
        4
    """
    if not 1 <= count <= len(rows):
        raise UsageError(f"count = {count}: give a number from 1 to {len(rows)}, of which to choose")
    if method not in ("k-means", "k-center"):
        raise UsageError(f"unknown method {method!r}: k-means or k-center")
    rows = rows.float()
    weights = torch.ones(len(rows)) if weights is None else weights.float()
    fixed = rows[:0] if chosen is None else chosen.float()
    if method == "k-center":
        return _farthest(rows, count, weights, fixed)
    return _k_means(rows, count, weights, fixed, torch.Generator().manual_seed(seed))


def squared_distances(rows: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared distance of each row to its nearest center [N], and which one that is [N]."""
    if not len(centers):
        return torch.full((len(rows),), torch.inf), torch.full((len(rows),), -1)
    found = [torch.cdist(part, centers).square().min(1) for part in rows.split(ROWS_AT_ONCE)]
    return torch.cat([one.values for one in found]), torch.cat([one.indices for one in found])


def _farthest(rows: Tensor, count: int, weights: Tensor, fixed: Tensor) -> Tensor:
    """Choose the row with the largest weighted distance to the chosen ones; first, without any, the most central."""
    distance, _ = squared_distances(rows, fixed)
    taken: list[int] = []
    if not len(fixed):
        taken.append(int((weights * (rows @ rows.mean(0))).argmax()))
        distance = (rows - rows[taken[0]]).square().sum(1)
    while len(taken) < count:
        score = weights * distance
        score[taken] = -1.0
        taken.append(int(score.argmax()))
        distance = torch.minimum(distance, (rows - rows[taken[-1]]).square().sum(1))
    return torch.tensor(taken)


def _k_means(rows: Tensor, count: int, weights: Tensor, fixed: Tensor, generator: torch.Generator) -> Tensor:
    """Cluster around `count` new centers and the fixed ones; take the row nearest to each new center."""
    centers = rows[_plus_plus(rows, count, weights, fixed, generator)]
    previous = None
    for _ in range(ITERATIONS):
        _, group = squared_distances(rows, torch.cat([fixed, centers]))
        if previous is not None and torch.equal(group, previous):
            break
        previous, own = group, group - len(fixed)
        inside = own >= 0
        mass = torch.zeros(count).index_add_(0, own[inside], weights[inside])
        sums = torch.zeros_like(centers).index_add_(0, own[inside], weights[inside, None] * rows[inside])
        centers = torch.where(mass[:, None] > 0, sums / mass[:, None].clamp_min(1e-12), centers)
    sizes = torch.bincount(previous, minlength=len(fixed) + count)[len(fixed) :]  # type: ignore[arg-type]
    taken: list[int] = []
    for center in sizes.argsort(descending=True, stable=True).tolist():
        distance = (rows - centers[center]).square().sum(1)
        distance[taken] = torch.inf
        taken.append(int(distance.argmin()))
    return torch.tensor(taken)


def _plus_plus(rows: Tensor, count: int, weights: Tensor, fixed: Tensor, generator: torch.Generator) -> Tensor:
    """Draw rows with probabilities proportional to weight times squared distance to the nearest one (k-means++)."""
    distance, _ = squared_distances(rows, fixed)
    taken: list[int] = []
    while len(taken) < count:
        score = weights.double() if not len(fixed) and not taken else (weights * distance).double()
        score[taken] = 0.0
        if not score.sum() > 0:  # the other rows equal chosen ones, or have no weight
            score = torch.ones(len(rows), dtype=torch.float64)
            score[taken] = 0.0
        place = torch.searchsorted(
            score.cumsum(0), torch.rand(1, generator=generator, dtype=torch.float64) * score.sum()
        )
        taken.append(min(int(place), len(rows) - 1))
        distance = torch.minimum(distance, (rows - rows[taken[-1]]).square().sum(1))
    return torch.tensor(taken)
