"""The definition of the row statistics: the whole affinity matrix, differentiated by autograd; also for small batches.

M queries, K keys, D width, S scales.  queries [M,D], keys [K,D], ids [M] and [K], statistics [S,M].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def transformed() -> bool:
    """Whether torch.func looks on (grad, jvp, vmap): it follows plain operations, not those with a gradient of ours."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


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
    with_mean: bool = True,
) -> tuple[Tensor, Tensor]:
    """lse and mean, each [S,M]."""
    keys, key_ids = (queries, query_ids) if keys is None else (keys, key_ids)
    left_out = None
    if query_ids is not None and key_ids is not None:
        left_out = query_ids[:, None] == key_ids[None, :]
    return affinity_statistics(affinity(queries, keys), left_out, scales, detach_weights, with_mean)


def affinity(queries: Tensor, keys: Tensor) -> Tensor:
    """The whole matrix [M,K]."""
    # A product of two bf16 or fp16 numbers is exact in float32, so this is "products in that type, sums in float32".
    with torch.autocast(queries.device.type, enabled=False):
        return queries.to(working_type(queries)) @ keys.to(working_type(keys)).T


def affinity_statistics(
    s: Tensor, left_out: Tensor | None, scales: Sequence[float], detach_weights: bool, with_mean: bool
) -> tuple[Tensor, Tensor]:
    r"""lse and mean over the last dimension of s [...,K], by the book: each [S,...]; a mean that is not wanted [S,0].

    s_ij      = <q_i, k_j>                   pairs with equal ids are left out
    lse_i(a)  = log sum_j exp(a s_ij)
    mean_i(a) = sum_j w_ij s_ij,             w_ij = softmax_j(a s_ij)
    """
    if left_out is None:
        left_out = torch.zeros(s.shape[-1], dtype=torch.bool, device=s.device)
    empty = left_out.all(dim=-1)
    # An empty row runs through finite numbers and is overwritten after, else its gradient would be 0 * inf = NaN.
    hidden = left_out & ~empty[..., None]
    lses, means = [], []
    for scale in scales:
        logits = (scale * s).masked_fill(hidden, -torch.inf)
        lses.append(torch.logsumexp(logits, dim=-1).masked_fill(empty, -torch.inf))
        if with_mean:
            weights = torch.softmax(logits, dim=-1)
            weights = weights.detach() if detach_weights else weights
            means.append((weights * s).sum(dim=-1).masked_fill(empty, 0.0))
    return torch.stack(lses), torch.stack(means) if with_mean else s.new_empty(len(scales), 0)
