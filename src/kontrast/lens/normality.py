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
    """Per direction [P]: the Kolmogorov-Smirnov distance to N(0,1), 0 to 1, and the excess kurtosis, 0 if normal.

    The distance also measures a shift or a wrong width; the kurtosis measures only the shape.
    """

    distance: Tensor
    kurtosis: Tensor


def random_projections(rows: Tensor, count: int = 16, seed: int = 0) -> Tensor:
    """Project unit rows on random orthogonal directions, times sqrt(D): N(0,1) if they are spread evenly.

    Args:
        rows: Features or projections; they are normalized first.
        count: The number of directions P, at most D.
        seed: Determines the directions.

    Shape:
        rows: [N,D] -> [N,P].

    Example:
        >>> import torch, kontrast
        >>> kontrast.lens.random_projections(torch.eye(32), count=4).shape
        torch.Size([32, 4])
    """
    unit = normalize(rows.double(), dim=1)
    width = unit.shape[1]
    noise = torch.randn(width, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    directions = torch.linalg.qr(noise).Q[:, : min(count, width)]
    return unit @ directions * math.sqrt(width)


def normality(projections: Tensor) -> Normality:
    """Measure how far each column is from N(0,1).

    Args:
        projections: What `random_projections` returns.

    Shape:
        projections: [N,P] -> distance [P] and kurtosis [P].

    Example:
        >>> import torch, kontrast
        >>> even = torch.special.ndtri(torch.linspace(0.001, 0.999, 999, dtype=torch.float64))
        >>> kontrast.lens.normality(even[:, None]).distance.item() < 0.01
        True
    """
    x = projections.sort(0).values
    share = torch.arange(1, len(x) + 1, dtype=x.dtype)[:, None] / len(x)
    normal = torch.special.ndtr(x)
    distance = torch.maximum((share - normal).amax(0), (normal - share + 1 / len(x)).amax(0))
    centered = x - x.mean(0)
    variance = centered.square().mean(0)
    kurtosis = centered.pow(4).mean(0) / variance.square().clamp_min(1e-30) - 3
    return Normality(distance, kurtosis)
