"""Numbers of a representation, on mini-batches of one size and at one scale for every method, so that runs compare.

V views, N images, M images of a mini-batch, D width.  rows [N,D] of one view, or z [V,N,D] of several.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kontrast.lens.spectrum import effective_rank
from kontrast.objectives import metrics
from kontrast.registry import DataError

T_MINUS = 2.0
BATCH = 256
ONLINE = 2048


def mini_batches(z: Tensor, size: int) -> list[Tensor]:
    """z [V,N,D] as whole mini-batches [V,M,D]; the rest is left out, and fewer images than M are one batch."""
    size = min(size, z.shape[1])
    return [z[:, start : start + size] for start in range(0, z.shape[1] - size + 1, size)]


def conditional_entropy(rows: Tensor, t_minus: float = T_MINUS, batch: int = BATCH) -> tuple[float, float]:
    """H(X-|X) in nats, the mean over mini-batches, and its maximum ln(M - 1) (CACR, figures 3 to 5)."""
    z = views(rows)
    parts = mini_batches(z, batch)
    value = sum(metrics.conditional_entropy(part, t_minus).item() for part in parts) / len(parts)
    return value, math.log(parts[0].shape[1] - 1)


def coupling(z: Tensor, temperature: float, batch: int) -> Tensor:
    """The coupling multiplier q of every anchor [V,N'], in mini-batches of the size that training had (DCL)."""
    return torch.cat([metrics.coupling_multiplier(part, temperature) for part in mini_batches(z, batch)], dim=1)


def online_numbers(rows: Tensor) -> dict[str, float]:
    """What training may log of rows [N,D] or z [V,N,D]: conditional entropy and its maximum, uniformity, effective
    rank and, of several views, alignment; on at most 2,048 images spread evenly.

    Where several processes train, the numbers of `objectives.metrics` speak of all ranks together and would wait for
    them; a probe is one rank's own work, so there the effective rank alone is given.
    """
    z = views(rows)
    z = z[:, torch.arange(min(ONLINE, z.shape[1])) * z.shape[1] // min(ONLINE, z.shape[1])]
    found = {"effective_rank": effective_rank(z[0])}
    shared = torch.distributed.is_available() and torch.distributed.is_initialized()
    if shared and torch.distributed.get_world_size() > 1:
        return found
    entropy, maximum = conditional_entropy(z)
    found |= {"conditional_entropy": entropy, "conditional_entropy_max": maximum}
    found["uniformity"] = metrics.uniformity(z).item()
    if len(z) > 1:
        found["alignment"] = metrics.alignment(z).item()
    return found


def class_cosines(rows: Tensor, labels: Tensor) -> tuple[float, float]:
    """Mean cosine of two images of one class, and of two of different classes; NaN where there is no such pair."""
    unit = normalize(rows.double(), dim=1)
    _, groups = torch.unique(labels, return_inverse=True)
    sums = unit.new_zeros(int(groups.max()) + 1, unit.shape[1]).index_add(0, groups, unit)
    sizes = torch.bincount(groups).double()
    own = unit.square().sum()  # a row with itself is no pair
    within, pairs = sums.square().sum() - own, (sizes * (sizes - 1)).sum()
    between = sums.sum(0).square().sum() - sums.square().sum()
    return (within / pairs).item(), (between / (len(unit) * (len(unit) - 1) - pairs)).item()


def views(rows: Tensor) -> Tensor:
    """z [V,N,D] whatever was given; at least two images, since every number compares images."""
    z = rows[None] if rows.ndim == 2 else rows
    if z.ndim != 3 or z.shape[1] < 2:
        raise DataError(f"the lens needs rows [N,D] or [V,N,D] of at least 2 images, given {list(rows.shape)}")
    return z.detach().float()
