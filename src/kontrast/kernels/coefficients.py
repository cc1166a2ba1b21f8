"""The numbers per row from which the gradient of the affinity is made: w_ij (alpha_i + beta_i s_ij), for one scale a.

M rows, S scales.  alpha, beta, lse [M];  the statistics and their gradients [S,M].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Coefficients:
    """alpha and beta of each row. beta is None if it is zero; lse is None if alpha and beta contain exp(-lse)."""

    scale: float
    alpha: Tensor
    beta: Tensor | None
    lse: Tensor | None

    def absorb_lse(self) -> Coefficients:
        """Move exp(-lse) from the exponent into alpha and beta, so that s_ij and s_ji share one exponential."""
        assert self.lse is not None
        factor = torch.exp(-self.lse).masked_fill(torch.isneginf(self.lse), 0)
        beta = None if self.beta is None else self.beta * factor
        return replace(self, alpha=self.alpha * factor, beta=beta, lse=None)

    def select(self, index: tuple[slice | None, ...]) -> Coefficients:
        """Select some rows and add a dimension, so that they broadcast over a tile as a column or a row."""
        beta, lse = (None if part is None else part[index] for part in (self.beta, self.lse))
        return replace(self, alpha=self.alpha[index], beta=beta, lse=lse)


def coefficients(
    grad_lse: Tensor | None, grad_mean: Tensor | None,
    lse: Tensor, mean: Tensor, scales: Sequence[float], detach_weights: bool,
) -> list[Coefficients]:  # fmt: skip
    r"""Return the coefficients of each scale.

        alpha_i = a g_lse + (1 - a mean_i) g_mean,   beta_i = a g_mean
        alpha_i = a g_lse + g_mean,                  beta_i = 0             with weights detached

    A row without pairs gets zeros, whatever its incoming gradient is.
    """
    empty = torch.isneginf(lse)
    terms = []
    for n, scale in enumerate(scales):
        alpha = torch.zeros_like(lse[n]) if grad_lse is None else scale * grad_lse[n]
        beta = None
        if grad_mean is not None and detach_weights:
            alpha = alpha + grad_mean[n]
        elif grad_mean is not None:
            alpha = alpha + (1 - scale * mean[n]) * grad_mean[n]
            beta = (scale * grad_mean[n]).masked_fill(empty[n], 0)
        terms.append(Coefficients(scale, alpha.masked_fill(empty[n], 0), beta, lse[n]))
    return terms


def bias_coefficients(
    grad_lse: Tensor | None, grad_mean: Tensor | None,
    lse: Tensor, mean: Tensor, scales: Sequence[float], detach_weights: bool,
) -> list[Coefficients]:  # fmt: skip
    r"""Return the coefficients of the gradient of a key's bias, sum_i w_ij (alpha_i + beta_i s_ij), for each scale.

    alpha_i = g_lse - mean_i g_mean,   beta_i = g_mean        with weights detached only g_lse counts
    """
    empty = torch.isneginf(lse)
    terms = []
    for n, scale in enumerate(scales):
        alpha = torch.zeros_like(lse[n]) if grad_lse is None else grad_lse[n]
        beta = None
        if grad_mean is not None and not detach_weights:
            alpha = alpha - mean[n] * grad_mean[n]
            beta = grad_mean[n].masked_fill(empty[n], 0)
        terms.append(Coefficients(scale, alpha.masked_fill(empty[n], 0), beta, lse[n]))
    return terms
