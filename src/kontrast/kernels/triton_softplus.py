"""Triton kernels of the softplus sums: tiles of the affinity as in triton_wide, with sigmoid weights.

M rows, K columns, D width.  queries [M,D], keys [K,D], ids [M] and [K], scale and bias scalars, sums [M].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kontrast.kernels.triton_fast_launch import FastKernel
from kontrast.kernels.triton_launch import cast, launch_options, splits_of
from kontrast.kernels.triton_operands import Operand, ceil_div, shape_of
from kontrast.kernels.triton_rows import drop_pairs, wide_product
from kontrast.kernels.triton_wide import panel_tile
from kontrast.kernels.triton_wide_launch import GROUP, Panel, multiply_panels


@FastKernel
@triton.jit(do_not_specialize=["rows", "columns", "row_stride", "column_stride", "tiles_a_split"])
def softplus_rows(
    queries, keys, query_ids, key_ids, scale, bias, sums, rows, columns, row_stride, column_stride, tiles_a_split,
    HAS_IDS: tl.constexpr, RAGGED: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, D_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Sum softplus(x), sigmoid(x) and sigmoid(x) s over one split of the columns, x = a s + b: [split, 3, row]."""
    start, split = tl.program_id(0) * BLOCK_M, tl.program_id(1)
    row = start + tl.arange(0, BLOCK_M)
    row_ids = row
    if HAS_IDS:
        row_ids = tl.load(query_ids + row, mask=row < rows, other=0)
    a, b = tl.load(scale), tl.load(bias)
    total = tl.zeros([BLOCK_M], tl.float32)
    weights, weighted = total, total
    for tile in range(split * tiles_a_split, min((split + 1) * tiles_a_split, tl.cdiv(columns, BLOCK_N))):
        s = wide_product(
            queries, keys, start, tile * BLOCK_N, row_stride, column_stride,
            PARTS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, D_BLOCKS,
        )  # fmt: skip
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        x = drop_pairs(a * s + b, float("-inf"), row_ids, key_ids, column, columns, HAS_IDS, RAGGED)
        small = tl.exp2(tl.abs(x) * -1.4426950408889634)
        # log(1 + small), exact for a tiny `small` too, where 1 + small would be rounded to 1.
        log = tl.where(small < 1e-3, small - 0.5 * small * small, 0.6931471805599453 * tl.log2(1.0 + small))
        total += tl.sum(tl.maximum(x, 0.0) + log, 1)
        sigmoid = tl.where(x >= 0, 1.0, small) / (1.0 + small)
        weights += tl.sum(sigmoid, 1)
        weighted += tl.sum(sigmoid * s, 1)
    place = split.to(tl.int64) * 3 * rows + row
    tl.store(sums + place, total, mask=row < rows)
    tl.store(sums + place + rows, weights, mask=row < rows)
    tl.store(sums + place + 2 * rows, weighted, mask=row < rows)


@FastKernel
@triton.jit(
    do_not_specialize=[
        "first", "end", "first_column", "end_column", "columns", "row_stride", "column_stride", "out_stride",
    ]
)  # fmt: skip
def softplus_gradient(
    rows_of, columns_of, row_ids_of, column_ids_of, scale, bias, grad, out,
    first, end, first_column, end_column, columns, row_stride, column_stride, out_stride,
    HAS_IDS: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, D_BLOCKS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store a g_i sigmoid(a s_ij + b) of one tile of a panel, as `wide_gradient` does."""
    start, column_start = panel_tile(first, end, first_column, end_column, BLOCK_M, BLOCK_N, GROUP)
    s = wide_product(
        rows_of, columns_of, start, column_start, row_stride, column_stride,
        PARTS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, D_BLOCKS,
    )  # fmt: skip
    row, column = start + tl.arange(0, BLOCK_M), column_start + tl.arange(0, BLOCK_N)
    inside = row < end
    a = tl.load(scale)
    p = (a * tl.load(grad + row, mask=inside, other=0.0))[:, None] * tl.sigmoid(a * s + tl.load(bias))
    row_ids = row
    if HAS_IDS:
        row_ids = tl.load(row_ids_of + row, mask=inside, other=0)
    p = drop_pairs(p, 0.0, row_ids, column_ids_of, column, columns, HAS_IDS, False)
    place = (row - first).to(tl.int64)[:, None] * out_stride + (column - first_column)[None, :]
    tl.store(out + place, p.to(out.dtype.element_ty), mask=inside[:, None] & (column < end_column)[None, :])


def triton_softplus_forward(
    queries: Tensor, keys: Tensor, query_ids: Tensor | None, key_ids: Tensor | None, scale: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of softplus, of its weights, and of the weights times s: [M] each."""
    rows, columns = Operand(queries, query_ids), Operand(keys, key_ids)
    shape, piece, pieces = shape_of("strips", rows.rows)
    blocks, tiles = ceil_div(rows.count, shape.rows), ceil_div(columns.count, shape.columns)
    splits, each = splits_of(blocks, tiles, queries.device)
    sums = queries.new_empty(splits, 3, rows.count, dtype=torch.float32)
    softplus_rows[(blocks, splits)](
        rows.described(shape.rows, piece), columns.described(shape.columns, piece),
        rows.pointer(False), columns.pointer(False), scale, bias, sums,
        rows.count, columns.count, rows.stride, columns.stride, each,
        RAGGED=columns.count % shape.columns != 0, **launch_options(shape, piece, pieces, rows),
    )  # fmt: skip
    # Copies, because the outputs of an operator of torch may not share memory.
    total, weights, weighted = (x.clone() for x in (sums[0] if splits == 1 else sums.sum(dim=0)))
    return total, weights, weighted


def triton_softplus_backward(
    grad: Tensor, queries: Tensor, keys: Tensor, query_ids: Tensor | None, key_ids: Tensor | None,
    scale: Tensor, bias: Tensor, need_queries: bool, need_keys: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of queries and keys."""
    rows, columns = Operand(queries, query_ids), Operand(keys, key_ids)
    shape, piece, pieces = shape_of("tiles", rows.rows)
    grad = grad.contiguous()

    def launch(panel: Panel) -> None:
        softplus_gradient[(panel.tiles(shape),)](
            rows.described(shape.rows, piece), columns.described(shape.columns, piece),
            rows.pointer(False), columns.pointer(False), scale, bias, grad, panel.stored,
            *panel.ends, columns.count, rows.stride, columns.stride, panel.stored.stride(0),
            GROUP=GROUP, **launch_options(shape, piece, pieces, rows),
        )  # fmt: skip

    to_queries, to_keys = multiply_panels(rows, columns, launch, need_queries, need_keys)
    return cast(to_queries, queries), cast(to_keys, keys)
