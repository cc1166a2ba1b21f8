"""V views, G global views, B images, N images of all ranks, D width.  z [V,B,D], rows [G,N,D], distance [G,B]."""

from __future__ import annotations

import torch

from kontrast import distributed
from kontrast.kernels.nearest_keys import nearest_keys
from kontrast.kernels.view_links import image_indices
from kontrast.objectives.arguments import fixed, positive, switch
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.pairs import Pairs


@OBJECTIVES.register("koleo")
class KoLeo(Objective):
    r"""Every image is repelled from its nearest neighbor (KoLeo, the Kozachenko-Leonenko estimate of entropy).

        loss_i = -log( ||z_i - z_nn(i)|| + eps ),   nn(i) = argmax_{j != i} <z_i, z_j>   within one view

    It is a term to add to another objective: `Sum([..., KoLeo()], weights=[1.0, 0.1])`. Both ends of the distance have
    a gradient, the choice of the neighbor has none. Local views don't count, and a teacher's keys are not used. DINOv2
    adds 0.1 times the loss of each of two global views, which is a weight of 0.2 here, where it is their mean, and
    takes the encoder's class tokens: `on="features"` in a recipe's `objective.plus`, without which the rows are
    the projections, or the predictions of a predictor. Its code also adds eps to each coordinate of the difference:
    identical rows cost 15.4 there at D = 384, and 18.4 here.

    When to use it: as a small addition to another loss, with `Sum`, to spread the features evenly, as DINOv2 does.
    Alone it knows no positives and learns nothing about images. Only the nearest neighbor gets a gradient, so larger
    batches give it more to do.

    Reference: Sablayrolles et al., Spreading Vectors for Similarity Search, ICLR 2019; Oquab et al., DINOv2: Learning
    Robust Visual Features without Supervision, TMLR 2024.

    Args:
        eps: added to the distance, so that identical rows have a finite loss.
        over_ranks: look for the neighbor among the images of all ranks. False, as published: each rank alone.
        reduction: `mean` over anchors, `sum`, or `simclr_tf`, the sum of the means of the views.

    Shape:
        z [V,B,D] or two views [B,D], keys [W,B,D]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import KoLeo
        >>> KoLeo()(torch.eye(4), torch.eye(4))  # -log(sqrt(2))
        tensor(-0.3466)
    """

    paper = "DINOv2, KoLeo regularizer"
    equation = r"""
        \ell_i = -\log \left( \lVert z_i - z_{n(i)} \rVert + \varepsilon \right), \quad n(i)
            = \mathrm{argmax}_{j \neq i} \langle z_i, z_j \rangle
    """
    takes_global_views = True

    def __init__(self, eps: float = 1e-8, *, over_ranks: bool = False, reduction: str = "mean"):
        super().__init__(reduction=reduction)
        self.eps = fixed("eps", positive("eps", eps))
        self.over_ranks = switch("over_ranks", over_ranks)

    def contrast(self, pairs: Pairs) -> Terms:
        z = pairs.z[: pairs.given.global_views]
        if pairs.B < 2 and not self.over_ranks:
            raise ValueError("KoLeo has one image per rank: give at least 2, or over_ranks=True")
        rows = distributed.gather(z, dim=1) if self.over_ranks else z
        start = distributed.rank() * pairs.B if self.over_ranks else 0
        ids, all_ids = (image_indices(n, s, z.device) for n, s in ((pairs.B, start), (rows.shape[1], 0)))
        near = []
        for view, others in zip(z.unbind(), rows.unbind()):
            _, index = nearest_keys(view.detach(), others.detach(), query_ids=ids, key_ids=all_ids)
            near.append(others.index_select(0, index.clamp(min=0)))  # a row of NaN has the index -1
        # 2 - 2 <z, z'> would cancel for close rows.
        distance = torch.linalg.vector_norm(z - torch.stack(near), dim=-1)
        repulsion = -torch.log(distance + self.eps)
        return Terms(attraction=torch.zeros_like(repulsion), repulsion=repulsion)
