"""V query views, W key views, N images of all ranks, D width.  standardized [V,B,D]; C [P,D,D] for P pairs of views."""

from __future__ import annotations

import torch

from kontrast import distributed
from kontrast.kernels.covariance import standardize
from kontrast.objectives.arguments import Number, weight
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.link_rows import stack
from kontrast.objectives.pairs import Pairs


@OBJECTIVES.register("barlow-twins")
class BarlowTwins(Objective):
    r"""Correlation between the features of two views, drawn to the identity matrix (Barlow Twins, equation 1).

        C    = correlation over the batch of the features of view 1 with those of view 2
        loss = sum_d (1 - C_dd)^2 + lambda sum_{d != e} C_de^2

    The features of each view are standardized over the images of all ranks. With more than two views, the loss is the
    mean over pairs of views.

    When to use it: if a wide projection is cheap for you and negatives are not wanted: it compares features, not
    images. It needs batches of some hundred images for its correlations and prefers widths of several thousand in its
    paper. The weight lambda depends on the width.

    Reference: Zbontar et al., Barlow Twins: Self-Supervised Learning via Redundancy Reduction, ICML 2021.

    Args:
        off_diagonal_weight: lambda, weight of the correlations between different features, at least 0.

    Shape:
        z [V,B,D] or two views [B,D], keys [W,B,D]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import BarlowTwins
        >>> BarlowTwins()(torch.eye(4), torch.eye(4))
        tensor(0.0068)
    """

    paper = "UniCLR, table 2 (Barlow Twins)"
    equation = r"L = \sum_d (1 - C_{dd})^2 + \lambda \sum_{d \neq e} C_{de}^2"

    def __init__(self, off_diagonal_weight: Number = 0.0051):
        super().__init__(normalize=False)
        self.off_diagonal_weight = weight("off_diagonal_weight", off_diagonal_weight)

    def contrast(self, pairs: Pairs) -> Terms:
        z = standardize(pairs.z, count=pairs.N, total=distributed.total).unbind()
        k = standardize(pairs.k, count=pairs.N, total=distributed.total).unbind() if pairs.teacher else z
        links = pairs.one_way_links()
        left, right = stack([z[v] for v, _ in links]), stack([k[w] for _, w in links])
        C = distributed.total(left.mT @ right) / pairs.N
        squared = (C - torch.eye(pairs.D, dtype=C.dtype, device=C.device)).square()
        diagonal = squared.diagonal(dim1=1, dim2=2).sum()
        return Terms(
            attraction=diagonal / len(links),
            repulsion=self.off_diagonal_weight / len(links) * (squared.sum() - diagonal),
        )
