"""How far the views of one image lie from each other (JCL, figure 3).

n views of an image, B images, F width.  features [n,B,F].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize


class PositiveStatistics(NamedTuple):
    """Per image [B]: the mean cosine over all n x n pairs of its views (a view with itself too, as in the figure), the
    mean cosine over pairs of different views, and the views' variance, averaged over dimensions."""

    cosine: Tensor
    other_views: Tensor
    variance: Tensor


def positive_statistics(features: Tensor) -> PositiveStatistics:
    """Measure how far the views of each image lie from each other, on L2-normalized features.

    For unit vectors and a covariance with 1/n, mean cosine = 1 - F x mean diagonal of the covariance, so the two
    panels of JCL's figure show the same.

    Args:
        features: Features of two or more views of each image.

    Shape:
        features: [n,B,F] -> three tensors [B].

    Example:
        >>> import torch, kontrast
        >>> kontrast.lens.positive_statistics(torch.ones(2, 3, 4)).cosine
        tensor([1., 1., 1.], dtype=torch.float64)
    """
    n = features.shape[0]
    if n < 2:
        raise ValueError(f"give at least 2 views of each image to compare, given features {list(features.shape)}")
    unit = normalize(features.double(), dim=-1)
    cosines = torch.einsum("ibf,jbf->bij", unit, unit)
    own = cosines.diagonal(dim1=1, dim2=2).sum(1)
    total = cosines.sum((1, 2))
    variance = unit.var(0, correction=0).mean(-1)
    return PositiveStatistics(total / n**2, (total - own) / (n * (n - 1)), variance)
