"""The loss of two views as a formula of each row's statistics, which the kernels compute without other operations.

B images, P rows of each image.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from kontrast.kernels.unit_rows import SHORTEST
from kontrast.kernels.view_links import ALL

LSE, MEAN, DEBIASED = 1, 2, 3
"""Which repulsion a row has: its lse, its mean, or HN-CL's, from the lse at two scales."""


class RowLoss(NamedTuple):
    """The mean over all rows of `push * repulsion - pull * s`, for two views that have the similarity s.

    kind: with which rows a row is compared: a case of `view_links`, which also gives the number P of rows.
    scales: one scale, or two for HN-CL.
    positive: s counts in the lse too.
    detach_weights: the weights of the mean are constant.
    asymmetry: weight of the norm ||A - A^T||_F of the affinity A of the two views, which is added to the mean.
    shortest: rows that are not longer than this stay as they are; others are normalized.
    log_count, log_share, log_rest, floor: with HN-CL, log R = lse - lse at the second scale + log_count, and
        log N = log R + log(1 - exp(log_share + pull * s - log R)) - log_rest, at least `floor`; the repulsion is
        log(exp(pull * s) + N).
    """

    kind: int
    scales: list[float]
    repulsion: int
    pull: float
    push: float = 1.0
    positive: bool = False
    detach_weights: bool = False
    asymmetry: float = 0.0
    shortest: float = SHORTEST
    log_count: float = 0.0
    log_share: float = 0.0
    log_rest: float = 0.0
    floor: float = 0.0

    @property
    def numbers(self) -> tuple[float, ...]:
        """The numbers that the kernel takes."""
        return self.pull, self.push, *self[9:]


def debiased_loss(tau: float | Tensor, beta: float | Tensor, tau_plus: float | Tensor, n: int) -> RowLoss | None:
    """Return HN-CL's loss with n negatives per row; None if a number is a tensor, which would get no gradient."""
    if isinstance(tau, Tensor) or isinstance(beta, Tensor) or isinstance(tau_plus, Tensor):
        return None
    log_n, log_share, floor = math.log(n), -math.inf, -math.inf
    if tau_plus > 0:
        log_share, floor = math.log(tau_plus * n), log_n - 1 / tau
    return RowLoss(
        ALL, [(1 + beta) / tau, beta / tau], DEBIASED, 1 / tau,
        log_count=log_n, log_share=log_share, log_rest=math.log1p(-tau_plus), floor=floor,
    )  # fmt: skip
