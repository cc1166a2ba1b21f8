"""V prediction views, W key views, B images, N of all ranks, P links of a prediction with a key, M rows of the bank.

z and predictions [V,B,D], keys and neighbors [W,B,D], bank [M,D];  similarity and log-sum-exp [P,B].
"""

from __future__ import annotations

import torch
from torch import Tensor

from kontrast import distributed
from kontrast.kernels.links import link_statistics
from kontrast.kernels.log_add_exp import log_add_exp
from kontrast.kernels.nearest_keys import nearest_keys
from kontrast.kernels.view_links import image_indices
from kontrast.objectives.arguments import NT_XENT_ALONE, Number, positive
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.link_rows import select_rows
from kontrast.objectives.pairs import Pairs


@OBJECTIVES.register("nnclr")
class NNCLR(Objective):
    r"""Predict the nearest neighbor of another view of the image, among the predictions of other images (NNCLR).

        n_i    = argmax_{row of the bank} <row, k_i>
        loss_i = -<n_i, p_i>/tau + log sum_j exp(<n_i, p_j>/tau)

    k_i is the projection of one view of image i, p_i the prediction from another view, which z holds, and j counts all
    images. Neighbors are constants, so the gradient goes to the predictions alone. The bank holds earlier projections
    and is searched before this batch is added. Without a bank, the neighbor is the nearest key of another image of the
    batch. Without keys, z itself is the projection that is searched for, as a constant.

    When to use it: if crops and colors alone give positives that are too easy: the positive is another image that looks
    alike. It needs a bank that is large beside the number of classes, a predictor, and some epochs before neighbors
    mean anything.

    Reference: Dwibedi et al., With a Little Help from My Friends: Nearest-Neighbor Contrastive Learning of Visual
    Representations, ICCV 2021.

    Args:
        temperature: tau, divides the similarities.
        normalize: scale the rows of z and keys to length one. False takes them as they are.
        reduction: `mean` over anchors, `sum`, or `simclr_tf`, the sum of the means of the views.

    Shape:
        z [V,B,D] or two views [B,D], keys [W,B,D], bank [M,D]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import NNCLR
        >>> NNCLR(temperature=0.5)(torch.eye(4), torch.eye(4), bank=torch.eye(4))
        tensor(0.3408)
    """

    paper = "NNCLR (Dwibedi et al., 2021)"
    equation = r"""
        \ell_i = -\frac{\langle n_i, p_i \rangle}{\tau} + \log \sum_j e^{\langle n_i, p_j \rangle / \tau},
        n_i = \mathrm{argmax}_{n \in \mathrm{bank}} \langle n, k_i \rangle
    """
    takes_bank = True

    def __init__(self, temperature: Number = 0.1, *, normalize: bool = True, reduction: str = "mean"):
        super().__init__(normalize=normalize, reduction=reduction)
        self.temperature = positive("temperature", temperature, not_learned=NT_XENT_ALONE)

    def contrast(self, pairs: Pairs) -> Terms:
        scale, start = 1 / self.temperature, distributed.rank() * pairs.B
        predictions, neighbors = predictions_and_neighbors(pairs, start)
        links = sorted((w, v) for v, w in pairs.links)
        n, p = neighbors.to(pairs.z.dtype).unbind(), pairs.z.unbind()
        similarity = torch.stack([(n[w] * p[v]).sum(-1) for w, v in links])
        negatives = link_statistics(neighbors, predictions, links, scale=scale, start=start).lse
        by_prediction = [links.index((w, v)) for v, w in pairs.links]
        terms = {"attraction": -scale * similarity, "repulsion": log_add_exp(negatives, similarity, scale)}
        return Terms(**{k: pairs.sum_by_query(select_rows(x, by_prediction), pairs.links) for k, x in terms.items()})


def predictions_and_neighbors(pairs: Pairs, start: int) -> tuple[Tensor, Tensor]:
    """Return the predictions of all ranks [V,N,D] and the nearest neighbor of each key [W,B,D]."""
    keys, ids, support_ids = pairs.k.detach(), None, None
    if pairs.bank is not None:
        predictions, support = distributed.gather(pairs.z.to(pairs.dtype), dim=1), pairs.bank
    else:
        predictions, everyone = pairs.gather_views(pairs.dtype)
        support = everyone.detach().flatten(0, 1)
        ids = image_indices(pairs.B, start, keys.device).repeat(pairs.W)
        support_ids = image_indices(pairs.N, 0, keys.device).repeat(pairs.W)
    support, rows = support.to(pairs.dtype), keys.flatten(0, 1).to(pairs.dtype)
    _, index = nearest_keys(rows, support, query_ids=ids, key_ids=support_ids)
    neighbors = support.index_select(0, index.clamp(min=0))  # a row of NaN has none, and the loss will be NaN
    return predictions.to(pairs.dtype), neighbors.view_as(keys)
