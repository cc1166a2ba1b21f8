"""Two statistics of each row of the affinity matrix, from which every repulsion is made; and how segments merge.

M queries, K keys, D width, S scales.  queries [M,D], keys [K,D], ids [M] and [K];  statistics [M], for S scales [S,M].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kontrast.kernels.dense import dense_statistics, transformed
from kontrast.kernels.operator import chosen, statistics

IMPLEMENTATIONS = ("auto", "dense", "tiled", "triton")
TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class RowStatistics(NamedTuple):
    """`lse` and `mean` of each row: [M], or [S,M] where a sequence of scales was asked for."""

    lse: Tensor
    mean: Tensor


def row_statistics(
    queries: Tensor,
    keys: Tensor | None = None,
    *,
    scale: float | Sequence[float],
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    detach_weights: bool = False,
    with_mean: bool = True,
    implementation: str = "auto",
) -> RowStatistics:
    r"""Log-sum-exp and softmax-weighted mean of each row of the affinity matrix, with exact gradients.

        s_ij      = <q_i, k_j>                   pairs with equal ids are left out
        lse_i(a)  = log sum_j exp(a s_ij)
        mean_i(a) = sum_j w_ij s_ij,             w_ij = softmax_j(a s_ij)          = d lse_i / d a

    `keys=None` says that the queries are the keys, and `query_ids` serve both sides. `scale` is any real number, or a
    sequence of them. A row with no pair left has lse = -inf, mean = 0 and no gradient. With `detach_weights` the
    gradient of `mean` treats w as constant; without `with_mean` the mean is not made (an empty tensor stands for it),
    which is faster. The input's type chooses the precision: bf16 and fp16 products with float32 sums, float32-grade for
    float32, float64 for float64. `implementation` is chosen by the device unless it is named; within
    torch.func's transforms it is the definition, which stores the matrix.
    """
    check(queries, keys, query_ids, key_ids, implementation)
    scales = scales_of(scale)
    if implementation == "dense" or (implementation == "auto" and transformed()):
        lse, mean = dense_statistics(queries, keys, scales, query_ids, key_ids, detach_weights, with_mean)
    else:
        lse, mean = statistics(
            queries, keys, query_ids, key_ids, scales, detach_weights, with_mean, chosen(implementation, queries)
        )
    return RowStatistics(lse, mean) if isinstance(scale, Sequence) else RowStatistics(lse[0], mean[0])


def scales_of(scale: float | Sequence[float]) -> list[float]:
    """A scale or several, as a list of them."""
    if not isinstance(scale, int | float) and (isinstance(scale, str) or getattr(scale, "ndim", False)):
        raise ValueError(f"scale is {type(scale).__name__}: give a number, or a list of numbers")
    scales = [constant(a) for a in scale] if isinstance(scale, Sequence) else [constant(scale)]
    if not scales or not all(abs(a) < float("inf") for a in scales):
        raise ValueError(f"scale is {scale!r}: give a finite number, or a sequence of at least one")
    return scales


def constant(number: float) -> float:
    """The number itself. A compiler that met several takes it for a symbol, for which our operator would go on with the
    number of the first trace; as the key of a dictionary it is made a constant, and each number has its own trace."""
    return next(iter({float(number): None}))


def check(
    queries: Tensor, keys: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None, implementation: str
) -> None:
    """Say what is wrong with the arguments, by shape and type alone: values are never read, so nothing waits."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation is {implementation!r}: give one of {', '.join(IMPLEMENTATIONS)}")
    for name, rows in (("queries", queries), ("keys", keys)):
        if rows is None:
            continue
        if not isinstance(rows, Tensor):
            raise ValueError(f"{name} are {type(rows).__name__}: give a tensor")
        if rows.ndim != 2 or rows.shape[0] == 0 or rows.shape[1] == 0:
            raise ValueError(f"{name} have shape {tuple(rows.shape)}: give rows by width, both at least 1")
        if rows.dtype not in TYPES:
            raise ValueError(f"{name} are {rows.dtype}: give float64, float32, bfloat16 or float16")
    if keys is None:
        if key_ids is not None:
            raise ValueError("key_ids were given without keys: where queries are keys, give query_ids alone")
    elif keys.shape[1] != queries.shape[1] or keys.dtype != queries.dtype or keys.device != queries.device:
        given = f"{list(queries.shape)} {queries.dtype} {queries.device}, {list(keys.shape)} {keys.dtype} {keys.device}"
        raise ValueError(f"queries and keys are {given}: give the same width, type and device")
    elif (query_ids is None) != (key_ids is None):
        raise ValueError("ids were given for one side only: give both query_ids and key_ids, or neither")
    for name, ids, rows in (("query_ids", query_ids, queries), ("key_ids", key_ids, keys)):
        if ids is None or rows is None:
            continue
        if ids.shape != rows.shape[:1] or ids.dtype != torch.int64 or ids.device != rows.device:
            given = f"{list(ids.shape)} {ids.dtype} on {ids.device}"
            raise ValueError(f"{name} are {given}: give [{rows.shape[0]}] int64 on {rows.device}")


def merge(
    segments: Sequence[RowStatistics], scale: float | Sequence[float], *, detach_weights: bool = False
) -> RowStatistics:
    r"""Statistics over disjoint segments of columns, combined into those over all of them; differentiable.

        lse = log sum_c exp(lse_c)               mean = sum_c exp(lse_c - lse) mean_c

    A segment with no pair (lse = -inf) is neutral. With `detach_weights` a segment's share of the mean is constant too.
    """
    if not segments:
        raise ValueError("no segments to merge: give at least one")
    dimensions = 2 if isinstance(scale, Sequence) else 1
    if any(segment.lse.ndim != dimensions for segment in segments):
        shapes = [list(segment.lse.shape) for segment in segments]
        raise ValueError(f"segments have shapes {shapes} for scale {scale!r}: give [M] for a number, [S,M] for several")
    lses = torch.stack([segment.lse for segment in segments])
    top = lses.detach().amax(dim=0)
    empty = torch.isneginf(top)
    top = top.masked_fill(empty, 0.0)
    parts = torch.exp(lses - top)
    # An empty row divides by one, not by zero, so that its gradient is zero and not NaN.
    total = parts.sum(dim=0).masked_fill(empty, 1.0)
    lse = (top + torch.log(total)).masked_fill(empty, -torch.inf)
    shares = parts / total
    means = torch.stack([segment.mean for segment in segments])
    if means.shape[-1] != lses.shape[-1]:
        return RowStatistics(lse, means[0, ..., :0])
    return RowStatistics(lse, ((shares.detach() if detach_weights else shares) * means).sum(dim=0))
