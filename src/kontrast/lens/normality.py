"""Random orthogonal projections: does a distribution look the same, and normal, from every side? (GCL, figure 3)

N images, D width, P directions.  Unit rows spread evenly over the sphere have projections close to N(0, 1/D).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize


class Normality(NamedTuple):
    """Of each direction [P]: the Kolmogorov-Smirnov distance to N(0,1), 0 to 1, and the excess kurtosis, 0 if normal.

    The distance sees a shift or a wrong width too; the kurtosis sees the shape alone.
    """

    distance: Tensor
    kurtosis: Tensor


def random_projections(rows: Tensor, count: int = 16, seed: int = 0) -> Tensor:
    """Projections [N,P] of unit rows on random orthogonal directions, times sqrt(D): N(0,1) if spread evenly."""
    unit = normalize(rows.double(), dim=1)
    width = unit.shape[1]
    noise = torch.randn(width, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    directions = torch.linalg.qr(noise).Q[:, : min(count, width)]
    return unit @ directions * math.sqrt(width)


def normality(projections: Tensor) -> Normality:
    """How far each column of projections [N,P] is from N(0,1)."""
    x = projections.sort(0).values
    places = torch.arange(1, len(x) + 1, dtype=x.dtype)[:, None] / len(x)
    below = torch.special.ndtr(x)
    distance = torch.maximum((places - below).amax(0), (below - places + 1 / len(x)).amax(0))
    centred = x - x.mean(0)
    variance = centred.square().mean(0)
    kurtosis = centred.pow(4).mean(0) / variance.square().clamp_min(1e-30) - 3
    return Normality(distance, kurtosis)
