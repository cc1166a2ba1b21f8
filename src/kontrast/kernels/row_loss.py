"""The loss of two views as a formula of each row's statistics, which the kernels compute without other operations.

B images, P rows of each image.
"""

from __future__ import annotations

from typing import NamedTuple

LSE, MEAN, DEBIASED = 1, 2, 3
"""Which repulsion a row has: its lse, its mean, or HN-CL's, from the lse at two scales."""


class RowLoss(NamedTuple):
    """The mean over all rows of `push * repulsion - pull * s`, for two views that have the similarity s.

    kind: with which rows a row is compared: a case of `view_links`, which also gives the number P of rows.
    scales: one scale, or two for HN-CL.
    positive: s counts in the lse too.
    detach_weights: the weights of the mean are constant.
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
    log_count: float = 0.0
    log_share: float = 0.0
    log_rest: float = 0.0
    floor: float = 0.0

    @property
    def numbers(self) -> tuple[float, ...]:
        """The numbers that the kernel takes."""
        return self.pull, self.push, *self[7:]
