"""How far the views of one image lie from each other (JCL, figure 3).

n views of an image, B images, F width.  features [n,B,F].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize


class PositiveStatistics(NamedTuple):
    """Of each image [B]: the mean cosine over all n x n pairs of its views (a view with itself too, as in the figure),
    the same over pairs of different views, and the mean over dimensions of the views' variance."""

    cosine: Tensor
    other_views: Tensor
    variance: Tensor


def positive_statistics(features: Tensor) -> PositiveStatistics:
    """Statistics of L2-normalised features. For unit vectors and a covariance with 1/n,
    mean cosine = 1 - F x mean diagonal of the covariance: the figure's two panels say the same."""
    n = features.shape[0]
    if n < 2:
        raise ValueError(f"views of one image are compared: give at least 2 of each, given features {features.shape}")
    unit = normalize(features.double(), dim=-1)
    cosines = torch.einsum("ibf,jbf->bij", unit, unit)
    own = cosines.diagonal(dim1=1, dim2=2).sum(1)
    total = cosines.sum((1, 2))
    variance = unit.var(0, correction=0).mean(-1)
    return PositiveStatistics(total / n**2, (total - own) / (n * (n - 1)), variance)
