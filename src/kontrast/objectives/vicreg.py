"""V query views, W key views, N images of all ranks, D width.  z [V,B,D], covariance [V,D,D]."""

from __future__ import annotations

import torch

from kontrast import distributed
from kontrast.kernels.covariance import mean_and_covariance
from kontrast.objectives.arguments import Number, weight
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.pairs import Pairs


@OBJECTIVES.register("vicreg")
class VICReg(Objective):
    r"""Variance, invariance and covariance of the features (VICReg, equation 6, with the means of its code).

        invariance = mean_{i,d} (z_id - z_id')^2
        variance   = mean over views and d of max(0, 1 - sqrt(var z_d + 1e-4))
        covariance = 2 mean over views of sum_{d != e} cov(z)_de^2 / D

    These are the means of the released code. The equation sums the invariance over d and the variance over the two
    views, so as written it has an `invariance_weight` of 25 D and a `variance_weight` of 50. The covariance is the sum
    over two views, and twice the mean over more. Terms: attraction is the invariance, repulsion the variance and
    decorrelation the covariance, each times its weight.

    When to use it: if the two branches differ, such as two kinds of input: variance and covariance are kept in each
    branch by itself. It has three weights to balance, and prefers wide projections. For two views of one image, Barlow
    Twins has one weight less.

    Reference: Bardes, Ponce and LeCun, VICReg: Variance-Invariance-Covariance Regularization, ICLR 2022.

    Args:
        invariance_weight: weight of the invariance, at least 0.
        variance_weight: weight of the variance, at least 0.
        covariance_weight: weight of the covariance, at least 0.

    Shape:
        z [V,B,D] or two views [B,D], keys [W,B,D]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import VICReg
        >>> VICReg()(torch.eye(4), torch.eye(4))
        tensor(12.5392)
    """

    paper = "UniCLR, table 2 (VICReg)"
    equation = r"""
        L = w_i\, \mathrm{mean}_{i,d} (z_{id} - z'_{id})^2 + w_v\, \mathrm{mean}_{v,d} \max\!\left( 0,\, 1
            - \sqrt{\mathrm{var}\, z_d + 10^{-4}} \right)
        {}+ 2\, w_c\, \mathrm{mean}_v \sum_{d \neq e} \mathrm{cov}(z)_{de}^2 / D
    """

    def __init__(
        self, invariance_weight: Number = 25.0, variance_weight: Number = 25.0, covariance_weight: Number = 1.0
    ):
        super().__init__(normalize=False)
        self.invariance_weight = weight("invariance_weight", invariance_weight)
        self.variance_weight = weight("variance_weight", variance_weight)
        self.covariance_weight = weight("covariance_weight", covariance_weight)

    def contrast(self, pairs: Pairs) -> Terms:
        links = pairs.one_way_links()
        apart = pairs.sum_by_query(pairs.squared_distance(links), links)
        views = torch.cat([pairs.z, pairs.k]) if pairs.teacher else pairs.z
        _, covariance = mean_and_covariance(views, count=pairs.N, total=distributed.total)
        diagonal = covariance.diagonal(dim1=1, dim2=2)
        hinge = torch.relu(1 - torch.sqrt(diagonal + 1e-4))
        off_diagonal = covariance - torch.diag_embed(diagonal)
        return Terms(
            attraction=self.invariance_weight / pairs.D * apart,
            repulsion=self.variance_weight * hinge.mean(),
            decorrelation=2 * self.covariance_weight / (len(views) * pairs.D) * off_diagonal.square().sum(),
        )
