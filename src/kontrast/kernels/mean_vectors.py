"""Mean of the keys, or of values that belong to them, weighted by the softmax of each row of the affinity matrix.

M queries, K keys, D width, E width of the values.  queries [M,D], keys [K,D], values [K,E], ids [M] and [K], bias [K],
mean vectors [M,E]; a tile of the affinity is [rows, columns].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kontrast.kernels.custom_gradient import Operation
from kontrast.kernels.dense import accumulation_type, affinity, equal_ids, in_torch_func
from kontrast.kernels.row_statistics import (
    TYPES,
    as_constant,
    check_arguments,
    checked_bias,
    choose_implementation,
    refuse,
)
from kontrast.kernels.tiled import Affinity, RunningSums


def mean_vectors(
    queries: Tensor, keys: Tensor, *, scale: float, values: Tensor | None = None,
    query_ids: Tensor | None = None, key_ids: Tensor | None = None, key_bias: Tensor | None = None,
    implementation: str = "auto",
) -> Tensor:  # fmt: skip
    r"""Compute the softmax-weighted mean of the keys for each query, with exact gradients to all tensors.

        m_i = sum_j w_ij v_j,       w_ij = softmax_j(a <q_i, k_j> + b_j)       pairs with equal ids are excluded

    The values v are the keys unless given. For keys, <q_i, m_i> is `mean_i` of `row_statistics`, and a m_i is the
    gradient of its `lse_i` with respect to q_i. A row without pairs is zero and has no gradient. Products and sums have
    the precision of `row_statistics`, and the result has the type of its sums: float64 for float64 rows, else float32.

    Args:
        queries: rows q, float64, float32, bfloat16 or float16.
        keys: rows k of the same type.
        scale: a, any real number. It gets no gradient.
        values: rows v of the same type. None means the keys. For constant weights, detach the queries and keys.
        query_ids: an int64 per query, usually the index of its image. None excludes no pairs.
        key_ids: an int64 per key.
        key_bias: a finite number b per key; 0 if None.
        implementation: `dense` (the definition), `tiled` (plain torch), `triton` (CUDA), or `auto` by device.

    Shape:
        queries [M,D], keys [K,D], values [K,E], query_ids [M], key_ids and key_bias [K]; the mean vectors [M,E].

    Example:
        >>> mean_vectors(torch.eye(2), torch.eye(2), scale=1.0, query_ids=torch.arange(2), key_ids=torch.arange(2))
        tensor([[0., 1.],
                [1., 0.]])
    """
    check_arguments(queries, keys, query_ids, key_ids, implementation, needs_keys=True)
    key_bias, a = checked_bias(key_bias, keys), as_constant("scale", scale)
    values = checked_values(keys if values is None else values, keys)
    if implementation == "dense" or (implementation == "auto" and in_torch_func()):
        return dense_means(queries, keys, values, query_ids, key_ids, key_bias, a)[0]
    how = choose_implementation(implementation, queries)
    return operation(queries, keys, values, query_ids, key_ids, key_bias, a, how)[0]


def checked_values(values: Tensor, keys: Tensor) -> Tensor:
    good = isinstance(values, Tensor) and values.ndim == 2 and values.dtype in TYPES and values.shape[1] > 0
    if not good or len(values) != len(keys) or values.dtype != keys.dtype or values.device != keys.device:
        refuse("values", values, f"[{len(keys)}, width] of {keys.dtype} on {keys.device}, like the keys")
    return values


def dense_means(
    queries: Tensor, keys: Tensor, values: Tensor, query_ids: Tensor | None, key_ids: Tensor | None,
    key_bias: Tensor | None, scale: float, implementation: str = "dense",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the mean vectors [M,E] and the lse [M] by definition."""
    logits, excluded = scale * affinity(queries, keys), equal_ids(query_ids, key_ids)
    if key_bias is not None:
        logits = logits + key_bias
    if excluded is None:
        excluded = torch.zeros(len(keys), dtype=torch.bool, device=keys.device)
    empty = excluded.all(dim=-1)
    # A row without pairs is computed from finite numbers and overwritten, or its gradient would be 0 * inf = NaN.
    logits = logits.masked_fill(excluded & ~empty[..., None], -torch.inf)
    means = affinity(torch.softmax(logits, dim=1), values.T.to(logits.dtype))
    return means.masked_fill(empty[..., None], 0), torch.logsumexp(logits, dim=1).masked_fill(empty, -torch.inf)


