"""Sums of softplus over each row of the affinity matrix, for losses that judge every pair separately (SigLIP).

M queries, K keys, D width.  queries [M,D], keys [K,D], ids [M] and [K], scale and bias scalars, sums [M]; a tile of the
affinity is [rows, columns].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kontrast.kernels.custom_gradient import Operation
from kontrast.kernels.dense import accumulation_type, affinity, equal_ids, in_torch_func
from kontrast.kernels.row_statistics import as_scalar, check_arguments, choose_implementation
from kontrast.kernels.tiled import Affinity


def softplus_sums(
    queries: Tensor, keys: Tensor, *, scale: float | Tensor, bias: float | Tensor = 0.0,
    query_ids: Tensor | None = None, key_ids: Tensor | None = None, implementation: str = "auto",
) -> Tensor:  # fmt: skip
    r"""Compute the sum of the softplus of each row of the affinity matrix, with exact gradients.

        s_ij  = <q_i, k_j>                             pairs with equal ids are excluded
        sum_i = sum_j softplus(a s_ij + b),            softplus(x) = log(1 + exp(x))
        d sum_i / d s_ij = a sigmoid(a s_ij + b)

    A row without pairs has the sum 0 and no gradient. Precision and the transforms of torch.func: as `row_statistics`.

    Args:
        queries: rows q, float64, float32, bfloat16 or float16.
        keys: rows k of the same type.
        scale: a, a number or a tensor with one number, with gradient.
        bias: b, a number or a tensor with one number, with gradient.
        query_ids: an int64 per query, usually the index of its image. None excludes no pairs.
        key_ids: an int64 per key.
        implementation: `dense` (the definition), `tiled` (plain torch), `triton` (CUDA), or `auto` by device.

    Shape:
        queries [M,D], keys [K,D], scale and bias scalars, query_ids [M], key_ids [K]; the sums [M].

    Example:
        >>> softplus_sums(torch.eye(2), torch.eye(2), scale=10.0, bias=-5.0)  # softplus(5) + softplus(-5)
        tensor([5.0134, 5.0134])
    """
    check_arguments(queries, keys, query_ids, key_ids, implementation, needs_keys=True)
    a, b = as_scalar("scale", scale, queries), as_scalar("bias", bias, queries)
    if implementation == "dense" or (implementation == "auto" and in_torch_func()):
        return dense_sums(queries, keys, query_ids, key_ids, a, b)[0]
    how = choose_implementation(implementation, queries)
    return operation(queries, keys, query_ids, key_ids, a, b, how)[0]


def dense_sums(
    queries: Tensor, keys: Tensor, query_ids: Tensor | None, key_ids: Tensor | None, scale: Tensor, bias: Tensor,
    implementation: str = "dense",
) -> tuple[Tensor]:  # fmt: skip
    """Return the sums [M] by definition."""
    # softplus(x) as logaddexp(x, 0), because torch's softplus is only approximate for large x.
    x = scale * affinity(queries, keys) + bias
    terms = torch.logaddexp(x, torch.zeros_like(x))
    excluded = equal_ids(query_ids, key_ids)
    return ((terms if excluded is None else terms.masked_fill(excluded, 0)).sum(dim=1),)


def forward(
    queries: Tensor, keys: Tensor, query_ids: Tensor | None, key_ids: Tensor | None, scale: Tensor, bias: Tensor,
    implementation: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the sums [M]; by Triton also the sums of the weights and of the weights times s, which are constants."""
    if implementation == "triton":
        from kontrast.kernels.triton_softplus import triton_softplus_forward

        return triton_softplus_forward(queries, keys, query_ids, key_ids, scale, bias)
    nothing = queries.new_empty(0, dtype=accumulation_type(queries))
    return *tiled_forward(queries, keys, query_ids, key_ids, scale, bias), nothing, torch.empty_like(nothing)


