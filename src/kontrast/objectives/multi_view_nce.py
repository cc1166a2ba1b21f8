"""V query views, W key views, B images, P links of a query view with a key view.  similarity and negatives [P,B]."""

from __future__ import annotations

import torch

from kontrast.objectives.arguments import positive
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.pairs import Pairs


@OBJECTIVES.register("multi-view-nce")
class MultiViewNCE(Objective):
    r"""InfoNCE between all pairs of views (CMC), or from the query to each of its keys (JCL's vanilla, equation 3).

        loss = mean_{a < b} [ InfoNCE(a -> b) + InfoNCE(b -> a) ]            without keys: the sum of both directions
        loss = mean_m InfoNCE(q -> k_m)                                      with keys, over the same bank

    InfoNCE(a -> b) finds each image's view b among the views b of all images; with a bank, among it and the bank. At
    two views it is twice the symmetric InfoNCE. CACR's CMC rows have K + 1 views, temperature 0.07 on ImageNet.

    Reference: Tian, Krishnan and Isola, Contrastive Multiview Coding, ECCV 2020.
    """

    paper = "JCL, equation 3; CACR, table 1 (CMC)"
    takes_bank = True

    def __init__(self, temperature: float = 0.07, *, normalize: bool = True, reduction: str = "mean"):
        super().__init__(normalize=normalize, reduction=reduction)
        self.temperature = positive("temperature", temperature)

    def contrast(self, pairs: Pairs) -> Terms:
        directions, links = 1 if pairs.teacher else 2, pairs.links
        similarity = pairs.linked(links) / self.temperature
        repulsion = torch.logaddexp(pairs.across(1 / self.temperature, links).lse, similarity)
        return Terms(
            attraction=directions * pairs.by_anchor(-similarity, links),
            repulsion=directions * pairs.by_anchor(repulsion, links),
        )
