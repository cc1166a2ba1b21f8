"""Statistics of the rows and of the columns of one affinity matrix, from the same tiles: two modalities, as in CLIP.

M queries, K keys, D width.  queries [M,D], keys [K,D], ids [M] and [K], scale a scalar; statistics of the rows [M] and
of the columns [K]; a tile of the affinity is [rows, columns].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kontrast.kernels.custom_gradient import Operation
from kontrast.kernels.dense import accumulation_type, affinity, affinity_statistics, equal_ids, in_torch_func
from kontrast.kernels.row_statistics import (
    RowStatistics,
    as_constant,
    as_scalar,
    check_arguments,
    choose_implementation,
)
from kontrast.kernels.tiled import Affinity, RunningSums

Statistics = tuple[Tensor, Tensor, Tensor, Tensor]
"""lse and mean of the rows, then lse and mean of the columns. The means are empty if they are not wanted."""


def two_way_statistics(
    queries: Tensor, keys: Tensor, *, scale: float | Tensor,
    query_ids: Tensor | None = None, key_ids: Tensor | None = None,
    detach_weights: bool = False, with_mean: bool = True, unit: bool = False, implementation: str = "auto",
) -> tuple[RowStatistics, RowStatistics]:  # fmt: skip
    r"""Compute the statistics of the rows and of the columns of the affinity matrix together, with exact gradients.

    The first result is `row_statistics(queries, keys)` and the second `row_statistics(keys, queries)`, each with
    gradient to both sides. They share every tile of the matrix, and the loss of both has one backward pass.

    Args:
        queries: rows q, float64, float32, bfloat16 or float16.
        keys: rows k of the same type.
        scale: a, a number or a tensor with one number, with gradient.
        query_ids: an int64 per query, usually the index of its image. None excludes no pairs.
        key_ids: an int64 per key.
        detach_weights: treat the weights w as constant in the gradient of the means.
        with_mean: compute the means too. Without it, they are empty and the result is ready sooner.
        unit: promise that no row is longer than one, so that the CUDA kernels need not find out.
        implementation: `dense` (the definition), `tiled` (plain torch), `triton` (CUDA), or `auto` by device.

    Shape:
        queries [M,D], keys [K,D], scale a scalar, query_ids [M], key_ids [K]; statistics [M] and [K].

    Example:
        >>> rows, columns = two_way_statistics(torch.eye(3), torch.eye(3)[:2], scale=1.0)
        >>> rows.lse, columns.lse
        (tensor([1.3133, 1.3133, 0.6931]), tensor([1.5514, 1.5514]))
    """
    check_arguments(queries, keys, query_ids, key_ids, implementation, needs_keys=True)
    a = as_scalar("scale", scale, queries)
    if implementation == "dense" or (implementation == "auto" and in_torch_func()):
        found: tuple[Tensor, ...] = dense_both_ways(queries, keys, query_ids, key_ids, a, detach_weights, with_mean)
    else:
        how = choose_implementation(implementation, queries)
        number = None if isinstance(scale, Tensor) else as_constant("scale", scale)
        found = operation(queries, keys, query_ids, key_ids, a, detach_weights, with_mean, how, number, unit)
    return RowStatistics(*found[:2]), RowStatistics(*found[2:])


def dense_both_ways(
    queries: Tensor, keys: Tensor, query_ids: Tensor | None, key_ids: Tensor | None, scale: Tensor,
    detach_weights: bool, with_mean: bool, *rest: Any,
) -> Statistics:  # fmt: skip
    """Return the statistics by definition."""
    s, excluded = affinity(queries, keys), equal_ids(query_ids, key_ids)
    lse, mean = affinity_statistics(s, excluded, [scale], detach_weights, with_mean)
    mirrored = None if excluded is None else excluded.T
    column_lse, column_mean = affinity_statistics(s.T, mirrored, [scale], detach_weights, with_mean)
    return lse[0], mean[0], column_lse[0], column_mean[0]


def forward(
    queries: Tensor, keys: Tensor, query_ids: Tensor | None, key_ids: Tensor | None, scale: Tensor,
    detach_weights: bool, with_mean: bool, implementation: str, number: float | None, unit: bool,
) -> Statistics:  # fmt: skip
    """Return lse and mean of the rows [M] and of the columns [K]; the means are [0] if they are not wanted."""
    if implementation == "triton":
        from kontrast.kernels.triton_wide_launch import triton_two_way_forward

        return triton_two_way_forward(queries, keys, query_ids, key_ids, scale, with_mean, number, unit)
    return tiled_forward(queries, keys, query_ids, key_ids, scale, with_mean)


def backward(
    grads: list[Tensor | None], outputs: list[Tensor], needs: list[bool],
    queries: Tensor, keys: Tensor, query_ids: Tensor | None, key_ids: Tensor | None, scale: Tensor,
    detach_weights: bool, with_mean: bool, implementation: str, number: float | None, unit: bool,
) -> list[Tensor]:  # fmt: skip
    """Return the needed gradients of queries [M,D], keys [K,D] and scale."""
    if implementation == "triton":
        from kontrast.kernels.triton_wide_launch import triton_two_way_backward

        need_queries, need_keys, _, _, need_scale, *_ = needs
        found = triton_two_way_backward(
            grads, outputs, queries, keys, query_ids, key_ids, scale, detach_weights, need_queries, need_keys,
            need_scale, number, unit,
        )  # fmt: skip
        return [part for part in found if part is not None]
    return tiled_backward(grads, outputs, needs, queries, keys, query_ids, key_ids, scale, detach_weights, with_mean)


def shapes(
    queries: Tensor, keys: Tensor, query_ids: Any, key_ids: Any, scale: Any, detach: Any, with_mean: bool, *rest: Any
) -> Statistics:
    kind = accumulation_type(queries)
    rows, columns = (side.new_empty(side.shape[0], dtype=kind) for side in (queries, keys))
    means = (torch.empty_like(x) if with_mean else x.new_empty(0) for x in (rows, columns))
    return rows, next(means), columns, next(means)


operation = Operation(
    "two_way_statistics",
    "Tensor queries, Tensor keys, Tensor? query_ids, Tensor? key_ids, Tensor scale, bool detach_weights, "
    "bool with_mean, str implementation, float? number, bool unit",
    4, forward=forward, backward=backward, definition=dense_both_ways, shapes=shapes,
)  # fmt: skip


def tiled_forward(
    queries: Tensor, keys: Tensor, query_ids: Tensor | None, key_ids: Tensor | None, scale: Tensor, with_mean: bool
) -> Statistics:
    """Return the statistics, tile by tile."""
    matrix = Affinity(queries, keys, query_ids, key_ids)
    row_sums, column_sums = (RunningSums(side, with_mean) for side in (matrix.queries, matrix.keys))
    bounded = matrix.bounded([scale])
    for rows, columns in matrix.tiles(triangle=False):
        tile, excluded = matrix.tile(rows, columns, 1.0), matrix.excluded_pairs(rows, columns)
        exponent = masked_exponents(matrix, tile, scale, excluded, rows, columns)
        if bounded:
            row_sums.add_bounded(rows, exponent.exp_(), tile)
            column_sums.add_bounded(columns, exponent.T, tile.T)
        else:
            row_sums.add(rows, exponent, tile)
            exponent = masked_exponents(matrix, tile, scale, excluded, rows, columns)
            column_sums.add(columns, exponent.T, tile.T)
    return *row_sums.finish(), *column_sums.finish()


def masked_exponents(
    matrix: Affinity, tile: Tensor, scale: Tensor, excluded: Tensor | None, rows: slice, columns: slice
) -> Tensor:
    """Return a s_ij of a tile, -inf for excluded pairs, in memory that is reused."""
    exponent = matrix.scaled(tile, scale, rows, columns)
    return exponent if excluded is None else exponent.masked_fill_(excluded, -torch.inf)


class Side(NamedTuple):
    r"""Coefficients of the gradient through the statistics of one side, rows or columns.

    The gradient of the exponent a s_ij is w_ij (alpha_i + beta_i s_ij), and that of s_ij itself w_ij direct_i:

        alpha_i = g_lse - mean_i g_mean,   beta_i = g_mean,   direct_i = g_mean
        alpha_i = g_lse,                   beta_i = 0,        direct_i = g_mean        with weights detached
    """

    lse: Tensor
    alpha: Tensor
    beta: Tensor | None
    direct: Tensor | None

    def select(self, index: tuple[slice | None, ...]) -> Side:
        """Select some rows or columns and add a dimension, so that they broadcast over a tile."""
        return Side(*(None if part is None else part[index] for part in self))  # type: ignore[arg-type]


def side(grad_lse: Tensor | None, grad_mean: Tensor | None, lse: Tensor, mean: Tensor, detach_weights: bool) -> Side:
    """Return the coefficients of one side. A row without pairs gets zeros, whatever its incoming gradient is."""
    empty = torch.isneginf(lse)
    alpha = torch.zeros_like(lse) if grad_lse is None else grad_lse.masked_fill(empty, 0)
    beta = direct = None
    if grad_mean is not None and mean.numel():
        direct = grad_mean.masked_fill(empty, 0)
        if not detach_weights:
            alpha, beta = alpha - mean * direct, direct
    return Side(lse.masked_fill(empty, 0), alpha, beta, direct)


def tiled_backward(
    grads: list[Tensor | None], outputs: list[Tensor], needs: list[bool],
    queries: Tensor, keys: Tensor, query_ids: Tensor | None, key_ids: Tensor | None, scale: Tensor,
    detach_weights: bool, with_mean: bool,
) -> list[Tensor]:  # fmt: skip
    r"""Return the needed gradients, with x_ij the gradient of the exponent and y_ij the direct one, of both sides.

    dq_i = sum_j (a x_ij + y_ij) k_j,   dk_j = sum_i (a x_ij + y_ij) q_i,   da = sum_ij x_ij s_ij
    """
    sides = [side(grads[n], grads[n + 1], outputs[n], outputs[n + 1], detach_weights) for n in (0, 2)]
    matrix = Affinity(queries, keys, query_ids, key_ids)
    to_queries, to_keys = torch.zeros_like(matrix.queries), torch.zeros_like(matrix.keys)
    to_scale = torch.zeros_like(scale)
    need_queries, need_keys, _, _, need_scale, *_ = needs
    for rows, columns in matrix.tiles(triangle=False):
        tile, excluded = matrix.tile(rows, columns, 1.0), matrix.excluded_pairs(rows, columns)
        gradient = matrix.buffer("gradient", rows, columns).zero_()
        for part in (sides[0].select((rows, None)), sides[1].select((None, columns))):
            weights = matrix.scaled(tile, scale, rows, columns).sub_(part.lse).exp_()
            if excluded is not None:
                weights.masked_fill_(excluded, 0)
            x = part.alpha if part.beta is None else part.alpha + part.beta * tile
            if need_scale:
                to_scale += (weights * x).mul_(tile).sum()
            gradient += weights.mul_(scale * x if part.direct is None else scale * x + part.direct)
        if need_queries:
            to_queries[rows].addmm_(gradient, matrix.keys[columns])
        if need_keys:
            to_keys[columns].addmm_(gradient.T, matrix.queries[rows])
    found = (to_queries.to(queries.dtype), to_keys.to(keys.dtype), None, None, to_scale)
    return [part for part, need in zip(found, needs) if need and part is not None]
