"""CACR's conditional distributions: positives weighted by their cost, and negatives by their nearness.

V query views, B images, K positives of an anchor, P links of a query view with a key view.  c [...,K] costs of
positives, or [P,B]; statistics [V,B], or [P,B] for links.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from kontrast.kernels import RowStatistics
from kontrast.kernels.row_loss import MEAN, RowLoss
from kontrast.kernels.row_statistics import Scale, StatisticsOptions
from kontrast.kernels.view_links import LATER, OTHER, SAME, Link
from kontrast.objectives.arguments import Number
from kontrast.objectives.base import Terms
from kontrast.objectives.link_rows import select_rows
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


def negative_repulsion(
    pairs: Pairs, cost: str, negatives: str, symmetric: bool, a: Number, rbf_t: Number, detach: bool | str
) -> Tensor:
    """Return the repulsion at the cost `euclidean` or `rbf`."""
    if isinstance(detach, str) and (cost == "rbf" or (not pairs.teacher and pairs.bank is None)):
        raise ValueError("detach_negative_weights is 'bank': give keys or a bank, and cost euclidean")
    if cost == "rbf":
        return rbf_repulsion(pairs, negatives, symmetric, a, rbf_t, bool(detach))
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


def hinge(attraction: Tensor, repulsion: Tensor, margin: Number) -> Terms:
    """Return both terms of max(0, attraction + repulsion + margin), which are 0 for an anchor beyond the margin."""
    active = attraction + repulsion + margin > 0
    return Terms(attraction=active * attraction, repulsion=active * (repulsion + margin))


def moco_v3_terms(pairs: Pairs, cost: str, t: Number, a: Number, detach: bool, constant: bool) -> Terms:
    """Return both terms of CACR's code for MoCo v3: [V,B]. The queries of each key are weighted by their costs.

    Args:
        pairs: queries and keys.
        cost: `rbf`: 2 tau times the cross-entropy of each query, tau = 1/a; `euclidean`: the paper's cost.
        t: sharpness of the weights of queries.
        a: scale of the similarities to negatives.
        detach: treat the weights of queries as constant.
        constant: treat the weights of negatives as constant.
    """
    links = pairs.links
    if cost == "rbf":
        repulsion, offset = (2 / a) * pairs.link_others(a, links), 0.0
    else:
        repulsion = 2 * pairs.link_negatives(a, links, with_mean=True, detach_weights=constant).mean - 2
        offset = 2.0
    s = pairs.similarity(links)
    p = query_weights(2 - 2 * s, links, t, detach)
    attraction = pairs.sum_by_query(p * (offset - 2 * s), links)
    return Terms(attraction=attraction, repulsion=pairs.sum_by_query(p * repulsion, links))


def query_weights(c: Tensor, links: Sequence[Link], t: Number, detach: bool) -> Tensor:
    """Return softmax_v(t c_v) over the query views of each key view, scaled to the mean 1 over all links: [P,B]."""
    costs = (c.detach() if detach else c).unbind()
    groups = [[n for n, (_, w) in enumerate(links) if w == key] for key in sorted({w for _, w in links})]
    weights = torch.cat([torch.softmax(t * torch.stack([costs[n] for n in group]), dim=0) for group in groups])
    order = [n for group in groups for n in group]
    return select_rows(weights, [order.index(n) for n in range(len(links))]) * (len(links) / len(groups))