def backward(
    grads: list[Tensor | None], outputs: list[Tensor], needs: list[bool],
    queries: Tensor, keys: Tensor, query_ids: Tensor | None, key_ids: Tensor | None, scale: Tensor, bias: Tensor,
    implementation: str,
) -> list[Tensor]:  # fmt: skip
    """Return the needed gradients of queries [M,D], keys [K,D], scale and bias."""
    if implementation == "triton":
        from kontrast.kernels.triton_softplus import triton_softplus_backward

        incoming, (_, weights, weighted) = grads[0], outputs
        assert incoming is not None
        to_queries, to_keys = triton_softplus_backward(
            incoming, queries, keys, query_ids, key_ids, scale, bias, needs[0], needs[1]
        )
        found = to_queries, to_keys, None, None, (incoming * weighted).sum(), (incoming * weights).sum()
        return [part for part, need in zip(found, needs) if need and part is not None]
    return tiled_backward(grads, outputs, needs, queries, keys, query_ids, key_ids, scale, bias)


def shapes(queries: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    kind, count = accumulation_type(queries), queries.shape[0] if rest[-1] == "triton" else 0
    extra = (queries.new_empty(count, dtype=kind) for _ in range(2))
    return queries.new_empty(queries.shape[0], dtype=kind), *extra


operation = Operation(
    "softplus_sums",
    "Tensor queries, Tensor keys, Tensor? query_ids, Tensor? key_ids, Tensor scale, Tensor bias, str implementation",
    3, forward=forward, backward=backward, definition=dense_sums, shapes=shapes,
)  # fmt: skip


def tiled_forward(
    queries: Tensor, keys: Tensor, query_ids: Tensor | None, key_ids: Tensor | None, scale: Tensor, bias: Tensor
) -> tuple[Tensor]:
    """Return the sums [M], tile by tile."""
    matrix = Affinity(queries, keys, query_ids, key_ids)
    sums = matrix.queries.new_zeros(len(queries))
    for rows, columns in matrix.tiles(triangle=False):
        tile = matrix.tile(rows, columns, 1.0).mul_(scale).add_(bias)
        # log1p(exp(-|x|)) + max(x, 0): exact for small and large x.
        terms = (
            torch.abs(tile, out=matrix.buffer("parts", rows, columns)).neg_().exp_().log1p_().add_(tile.clamp_(min=0))
        )
        excluded = matrix.excluded_pairs(rows, columns)
        sums[rows] += (terms if excluded is None else terms.masked_fill_(excluded, 0)).sum(dim=1)
    return (sums,)


def tiled_backward(
    grads: list[Tensor | None], outputs: list[Tensor], needs: list[bool],
    queries: Tensor, keys: Tensor, query_ids: Tensor | None, key_ids: Tensor | None, scale: Tensor, bias: Tensor,
) -> list[Tensor]:  # fmt: skip
    r"""Return the needed gradients, with p_ij = g_i sigmoid(a s_ij + b).

    dq_i = a sum_j p_ij k_j,   dk_j = a sum_i p_ij q_i,   da = sum_ij p_ij s_ij,   db = sum_ij p_ij
    """
    incoming = grads[0]
    assert incoming is not None
    matrix = Affinity(queries, keys, query_ids, key_ids)
    need_queries, need_keys, _, _, need_scale, need_bias, *_ = needs
    to_queries, to_keys = torch.zeros_like(matrix.queries), torch.zeros_like(matrix.keys)
    to_scale, to_bias = torch.zeros_like(scale), torch.zeros_like(bias)
    for rows, columns in matrix.tiles(triangle=False):
        tile, excluded = matrix.tile(rows, columns, 1.0), matrix.excluded_pairs(rows, columns)
        p = matrix.scaled(tile, scale, rows, columns).add_(bias).sigmoid_().mul_(incoming[rows, None])
        if excluded is not None:
            p.masked_fill_(excluded, 0)
        if need_queries:
            to_queries[rows].addmm_(p, matrix.keys[columns])
        if need_keys:
            to_keys[columns].addmm_(p.T, matrix.queries[rows])
        if need_bias:
            to_bias += p.sum()
        if need_scale:
            to_scale += p.mul_(tile).sum()
    found = (
        to_queries.mul_(scale).to(queries.dtype),
        to_keys.mul_(scale).to(keys.dtype),
        None,
        None,
        to_scale,
        to_bias,
    )
    return [part for part, need in zip(found, needs) if need and part is not None]
