"""Two statistics of each row of the affinity matrix, from which every repulsion is made, and how segments merge.

M queries, K keys, D width, S scales.  queries [M,D], keys [K,D], ids [M] and [K], bias [K];  statistics [M], for S
scales [S,M].  A scale is a number, a tensor [], or a tensor [M] with one scale per query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, TypedDict

import torch
from torch import Tensor

from kontrast.kernels.dense import INTERPRETED, accumulation_type, dense_statistics, in_torch_func
from kontrast.kernels.operator import StatisticsFunction, statistics_operator

IMPLEMENTATIONS = ("auto", "dense", "tiled", "triton")
TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Scale = float | Tensor | Sequence[float | Tensor]


class RowStatistics(NamedTuple):
    """`lse` and `mean` of each row: [M], or [S,M] for a sequence of S scales."""

    lse: Tensor
    mean: Tensor


class StatisticsOptions(TypedDict, total=False):
    """Options of the statistics.

    with_mean: compute the mean too. Most objectives need `lse` alone, which is faster, and get an empty mean.
    detach_weights: treat the weights of the mean as constants.
    """

    with_mean: bool
    detach_weights: bool


def row_statistics(
    queries: Tensor, keys: Tensor | None = None, *, scale: Scale,
    query_ids: Tensor | None = None, key_ids: Tensor | None = None, key_bias: Tensor | None = None,
    detach_weights: bool = False, with_mean: bool = True, unit: bool = False, implementation: str = "auto",
) -> RowStatistics:  # fmt: skip
    r"""Compute the log-sum-exp and the softmax-weighted mean of each row of the affinity matrix, with exact gradients.

        s_ij      = <q_i, k_j>                   pairs with equal ids are excluded
        lse_i(a)  = log sum_j exp(a s_ij + b_j)
        mean_i(a) = sum_j w_ij s_ij,             w_ij = softmax_j(a s_ij + b_j)          = d lse_i / d a

    A row without pairs has lse = -inf, mean = 0 and no gradient. Products of bf16 and fp16 rows are summed in float32,
    those of float32 rows have float32's precision, and those of float64 rows float64's. Within the transforms of
    torch.func the definition is used, which stores the matrix.

    A scale that is a tensor gets its gradient too: d lse/da is the mean, and d mean/da the variance of s under w. The
    rows are multiplied by it (in float32 at least, and rounded to their type again), and its value is never read, so it
    must be positive, or the result may be NaN.

    Args:
        queries: rows q, float64, float32, bfloat16 or float16.
        keys: rows k of the same type. None means that the queries are the keys.
        scale: a, any real number; or a positive floating point tensor, [] or with one scale per query [M]; or a
            sequence of S numbers or tensors.
        query_ids: an int64 per query, usually the index of its image. None excludes no pairs.
        key_ids: an int64 per key. Not allowed without keys, because `query_ids` then serve both sides.
        key_bias: a finite number b per key, with gradient; 0 if None. Not allowed without keys.
        detach_weights: treat w as constant in the gradient of `mean`.
        with_mean: compute the mean too. Without it, the result has an empty mean and is ready sooner.
        unit: promise that no row is longer than one, so that the CUDA kernels need not find out.
        implementation: `dense` (the definition), `tiled` (plain torch), `triton` (CUDA), or `auto` by device.

    Shape:
        queries [M,D], keys [K,D], query_ids [M], key_ids and key_bias [K], scale [] or [M]; lse and mean [M], or [S,M]
        for S scales.

    Example:
        >>> rows = torch.eye(3)
        >>> row_statistics(rows, scale=2.0, query_ids=torch.arange(3)).mean
        tensor([0., 0., 0.])
    """
    check_arguments(queries, keys, query_ids, key_ids, implementation)
    key_bias = checked_bias(key_bias, keys)
    scales = as_list(scale)
    if any(isinstance(a, Tensor) for a in scales):
        options = {"detach_weights": detach_weights, "with_mean": with_mean, "implementation": implementation}
        options["key_bias"] = key_bias
        parts = [scaled_statistics(queries, keys, a, query_ids, key_ids, **options) for a in scales]
        return RowStatistics(*map(torch.stack, zip(*parts))) if isinstance(scale, Sequence) else parts[0]
    if implementation == "dense" or (implementation == "auto" and in_torch_func()):
        lse, mean = dense_statistics(queries, keys, query_ids, key_ids, scales, detach_weights, with_mean, key_bias)
    else:
        compute = statistics_operator if torch.compiler.is_compiling() else StatisticsFunction.apply
        how = choose_implementation(implementation, queries)
        lse, mean = compute(queries, keys, query_ids, key_ids, scales, detach_weights, with_mean, how, key_bias, unit)
    return RowStatistics(lse, mean) if isinstance(scale, Sequence) else RowStatistics(lse[0], mean[0])


def scaled_statistics(
    queries: Tensor, keys: Tensor | None, scale: float | Tensor, query_ids: Tensor | None, key_ids: Tensor | None,
    **options: Any,
) -> RowStatistics:  # fmt: skip
    """Return the statistics at one scale. A tensor multiplies the rows, whose statistics are computed at scale 1.

    If the queries are the keys, both are multiplied by its square root, so that they stay equal and one pass computes
    the whole gradient.
    """
    if not isinstance(scale, Tensor):
        return row_statistics(queries, keys, scale=scale, query_ids=query_ids, key_ids=key_ids, **options)
    a = scale.to(queries.device, accumulation_type(queries))
    if a.ndim and a.shape != queries.shape[:1]:
        refuse("scale", scale, f"[] or [{queries.shape[0]}], one scale per query")
    if keys is None and a.ndim:
        keys, key_ids = queries, query_ids
    factor = a.sqrt() if keys is None else a[..., None]
    rows = (queries.to(a.dtype) * factor).to(queries.dtype)
    lse, mean = row_statistics(rows, keys, scale=1.0, query_ids=query_ids, key_ids=key_ids, **options)
    return RowStatistics(lse, mean / a if mean.shape == lse.shape else mean)


def choose_implementation(implementation: str, queries: Tensor) -> str:
    """Resolve `auto`, and check that triton can take the queries."""
    native = queries.device.type == "cuda" and queries.dtype != torch.float64
    if implementation == "auto":
        return "triton" if native else "tiled"
    if implementation == "triton" and not (native or (INTERPRETED and queries.dtype != torch.float64)):
        refuse("implementation", "triton", f"'tiled' for {queries.dtype} on {queries.device}")
    return implementation


def as_list(scale: Scale) -> list[Any]:
    """Return a scale or several as a list of numbers and tensors."""
    given = list(scale) if isinstance(scale, Sequence) else [scale]
    scales = [a if isinstance(a, Tensor) else constant(a) for a in given]
    if not scales or not all(map(is_scale, scales)):
        refuse("scale", scale, "a finite number, a floating point tensor, or a sequence of at least one of them")
    return scales


def is_scale(scale: float | Tensor) -> bool:
    """Return whether a number is finite, or a tensor has the type and dimensions of a scale; its value is not read."""
    if isinstance(scale, Tensor):
        return scale.is_floating_point() and scale.ndim <= 1
    return abs(scale) < float("inf")


def constant(number: float) -> float:
    """Return the number, as a constant of the compiled graph.

    After several different numbers torch's compiler would pass a symbol, and the operator would keep using the number
    of the first trace. The key of a dictionary can't be a symbol, so each number gets a trace of its own.
    """
    return next(iter({float(number): None}))


def as_constant(name: str, number: float) -> float:
    """Return a finite number without gradient, as a constant of the compiled graph."""
    if isinstance(number, Tensor):
        refuse(name, number, "a plain number: a tensor would get no gradient here")
    if not abs(number) < float("inf"):
        refuse(name, number, "a finite number")
    return constant(number)


def as_scalar(name: str, number: float | Tensor, like: Tensor) -> Tensor:
    """Return a number, or a tensor with one number, as a scalar in the type of the sums, with its gradient."""
    kind = accumulation_type(like)
    if not isinstance(number, Tensor):
        return like.new_full((), as_constant(name, number), dtype=kind)
    if number.numel() != 1 or not number.is_floating_point() or number.device != like.device:
        refuse(name, number, f"a number, or a floating point tensor with one number on {like.device}")
    return number.reshape(()).to(kind)


def check_arguments(
    queries: Tensor, keys: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None, implementation: str,
    needs_keys: bool = False,
) -> None:  # fmt: skip
    """Check shapes and types. Values are never read, because that would wait for the device."""
    if needs_keys and keys is None:
        refuse("keys", keys, "[rows, width]; they may be the queries")
    if implementation not in IMPLEMENTATIONS:
        refuse("implementation", implementation, f"one of {', '.join(IMPLEMENTATIONS)}")
    for name, rows in (("queries", queries), ("keys", keys)):
        good = rows is None or (isinstance(rows, Tensor) and rows.ndim == 2 and rows.dtype in TYPES)
        if not good or (rows is not None and 0 in rows.shape):
            refuse(name, rows, "[rows, width] of float64, float32, bfloat16 or float16, with at least one row")
    q, k = queries, keys
    if k is not None and (k.shape[1] != q.shape[1] or k.dtype != q.dtype or k.device != q.device):
        refuse("keys", k, f"the width, type and device of the queries: {describe(q)}")
    if (k is None or query_ids is None) != (key_ids is None):
        refuse("key_ids", key_ids, "ids if there are keys and query_ids, and None otherwise")
    for name, ids, rows in (("query_ids", query_ids, q), ("key_ids", key_ids, k)):
        if ids is None or rows is None:
            continue
        if ids.shape != rows.shape[:1] or ids.dtype != torch.int64 or ids.device != rows.device:
            refuse(name, ids, f"[{rows.shape[0]}] int64 on {rows.device}")


def checked_bias(key_bias: Tensor | None, keys: Tensor | None) -> Tensor | None:
    """Check the shape of a bias per key and return it in the type of the sums."""
    if key_bias is None:
        return None
    if keys is None:
        refuse("key_bias", key_bias, "None without keys")
    good = isinstance(key_bias, Tensor) and key_bias.is_floating_point() and key_bias.device == keys.device
    if not good or key_bias.shape != keys.shape[:1]:
        refuse("key_bias", key_bias, f"[{keys.shape[0]}] floating point numbers on {keys.device}")
    return key_bias.to(accumulation_type(keys))


def refuse(name: str, given: Any, wanted: str) -> NoReturn:
    """Raise the error of an argument that is not allowed."""
    raise ValueError(f"{name} is {describe(given)}: give {wanted}")


def describe(given: Any) -> str:
    """Return the type, shape and device of a tensor, the type of an array, or the value of anything else."""
    if isinstance(given, Tensor):
        return f"{given.dtype} of shape {list(given.shape)} on {given.device}"
    return repr(given) if isinstance(given, str | int | float | None) else type(given).__name__


def merge(segments: Sequence[RowStatistics], *, detach_weights: bool = False) -> RowStatistics:
    r"""Combine the statistics over disjoint segments of columns into those over all of them; differentiable.

        lse = log sum_c exp(lse_c)               mean = sum_c exp(lse_c - lse) mean_c

    A segment without pairs (lse = -inf) changes nothing.

    Args:
        segments: statistics of the same rows at the same scales, at least one.
        detach_weights: treat the share of each segment in the mean as constant.

    Shape:
        lse and mean of each segment and of the result: the same shape, [M] or [S,M].

    Example:
        >>> halves = [RowStatistics(torch.zeros(3), torch.zeros(3)), RowStatistics(torch.zeros(3), torch.ones(3))]
        >>> merge(halves).mean
        tensor([0.5000, 0.5000, 0.5000])
    """
    lses = torch.stack([segment.lse for segment in segments])
    top = lses.detach().amax(dim=0)
    empty = torch.isneginf(top)
    top = top.masked_fill(empty, 0.0)
    parts = torch.exp(lses - top)
    # A row without pairs is divided by one instead of zero, so that its gradient is zero and not NaN.
    total = parts.sum(dim=0).masked_fill(empty, 1.0)
    lse = (top + torch.log(total)).masked_fill(empty, -torch.inf)
    shares = parts / total
    means = torch.stack([segment.mean for segment in segments])
    if means.shape[-1] != lses.shape[-1]:
        return RowStatistics(lse, means[0, ..., :0])
    return RowStatistics(lse, ((shares.detach() if detach_weights else shares) * means).sum(dim=0))
