"""Mean vectors by Triton: the weights of a panel of rows are stored, and plain matrix products do the rest.

M queries, K keys, D width, E width of the values.  queries [M,D], keys [K,D], values [K,E], ids [M] and [K], bias [K],
mean vectors [M,E], lse [M]; a panel of weights is [rows, K], in bf16 if the queries are, else in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kontrast.kernels.triton_launch import LOG2_E, RowTerms, triton_forward
from kontrast.kernels.triton_operands import Guard, Operand
from kontrast.kernels.triton_wide_launch import (
    add_product,
    exact_products,
    iter_panels,
    launch_gradient_tiles,
    panel_type,
    product,
)


def iter_weights(rows: Operand, columns: Operand, lse: Tensor, scale: float) -> Iterator[tuple[slice, Tensor]]:
    """Yield some rows and their weights, exp(scale s + bias - lse); a row without pairs has none."""
    empty = torch.isneginf(lse)[None]
    alpha, shift = (~empty).float(), lse[None].masked_fill(empty, 0) * LOG2_E
    guard = Guard(rows, columns, [scale], unit=False, ask=False)
    launch = launch_gradient_tiles(rows, columns, (RowTerms(alpha, alpha, shift, False), None), guard, [scale])
    for panel in iter_panels(rows, columns, launch):
        yield panel.rows, panel.stored


def triton_means_forward(
    queries: Tensor, keys: Tensor, values: Tensor, query_ids: Tensor | None, key_ids: Tensor | None,
    key_bias: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the mean vectors [M,E] and the lse [M], both float32."""
    lse = triton_forward(queries, keys, query_ids, key_ids, [scale], False, False, key_bias)[0][0]
    rows, columns = Operand(queries, query_ids), Operand(keys, key_ids, key_bias)
    values, means = values.to(panel_type(rows)), lse.new_empty(len(queries), values.shape[1])
    for some, weights in iter_weights(rows, columns, lse, scale):
        with exact_products():
            means[some] = product(weights, values)
    return means, lse


def triton_means_backward(
    incoming: Tensor, outputs: list[Tensor], needs: list[bool],
    queries: Tensor, keys: Tensor, values: Tensor, query_ids: Tensor | None, key_ids: Tensor | None,
    key_bias: Tensor | None, scale: float,
) -> list[Tensor]:  # fmt: skip
    """Return the needed gradients, by the formulas of `mean_vectors.tiled_backward`."""
    means, lse = outputs
    need_queries, need_keys, need_values, _, _, need_bias, *_ = needs
    rows, columns = Operand(queries, query_ids), Operand(keys, key_ids, key_bias)
    kind = panel_type(rows)
    level = (incoming * means).sum(dim=1, keepdim=True)
    slopes, q, k, v = (x.to(kind) for x in (incoming, queries, keys, values))
    to_queries = means.new_empty(queries.shape)
    to_keys = means.new_zeros(keys.shape) if need_keys else None
    to_values = means.new_zeros(values.shape) if need_values else None
    to_bias = means.new_zeros(len(keys))
    for some, weights in iter_weights(rows, columns, lse, scale):
        with exact_products():
            if to_values is not None:
                add_product(to_values, weights.T, slopes[some])
            if not (need_queries or need_keys or need_bias):
                continue
            p = product(slopes[some], v.T).sub_(level[some]).mul_(weights)
            to_bias += p.sum(dim=0)
            p = p.to(kind)
            if need_queries:
                to_queries[some] = product(p, k)
            if to_keys is not None:
                add_product(to_keys, p.T, q[some])
    found = (
        to_queries.mul_(scale).to(queries.dtype), None if to_keys is None else to_keys.mul_(scale).to(keys.dtype),
        None if to_values is None else to_values.to(values.dtype), None, None, to_bias,
    )  # fmt: skip
    return [part for part, need in zip(found, needs) if need and part is not None]
