"""CACR's conditional distributions: positives weighted by their cost, and negatives by their nearness.

B images, K positives of an anchor.  c [...,K] costs of positives, statistics [V,B], or [P,B] for links of views.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from kontrast.kernels import RowStatistics
from kontrast.objectives.pairs import How, Pairs, Scale


def conditional_mean(c: Tensor, t: float, detach: bool) -> Tensor:
    """sum_k w_k c_k, w = softmax_k(t c_k), constant where `detach`: [...,K] to [...]."""
    w = torch.softmax(t * (c.detach() if detach else c), dim=-1)
    return (w * c).sum(-1)


def against(pairs: Pairs, negatives: str, scale: Scale, **how: Unpack[How]) -> RowStatistics:
    """The statistics of the negatives, by their kind; with a teacher or a bank there is one kind."""
    if pairs.teacher or pairs.bank is not None:
        return pairs.negatives_and_same_view(scale, **how)
    if negatives == "same-view":
        return pairs.same_view(scale, **how)
    return pairs.across(scale, pairs.one_way(), **how)


def euclidean_repulsion(pairs: Pairs, negatives: str, a: float, detach: bool | str) -> Tensor:
    """-sum_j w_ij c_ij of each anchor, w = softmax_j(a s_ij), constant where `detach`, or for the `bank` alone."""
    if isinstance(detach, str):
        if not pairs.teacher and pairs.bank is None:
            raise ValueError("detach_negative_weights is 'bank': give keys or a bank, or set it to true or false")
        return 2 * pairs.constant_negatives_and_same_view(a).mean - 2
    c = 2 - 2 * against(pairs, negatives, a, with_mean=True, detach_weights=detach).mean
    across = negatives == "cross-view" and not pairs.teacher and pairs.bank is None
    return pairs.by_anchor(-c, pairs.one_way()) if across else -c


def rbf_repulsion(pairs: Pairs, negatives: str, a: float, t: float, detach: bool | str) -> Tensor:
    """log mean_i sum_j w_ij exp(-t c_ij), w = softmax_j(a s_ij), and of that the mean over views: a scalar.

    Where w is constant, the gradient of the log of the sum over j is 2t times that of the mean at the scale a + 2t.
    """
    if isinstance(detach, str):
        raise ValueError(f"detach_negative_weights is {detach!r}: with cost rbf give true or false")
    rows = against(pairs, negatives, [a + 2 * t, a], with_mean=detach, detach_weights=detach)
    value = rows.lse[0] - rows.lse[1]
    if detach:
        value = value.detach() + 2 * t * (rows.mean[0] - rows.mean[0].detach())
    return pairs.log_mean_exp(value).mean() - 2 * t
