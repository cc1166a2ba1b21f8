"""V views, B images, N images of all ranks.  distance [P,B] for links of views, lse [V,B]."""

from __future__ import annotations

import math

import torch

from kontrast.objectives.arguments import Number, positive, switch, weight
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.pairs import Pairs


@OBJECTIVES.register("align-uniform")
class AlignUniform(Objective):
    r"""Alignment of positives and uniformity on the sphere (Wang and Isola).

        align   = mean_i ||z_i - z_i+||^alpha
        uniform = mean over views of log mean_{i != j} exp(-t ||z_i - z_j||^2)        i, j of one view
        loss    = align_weight align + uniform_weight uniform

    With keys or a bank, `uniform` is over the pairs of a query with one of its negatives and, with
    `pairs_within_batch`, over the pairs i < j of queries too, as in the authors' code for MoCo. The weights of CACR's
    AU-CL rows may be 0.98 and 0.96; those of its repository are 1 and 1.

    When to use it: if you want to see alignment and uniformity as two numbers with a weight each. The repulsion is a
    log of a mean over the whole batch, so one crowded region dominates it. On CIFAR-10 here it was within a point of
    the other losses with one positive.

    Reference: Wang and Isola, Understanding Contrastive Representation Learning through Alignment and Uniformity on the
    Hypersphere, ICML 2020.

    Args:
        alpha: power of the distance of positives.
        t: sharpness of the kernel between negatives.
        align_weight: weight of the alignment, at least 0.
        uniform_weight: weight of the uniformity, at least 0.
        pairs_within_batch: with keys or a bank, count the pairs of queries too. Without them there are no other pairs.

    Shape:
        z [V,B,D] or two views [B,D], keys [W,B,D], bank [M,D]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import AlignUniform
        >>> AlignUniform(t=2.0)(torch.eye(4), torch.eye(4))
        tensor(-4.)
    """

    paper = "CACR, table 1 (AU-CL)"
    equation = r"""
        L = w_a\, \mathrm{mean}_i \lVert z_i - z_i^+ \rVert^{\alpha}
        {}+ w_u\, \mathrm{mean}_v \log \mathrm{mean}_{i \neq j}\, e^{-t \lVert z_i - z_j \rVert^2}
    """
    takes_bank = True

    def __init__(
        self, alpha: Number = 2.0, t: Number = 2.0, align_weight: Number = 1.0, uniform_weight: Number = 1.0, *,
        pairs_within_batch: bool = True,
    ):  # fmt: skip
        super().__init__()
        self.alpha = positive("alpha", alpha)
        self.t = positive("t", t, not_learned="the loss falls without bound as t grows")
        self.align_weight = weight("align_weight", align_weight)
        self.uniform_weight = weight("uniform_weight", uniform_weight)
        self.pairs_within_batch = switch("pairs_within_batch", pairs_within_batch)

    def contrast(self, pairs: Pairs) -> Terms:
        scale, queried = 2 * self.t, pairs.teacher or pairs.bank is not None
        if not queried:
            rows, count = pairs.same_view(scale).lse, pairs.N - 1.0
        elif not self.pairs_within_batch:
            rows, count = pairs.negatives(scale).lse, float(pairs.negative_count)
        else:  # each pair of queries counts by half, because it is in the rows of both
            within = pairs.same_view(scale).lse - math.log(2)
            rows, count = torch.logaddexp(pairs.negatives(scale).lse, within), pairs.negative_count + (pairs.N - 1) / 2
        uniform = pairs.log_mean_exp(rows).mean() - 2 * self.t - math.log(count)
        align = pairs.mean_over_positives(pairs.distance(pairs.links, self.alpha))
        return Terms(attraction=self.align_weight * align, repulsion=self.uniform_weight * uniform)
