"""V query views, W key views, B images, P links of a query view with a key view.  similarity and negatives [P,B]."""

from __future__ import annotations

from torch import Tensor

from kontrast.kernels.row_loss import LSE, RowLoss
from kontrast.kernels.view_links import OTHER
from kontrast.objectives.arguments import NT_XENT_ALONE, Number, positive
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.pairs import Pairs


@OBJECTIVES.register("multi-view-nce")
class MultiViewNCE(Objective):
    r"""InfoNCE between all pairs of views (CMC), or from the query to each of its keys (JCL, equation 3).

        loss = mean_{a < b} [ InfoNCE(a -> b) + InfoNCE(b -> a) ]            without keys: the sum of both directions
        loss = mean_m InfoNCE(q -> k_m)                                      with keys, over the same bank

    InfoNCE(a -> b) finds view b of each image among the views b of all images; with a bank, among that view and the
    bank. With two views it is twice the symmetric InfoNCE. CACR's CMC rows have K + 1 views and temperature 0.07 on
    ImageNet.

    When to use it: with more than two views, if every pair of views shall count alike: it is the plain baseline for
    CACR and JCL. With four positives it was within half a point of CACR on CIFAR-10 here. With two views it is twice
    the symmetric InfoNCE.

    Reference: Tian, Krishnan and Isola, Contrastive Multiview Coding, ECCV 2020.

    Args:
        temperature: tau, divides the similarities.
        normalize: scale the rows of z and keys to length one. False takes them as they are.
        reduction: `mean` over anchors, `sum`, or `simclr_tf`, the sum of the means of the views.

    Shape:
        z [V,B,D] or two views [B,D], keys [W,B,D], bank [M,D]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import MultiViewNCE
        >>> MultiViewNCE(temperature=0.5)(torch.eye(4), torch.eye(4))
        tensor(0.6815)
    """

    paper = "JCL, equation 3; CACR, table 1 (CMC)"
    equation = r"L = \mathrm{mean}_{a < b} \left[ \mathrm{InfoNCE}(a \to b) + \mathrm{InfoNCE}(b \to a) \right]"
    takes_bank = True

    def __init__(self, temperature: Number = 0.07, *, normalize: bool = True, reduction: str = "mean"):
        super().__init__(normalize=normalize, reduction=reduction)
        self.temperature = positive("temperature", temperature, not_learned=NT_XENT_ALONE)

    def row_loss(self, images: int) -> RowLoss | None:
        a = 1 / self.temperature
        return None if isinstance(a, Tensor) else RowLoss(OTHER, [a], LSE, pull=2 * a, push=2.0, positive=True)

    def contrast(self, pairs: Pairs) -> Terms:
        directions, links = 1 if pairs.teacher else 2, pairs.links
        repulsion = pairs.link_others(1 / self.temperature, links)
        return Terms(
            attraction=(-directions / self.temperature) * pairs.sum_by_query(pairs.similarity(links), links),
            repulsion=directions * pairs.sum_by_query(repulsion, links),
        )
