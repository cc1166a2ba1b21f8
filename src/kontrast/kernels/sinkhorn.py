"""Assignments of samples to prototypes that use all prototypes alike, by Sinkhorn's iteration in logs.

N samples of this rank, K prototypes, R ranks; leading dimensions are separate problems.  scores [...,N,K], counts
[...,N], potentials [...,K].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kontrast.kernels.dense import accumulation_type
from kontrast.kernels.row_statistics import refuse


@torch.no_grad()
def sinkhorn_potentials(
    scores: Tensor, *, epsilon: float | Tensor, iterations: int = 3, counts: Tensor | None = None,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    r"""Return the potential g of each prototype, with which a softmax assigns the samples to all prototypes alike.

        g_k = -log sum_i exp(s_ik/epsilon + f_i)        over the samples of all ranks; f starts at 0
        f_i = -log sum_k exp(s_ik/epsilon + g_k)
        q_ik = softmax_k(s_ik/epsilon + g_k)            the assignment, whose rows sum to 1

    Each iteration divides by the sums over samples, then by those over prototypes. In logs nothing overflows: exp(1/
    epsilon) is infinite in float16 at epsilon 0.05, and in float32 below 0.0113. After few iterations the prototypes
    are not yet used alike; their shares of the samples may differ by a fifth. There is no gradient.

    Args:
        scores: similarities s of any floating point type; the sums are float32 at least.
        epsilon: divides the scores. Small values make the assignments sharp.
        iterations: how often both sums are equalized, at least once.
        counts: whether each sample counts. The others change nothing. None: all count.
        gather: concatenates the rows [1,n] of all ranks to [R,n]: one message per iteration. None: one process.

    Shape:
        scores [...,N,K], counts [...,N] of bool; the potentials [...,K].

    Example:
        >>> scores = torch.tensor([[0.9, 0.5], [0.8, 0.6]])
        >>> torch.softmax(scores / 0.05 + sinkhorn_potentials(scores, epsilon=0.05), dim=-1)
        tensor([[0.8808, 0.1192],
                [0.1192, 0.8808]])
    """
    if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.ndim < 2:
        refuse("scores", scores, "[samples, prototypes] of a floating point type")
    logits = scores.to(accumulation_type(scores)) / epsilon
    f = logits.new_zeros(logits.shape[:-1])
    g = logits.new_zeros(())
    for n in range(iterations):
        if n:
            f = -torch.logsumexp(logits + g[..., None, :], dim=-1)
        if counts is not None:
            f = f.masked_fill(~counts, -torch.inf)
        g = torch.logsumexp(logits + f[..., None], dim=-2)
        if gather is not None:
            g = torch.logsumexp(gather(g.reshape(1, -1)), dim=0).view_as(g)
        g = -g
    return g
