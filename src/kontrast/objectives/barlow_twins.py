"""V query views, W key views, N images of all ranks, D width.  standardized [B,D], C [D,D]."""

from __future__ import annotations

import torch
from torch import Tensor

from kontrast import distributed
from kontrast.objectives.arguments import Number, weight
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.pairs import Pairs


@OBJECTIVES.register("barlow-twins")
class BarlowTwins(Objective):
    r"""Correlation between the features of two views, drawn to the identity matrix (Barlow Twins, equation 1).

        C    = correlation over the batch of the features of view 1 with those of view 2
        loss = sum_d (1 - C_dd)^2 + lambda sum_{d != e} C_de^2

    The features of each view are standardized over the images of all ranks. With more than two views, the loss is the
    mean over pairs of views.

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

    def __init__(self, off_diagonal_weight: Number = 0.0051):
        super().__init__(normalize=False)
        self.off_diagonal_weight = weight("off_diagonal_weight", off_diagonal_weight)

    def contrast(self, pairs: Pairs) -> Terms:
        z = [self.standardize(x, pairs.N) for x in pairs.z]
        k = [self.standardize(x, pairs.N) for x in pairs.k] if pairs.teacher else z
        links = pairs.one_way_links()
        C = torch.stack([distributed.total(z[v].T @ k[w]) / pairs.N for v, w in links])
        diagonal = C.diagonal(dim1=1, dim2=2)
        off_diagonal = C - torch.diag_embed(diagonal)
        return Terms(
            attraction=(1 - diagonal).square().sum() / len(links),
            repulsion=self.off_diagonal_weight * off_diagonal.square().sum() / len(links),
        )

    def standardize(self, x: Tensor, N: int) -> Tensor:
        """Scale features to mean 0 and variance 1 over all images, like batch normalization (eps 1e-5)."""
        centered = x - distributed.total(x.sum(0)) / N
        return centered * torch.rsqrt(distributed.total(centered.square().sum(0)) / N + 1e-5)
