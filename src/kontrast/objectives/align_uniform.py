"""V views, B images, N images of all ranks.  distance [P,B] for links of views, lse [V,B]."""

from __future__ import annotations

import math

from kontrast.objectives.arguments import Number, positive, weight
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.pairs import Pairs


@OBJECTIVES.register("align-uniform")
class AlignUniform(Objective):
    r"""Alignment of positives and uniformity on the sphere (Wang and Isola).

        align   = mean_i ||z_i - z_i+||^alpha
        uniform = mean over views of log mean_{i != j} exp(-t ||z_i - z_j||^2)        i, j of one view
        loss    = align_weight align + uniform_weight uniform

    With keys or a bank, `uniform` is over pairs of a query and one of its negatives. The weights of CACR's AU-CL rows
    may be 0.98 and 0.96; those of its repository are 1 and 1.

    Reference: Wang and Isola, Understanding Contrastive Representation Learning through Alignment and Uniformity on the
    Hypersphere, ICML 2020.

    Args:
        alpha: power of the distance of positives.
        t: sharpness of the kernel between negatives.
        align_weight: weight of the alignment, at least 0.
        uniform_weight: weight of the uniformity, at least 0.

    Shape:
        z [V,B,D] or two views [B,D], keys [W,B,D], bank [M,D]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import AlignUniform
        >>> AlignUniform(t=2.0)(torch.eye(4), torch.eye(4))
        tensor(-4.)
    """

    paper = "CACR, table 1 (AU-CL)"
    takes_bank = True

    def __init__(self, alpha: Number = 2.0, t: Number = 2.0, align_weight: Number = 1.0, uniform_weight: Number = 1.0):
        super().__init__()
        self.alpha = positive("alpha", alpha)
        self.t = positive("t", t, not_learned="the loss falls without bound as t grows")
        self.align_weight = weight("align_weight", align_weight)
        self.uniform_weight = weight("uniform_weight", uniform_weight)

    def contrast(self, pairs: Pairs) -> Terms:
        queried = pairs.teacher or pairs.bank is not None
        rows = (pairs.negatives if queried else pairs.same_view)(scale=2 * self.t)
        count = pairs.negative_count if queried else pairs.N - 1
        uniform = pairs.log_mean_exp(rows.lse).mean() - 2 * self.t - math.log(count)
        align = pairs.mean_over_positives(pairs.distance(pairs.links, self.alpha))
        return Terms(attraction=self.align_weight * align, repulsion=self.uniform_weight * uniform)
