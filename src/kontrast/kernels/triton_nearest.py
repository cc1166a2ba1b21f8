"""Triton kernel of the nearest keys: tiles of the affinity stay in registers, with a running maximum per row.

M rows, K columns, D width.  queries [M,D], keys [K,D], ids [M] and [K], index [M]; names as in triton_rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kontrast.kernels.triton_fast_launch import FastKernel
from kontrast.kernels.triton_launch import splits_of
from kontrast.kernels.triton_operands import PRECISIONS, Operand, ceil_div, shape_of
from kontrast.kernels.triton_rows import drop_pairs, wide_product


@FastKernel
@triton.jit(do_not_specialize=["rows", "columns", "row_stride", "column_stride", "tiles_a_split"])
def nearest_of_split(
    queries, keys, query_ids, key_ids, tops, indices,
    rows, columns, row_stride, column_stride, tiles_a_split,
    HAS_IDS: tl.constexpr, RAGGED: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, D_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Find the largest affinity of each row in one split of the columns, and the first column that has it."""
    start = tl.program_id(0) * BLOCK_M
    split = tl.program_id(1)
    row = start + tl.arange(0, BLOCK_M)
    row_ids = row
    if HAS_IDS:
        row_ids = tl.load(query_ids + row, mask=row < rows, other=0)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    index = tl.full([BLOCK_M], -1, tl.int32)
    for tile in range(split * tiles_a_split, min((split + 1) * tiles_a_split, tl.cdiv(columns, BLOCK_N))):
        s = wide_product(
            queries, keys, start, tile * BLOCK_N, row_stride, column_stride,
            PARTS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, D_BLOCKS,
        )  # fmt: skip
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        s = drop_pairs(s, float("-inf"), row_ids, key_ids, column, columns, HAS_IDS, RAGGED)
        largest = tl.max(s, 1)
        first = tl.min(tl.where(s == largest[:, None], column[None, :], 2147483647), 1)
        # Only a larger affinity counts, so that the first of equal columns stays, and NaN never becomes an index.
        index = tl.where(largest > top, first, index)
        top = tl.maximum(top, largest)
    place = split.to(tl.int64) * rows + row
    tl.store(tops + place, top, mask=row < rows)
    tl.store(indices + place, index.to(tl.int64), mask=row < rows)


@FastKernel
@triton.jit(do_not_specialize=["rows", "splits"])
def nearest_of_splits(tops, indices, index, rows, splits, BLOCK: tl.constexpr):
    """Choose among the splits of the columns [split, row], the first of equal ones."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    best = tl.full([BLOCK], -1, tl.int64)
    for split in range(splits):
        other = tl.load(tops + split * rows + row, mask=inside, other=float("-inf"))
        best = tl.where(other > top, tl.load(indices + split * rows + row, mask=inside, other=-1), best)
        top = tl.maximum(top, other)
    tl.store(index + row, best, mask=inside)


def triton_nearest(
    queries: Tensor, keys: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None
) -> Tensor:  # fmt: skip
    """Return the index of the nearest key [M], -1 for a row without pairs."""
    rows = Operand(queries, query_ids)
    columns = rows if keys is None else Operand(keys, key_ids)
    shape, piece, pieces = shape_of("strips", rows.rows)
    blocks, tiles = ceil_div(rows.count, shape.rows), ceil_div(columns.count, shape.columns)
    splits, each = splits_of(blocks, tiles, queries.device)
    tops = queries.new_empty(splits, rows.count, dtype=torch.float32)
    indices = queries.new_empty(splits, rows.count, dtype=torch.int64)
    nearest_of_split[(blocks, splits)](
        rows.described(shape.rows, piece), columns.described(shape.columns, piece),
        rows.pointer(narrow=False), columns.pointer(narrow=False), tops, indices,
        rows.count, columns.count, rows.stride, columns.stride, each,
        HAS_IDS=rows.ids is not None, RAGGED=columns.count % shape.columns != 0,
        PARTS=3 if rows.in_parts else 1, PRECISION=PRECISIONS[rows.rows.dtype][0],
        BLOCK_M=shape.rows, BLOCK_N=shape.columns, BLOCK_D=piece, D_BLOCKS=pieces,
        num_warps=shape.warps, num_stages=shape.stages, maxnreg=shape.registers,
    )  # fmt: skip
    if splits == 1:
        return indices[0]
    index = torch.empty_like(indices[0])
    nearest_of_splits[(ceil_div(rows.count, 256),)](tops, indices, index, rows.count, splits, BLOCK=256)
    return index
