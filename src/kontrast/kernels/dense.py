"""The definition of the row statistics, for tests and readers: the whole affinity matrix, differentiated by autograd.

M queries, K keys, D width, S scales.  queries [M,D], keys [K,D], ids [M] and [K], statistics [S,M].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def working_type(tensor: Tensor) -> torch.dtype:
    """Sums are kept in float64 for float64 input and in float32 for everything else."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def dense_statistics(
    queries: Tensor,
    keys: Tensor | None,
    scales: Sequence[float],
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    detach_weights: bool,
) -> tuple[Tensor, Tensor]:
    r"""lse and mean, each [S,M], by the book.

    s_ij      = <q_i, k_j>                   pairs with equal ids are left out
    lse_i(a)  = log sum_j exp(a s_ij)
    mean_i(a) = sum_j w_ij s_ij,             w_ij = softmax_j(a s_ij)
    """
    keys, key_ids = (queries, query_ids) if keys is None else (keys, key_ids)
    # A product of two bf16 or fp16 numbers is exact in float32, so this is "products in that type, sums in float32".
    affinity = queries.to(working_type(queries)) @ keys.to(working_type(keys)).T
    left_out = torch.zeros_like(affinity, dtype=torch.bool)
    if query_ids is not None and key_ids is not None:
        left_out = query_ids[:, None] == key_ids[None, :]
    empty = left_out.all(dim=1)
    # An empty row runs through finite numbers and is overwritten after, else its gradient would be 0 * inf = NaN.
    hidden = left_out & ~empty[:, None]
    lses, means = [], []
    for scale in scales:
        logits = (scale * affinity).masked_fill(hidden, -torch.inf)
        weights = torch.softmax(logits, dim=1)
        if detach_weights:
            weights = weights.detach()
        mean = (weights * affinity).sum(dim=1)
        lses.append(torch.logsumexp(logits, dim=1).masked_fill(empty, -torch.inf))
        means.append(mean.masked_fill(empty, 0.0))
    return torch.stack(lses), torch.stack(means)
