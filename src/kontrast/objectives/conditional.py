"""CACR's conditional distributions: positives weighted by their cost, and negatives by their nearness.

B images, K positives of an anchor.  c [...,K] costs of positives, statistics [V,B], or [P,B] for links of views.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from kontrast.kernels import RowStatistics
from kontrast.kernels.row_loss import MEAN, RowLoss
from kontrast.kernels.row_statistics import Scale, StatisticsOptions
from kontrast.kernels.view_links import LATER, OTHER, SAME
from kontrast.objectives.arguments import Number
from kontrast.objectives.pairs import Pairs


def conditional_mean(c: Tensor, t: Number, detach: bool) -> Tensor:
    """Return sum_k w_k c_k with w = softmax_k(t c_k), constant if `detach`: [...,K] to [...]."""
    w = torch.softmax(t * (c.detach() if detach else c), dim=-1)
    return (w * c).sum(-1)


def negative_statistics(
    pairs: Pairs, negatives: str, symmetric: bool, scale: Scale, **options: Unpack[StatisticsOptions]
) -> RowStatistics:
    """Return the statistics of `cross-view` or `same-view` negatives; a teacher or a bank allows one kind only."""
    if pairs.teacher or pairs.bank is not None:
        return pairs.negatives_and_same_view(scale, **options)
    if negatives == "same-view":
        return pairs.same_view(scale, **options)
    return pairs.link_negatives(scale, pairs.one_way_links(symmetric), **options)


def conditional_repulsion(
    pairs: Pairs, negatives: str, symmetric: bool, a: Number, detach: bool | str, rbf_t: Number | None
) -> Tensor:
    """Return the repulsion of each anchor, with an rbf cost of sharpness `rbf_t` a scalar; w = softmax_j(a s_ij)."""
    if isinstance(detach, str) and (rbf_t is not None or (not pairs.teacher and pairs.bank is None)):
        raise ValueError("detach_negative_weights is 'bank': give keys or a bank, and cost euclidean")
    if rbf_t is not None and not isinstance(detach, str):
        return rbf_repulsion(pairs, negatives, symmetric, a, rbf_t, detach)
    return euclidean_repulsion(pairs, negatives, symmetric, a, detach)


def euclidean_repulsion(pairs: Pairs, negatives: str, symmetric: bool, a: Number, detach: bool | str) -> Tensor:
    """Return -sum_j w_ij c_ij of each anchor, w = softmax_j(a s_ij), constant if `detach`, or for the `bank` only."""
    if isinstance(detach, str):
        return 2 * pairs.constant_negatives_and_same_view(a).mean - 2
    c = 2 - 2 * negative_statistics(pairs, negatives, symmetric, a, with_mean=True, detach_weights=detach).mean
    cross_view = negatives == "cross-view" and not pairs.teacher and pairs.bank is None
    return pairs.sum_by_query(-c, pairs.one_way_links(symmetric)) if cross_view else -c


def formula(
    cost: str, negatives: str, symmetric: bool, t_plus: Number, a: Number, detach: bool | str
) -> RowLoss | None:
    """Return CACR of two views as a formula of row statistics, if the cost is euclidean and no number is a tensor.

    The weight of the only positive is 1, and the constants of attraction and repulsion cancel.
    """
    if cost != "euclidean" or isinstance(detach, str) or isinstance(t_plus, Tensor) or isinstance(a, Tensor):
        return None
    kind = SAME if negatives == "same-view" else OTHER if symmetric else LATER
    return RowLoss(kind, [a], MEAN, pull=2.0, push=2.0, detach_weights=detach)


def rbf_repulsion(pairs: Pairs, negatives: str, symmetric: bool, a: Number, t: Number, detach: bool) -> Tensor:
    """Return log mean_i sum_j w_ij exp(-t c_ij), w = softmax_j(a s_ij), averaged over views: a scalar.

    If w is constant, the gradient of the log of the sum over j is 2t times that of the mean at the scale a + 2t.
    """
    rows = negative_statistics(pairs, negatives, symmetric, [a + 2 * t, a], with_mean=detach, detach_weights=detach)
    value = rows.lse[0] - rows.lse[1]
    if detach:
        value = value.detach() + 2 * t * (rows.mean[0] - rows.mean[0].detach())
    return pairs.log_mean_exp(value).mean() - 2 * t
