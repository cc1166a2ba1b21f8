"""The definition of the row statistics: the whole affinity matrix, differentiated by autograd; also for small batches.

M queries, K keys, D width, S scales.  queries [M,D], keys [K,D], ids [M] and [K], statistics [S,M].
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernels, on the CPU. Triton too reads the setting once, when it is imported."""


def in_torch_func() -> bool:
    """Return whether a transform of torch.func is active (grad, jvp, vmap); it can't use custom gradients."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def accumulation_type(tensor: Tensor) -> torch.dtype:
    """Return the type of sums: float64 for float64 input, float32 for everything else."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def dense_statistics(
    queries: Tensor, keys: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None,
    scales: Sequence[float], detach_weights: bool, with_mean: bool, key_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return lse [S,M] and mean [S,M], or [S,0] without the mean."""
    keys, key_ids = (queries, query_ids) if keys is None else (keys, key_ids)
    excluded = equal_ids(query_ids, key_ids)
    return affinity_statistics(affinity(queries, keys), excluded, scales, detach_weights, with_mean, key_bias)


def equal_ids(query_ids: Tensor | None, key_ids: Tensor | None) -> Tensor | None:
    """Return which pairs share an id [M,K], or None without ids."""
    return None if query_ids is None or key_ids is None else query_ids[:, None] == key_ids[None, :]


def affinity(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the whole matrix [M,K]."""
    # A product of two bf16 or fp16 numbers is exact in float32, so this is "products in that type, sums in float32".
    with torch.autocast(queries.device.type, enabled=False):
        return queries.to(accumulation_type(queries)) @ keys.to(accumulation_type(keys)).T


def affinity_statistics(
    s: Tensor, excluded: Tensor | None, scales: Sequence[float | Tensor], detach_weights: bool, with_mean: bool,
    key_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    r"""Return lse [S,...] and mean [S,...] over the last dimension of s [...,K], by definition; [S,0] without the mean.

    s_ij      = <q_i, k_j>                   pairs with equal ids are excluded
    lse_i(a)  = log sum_j exp(a s_ij + b_j)
    mean_i(a) = sum_j w_ij s_ij,             w_ij = softmax_j(a s_ij + b_j)      the bias b [K] is 0 unless given
    """
    if excluded is None:
        excluded = torch.zeros(s.shape[-1], dtype=torch.bool, device=s.device)
    empty = excluded.all(dim=-1)
    # A row without pairs is computed from finite numbers and overwritten, or its gradient would be 0 * inf = NaN.
    hidden = excluded & ~empty[..., None]
    lses, means = [], []
    for scale in scales:
        logits = scale * s if key_bias is None else scale * s + key_bias
        logits = logits.masked_fill(hidden, -torch.inf)
        lses.append(torch.logsumexp(logits, dim=-1).masked_fill(empty, -torch.inf))
        if with_mean:
            weights = torch.softmax(logits, dim=-1)
            weights = weights.detach() if detach_weights else weights
            means.append((weights * s).sum(dim=-1).masked_fill(empty, 0.0))
    return torch.stack(lses), torch.stack(means) if with_mean else s.new_empty(len(scales), 0)
