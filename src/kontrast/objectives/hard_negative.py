"""V query views, B images, P links of views, n negatives of an anchor.  s and log_N [P,B], hard and easy [V,B]."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kontrast.kernels.row_loss import RowLoss, debiased_loss
from kontrast.objectives.arguments import NT_XENT_ALONE, Number, is_zero, number, positive, weight
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.pairs import Pairs


@OBJECTIVES.register("hard-negative")
class HardNegative(Objective):
    r"""Debiased negatives, weighted by their hardness (HN-CL, also called HCL).

        R_i    = sum_j w_j exp(s_ij/tau),  w_j = exp(beta s_ij/tau) / mean_j exp(beta s_ij/tau)
        N_i    = max( (R_i - tau_plus n exp(s_i+/tau)) / (1 - tau_plus), n exp(-1/tau) )
        loss_i = -log( exp(s_i+/tau) / (exp(s_i+/tau) + N_i) )

    The weights w have a gradient. At tau_plus = 0, log R = lse((1+beta)/tau) - lse(beta/tau) + log n; if also beta = 0
    and there are two views, it is NT-Xent. With more views, the loss is the mean over the positives, each taken alone.

    When to use it: if easy negatives fill your batches and classes are many. tau_plus has to be about the share of
    negatives that are of the anchor's own class, which nobody knows without labels; 0.1 is right for ten equal classes.
    With beta and tau_plus 0 it is NT-Xent.

    Reference: Robinson et al., Contrastive Learning with Hard Negative Samples, ICLR 2021.

    Args:
        temperature: tau, divides the similarities.
        beta: concentration on hard negatives, at least 0.
        tau_plus: probability that a negative has the anchor's class, from 0 to below 1.
        reduction: `mean` over anchors, `sum`, or `simclr_tf`, the sum of the means of the views.

    Shape:
        z [V,B,D] or two views [B,D], keys [W,B,D], bank [M,D]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import HardNegative
        >>> HardNegative()(torch.eye(4), torch.eye(4))
        tensor(0.2115)
    """

    paper = "CACR, table 1 (HN-CL)"
    equation = r"""
        \ell_i = -\log \frac{e^{s_i^+/\tau}}{e^{s_i^+/\tau} + N_i},
        N_i = \max\!\left( \frac{R_i - \tau^+ n\, e^{s_i^+/\tau}}{1 - \tau^+},\; n\, e^{-1/\tau} \right),
        R_i = \sum_j w_j e^{s_{ij}/\tau}, \quad w_j
            = \frac{e^{\beta s_{ij}/\tau}}{\mathrm{mean}_l\, e^{\beta s_{il}/\tau}}
    """
    takes_bank = True

    def __init__(
        self, temperature: Number = 0.5, beta: Number = 1.0, tau_plus: Number = 0.1, *, reduction: str = "mean"
    ):
        super().__init__(reduction=reduction)
        self.temperature = positive("temperature", temperature, not_learned=NT_XENT_ALONE)
        self.beta = weight("beta", beta)
        self.tau_plus = number("tau_plus", tau_plus, least=0.0, below=1.0)

    def row_loss(self, images: int) -> RowLoss | None:
        return debiased_loss(self.temperature, self.beta, self.tau_plus, 2 * (images - 1))

    def contrast(self, pairs: Pairs) -> Terms:
        n, links = pairs.negative_count, pairs.links
        hard, easy = pairs.negatives(scale=[(1 + self.beta) / self.temperature, self.beta / self.temperature]).lse
        log_R = hard - easy + math.log(n)
        s = pairs.similarity(links) / self.temperature
        log_N = self.log_debiased(torch.stack([log_R[v] for v, _ in links]), s, n)
        repulsion = torch.logaddexp(s, log_N)
        return Terms(attraction=pairs.sum_by_query(-s, links), repulsion=pairs.sum_by_query(repulsion, links))

    def log_debiased(self, log_R: Tensor, s: Tensor, n: int) -> Tensor:
        """Return log N_i, computed in logarithms because R itself may overflow."""
        if is_zero(self.tau_plus):
            return log_R
        functions: Any = torch if isinstance(self.tau_plus, Tensor) else math
        share = functions.log(self.tau_plus * n) + s - log_R
        some_left = share < 0
        left = torch.log(-torch.expm1(torch.where(some_left, share, -1.0)))
        floor = math.log(n) - 1 / self.temperature
        log_N = log_R + left - functions.log1p(-self.tau_plus)
        return torch.where(some_left & (log_N > floor), log_N, floor)
