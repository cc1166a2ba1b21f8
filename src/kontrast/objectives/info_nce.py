"""V query views, W key views, B images, P links of a query view with a key view.  similarity and negatives [P,B]."""

from __future__ import annotations

import torch

from kontrast.objectives.arguments import positive, switch
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.pairs import Pairs


@OBJECTIVES.register("info-nce")
class InfoNCE(Objective):
    r"""Find the query's key among the negatives: MoCo with a bank, MoCo v3 with keys alone (JCL, equation 1).

        loss_i = -<q_i, k_i>/tau + log( exp(<q_i, k_i>/tau) + sum_j exp(<q_i, n_j>/tau) )

    The negatives n are the bank, else the same key view of the other images. Several positive keys have a loss each,
    and the loss is their mean. Without keys each pair of views is taken once, the earlier view as the query and the
    later as the keys, both with gradient (CLIP in one direction); `symmetric` takes both directions.

    Reference: van den Oord et al., Representation Learning with Contrastive Predictive Coding, 2018; He et al.,
    Momentum Contrast for Unsupervised Visual Representation Learning, CVPR 2020.
    """

    paper = "JCL, equation 1"
    takes_bank = True

    def __init__(
        self, temperature: float = 0.2, *, symmetric: bool = False, normalize: bool = True, reduction: str = "mean"
    ):
        super().__init__(normalize=normalize, reduction=reduction)
        self.temperature = positive("temperature", temperature)
        self.symmetric = switch("symmetric", symmetric)

    def contrast(self, pairs: Pairs) -> Terms:
        links = pairs.one_way(self.symmetric)
        similarity = pairs.linked(links) / self.temperature
        repulsion = torch.logaddexp(pairs.across(1 / self.temperature, links).lse, similarity)
        return Terms(attraction=pairs.by_anchor(-similarity, links), repulsion=pairs.by_anchor(repulsion, links))