def forward(
    queries: Tensor, keys: Tensor, values: Tensor, query_ids: Tensor | None, key_ids: Tensor | None,
    key_bias: Tensor | None, scale: float, implementation: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the mean vectors [M,E] and, for the backward pass, the lse [M]."""
    if implementation == "triton":
        from kontrast.kernels.triton_mean_vectors import triton_means_forward

        return triton_means_forward(queries, keys, values, query_ids, key_ids, key_bias, scale)
    return tiled_forward(queries, keys, values, query_ids, key_ids, key_bias, scale)


def backward(
    grads: list[Tensor | None], outputs: list[Tensor], needs: list[bool],
    queries: Tensor, keys: Tensor, values: Tensor, query_ids: Tensor | None, key_ids: Tensor | None,
    key_bias: Tensor | None, scale: float, implementation: str,
) -> list[Tensor]:  # fmt: skip
    """Return the needed gradients of queries [M,D], keys [K,D], values [K,E] and bias [K]."""
    if implementation == "triton":
        from kontrast.kernels.triton_mean_vectors import triton_means_backward

        assert grads[0] is not None
        given = queries, keys, values, query_ids, key_ids, key_bias, scale
        return triton_means_backward(grads[0], outputs, needs, *given)
    return tiled_backward(grads, outputs, needs, queries, keys, values, query_ids, key_ids, key_bias, scale)


def shapes(queries: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    means = queries.new_empty(queries.shape[0], values.shape[1], dtype=accumulation_type(queries))
    return means, means.new_empty(queries.shape[0])


operation = Operation(
    "mean_vectors",
    "Tensor queries, Tensor keys, Tensor values, Tensor? query_ids, Tensor? key_ids, Tensor? key_bias, float scale, "
    "str implementation",
    2, forward=forward, backward=backward, definition=dense_means, shapes=shapes,
)  # fmt: skip


def tiled_forward(
    queries: Tensor, keys: Tensor, values: Tensor, query_ids: Tensor | None, key_ids: Tensor | None,
    key_bias: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the mean vectors [M,E] and the lse [M], tile by tile."""
    matrix = Affinity(queries, keys, query_ids, key_ids, key_bias)
    sums = RunningSums(matrix.queries, with_mean=False)
    values = values.to(matrix.keys.dtype)
    means = matrix.queries.new_zeros(len(queries), values.shape[1])
    for rows, columns in matrix.tiles(triangle=False):
        exponent = matrix.scaled(matrix.tile(rows, columns, 1.0), scale, rows, columns)
        excluded = matrix.excluded_pairs(rows, columns)
        if excluded is not None:
            exponent.masked_fill_(excluded, -torch.inf)
        parts, shrink = sums.add_parts(rows, exponent)
        means[rows].mul_(shrink[:, None]).addmm_(parts, values[columns])
    empty = sums.total == 0
    means /= sums.total.masked_fill(empty, 1)[:, None]
    return means, sums.top + sums.total.log()


def tiled_backward(
    grads: list[Tensor | None], outputs: list[Tensor], needs: list[bool],
    queries: Tensor, keys: Tensor, values: Tensor, query_ids: Tensor | None, key_ids: Tensor | None,
    key_bias: Tensor | None, scale: float,
) -> list[Tensor]:  # fmt: skip
    r"""Return the needed gradients, with p_ij = w_ij (<g_i, v_j> - <g_i, m_i>).

    dq_i = a sum_j p_ij k_j,   dk_j = a sum_i p_ij q_i,   dv_j = sum_i w_ij g_i,   db_j = sum_i p_ij
    """
    incoming, _ = grads  # nobody but the backward pass uses the lse
    means, lse = outputs
    assert incoming is not None
    empty = torch.isneginf(lse)
    incoming = incoming.masked_fill(empty[:, None], 0)
    level = (incoming * means).sum(dim=1, keepdim=True)
    lse = lse.masked_fill(empty, 0)
    matrix = Affinity(queries, keys, query_ids, key_ids, key_bias)
    wide = values.to(matrix.keys.dtype)
    need_queries, need_keys, need_values, _, _, need_bias, *_ = needs
    to_queries, to_keys, to_values = (torch.zeros_like(x) for x in (matrix.queries, matrix.keys, wide))
    to_bias = matrix.keys.new_zeros(len(keys))
    for rows, columns in matrix.tiles(triangle=False):
        weights = matrix.scaled(matrix.tile(rows, columns, 1.0), scale, rows, columns).sub_(lse[rows, None]).exp_()
        excluded = matrix.excluded_pairs(rows, columns)
        if excluded is not None:
            weights.masked_fill_(excluded, 0)
        if need_values:
            to_values[columns].addmm_(weights.T, incoming[rows])
        if not (need_queries or need_keys or need_bias):
            continue
        p = matrix.buffer("affinity", rows, columns)
        torch.addmm(level[rows], incoming[rows], wide[columns].T, beta=-1, out=p).mul_(weights)
        if need_queries:
            to_queries[rows].addmm_(p, matrix.keys[columns])
        if need_keys:
            to_keys[columns].addmm_(p.T, matrix.queries[rows])
        to_bias[columns] += p.sum(dim=0)
    found = (to_queries.mul_(scale).to(queries.dtype), to_keys.mul_(scale).to(keys.dtype), to_values.to(values.dtype),
             None, None, to_bias)  # fmt: skip
    return [part for part, need in zip(found, needs) if need and part is not None]
