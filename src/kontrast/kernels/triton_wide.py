"""Triton kernels for wide rows: each program computes one tile of the affinity as a matrix product over the width.

M rows, K columns, D width, S scales (one or two per launch).  A tile is [BLOCK_M, BLOCK_N]; names as in triton_rows.
The statistics of a tile are added up at once. For the gradient, d loss / d s of a panel of rows and columns is stored,
and plain matrix products do the rest: for wide rows that costs less than computing s once per piece of the width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kontrast.kernels.triton_fast_launch import FastKernel
from kontrast.kernels.triton_gradient import row_coefficients, tile_gradient
from kontrast.kernels.triton_rows import add_sums, bias_of_keys, drop_pairs, wide_product


@triton.jit
def tile_of(program, tiles, other_tiles, TRIANGLE: tl.constexpr, GROUP: tl.constexpr):
    """Return the row and the column of a program's tile, GROUP columns at a time, so that neighbors share operands.

    With TRIANGLE only tiles on and above the diagonal are visited: the groups grow to the right, and a few programs of
    each group lie below the diagonal and have nothing to do.
    """
    if TRIANGLE:
        half = GROUP * GROUP // 2
        group = ((tl.sqrt(1.0 + program.to(tl.float32) * (2.0 / half)) - 1.0) * 0.5).to(tl.int32)
        group = tl.where(half * group * (group + 1) > program, group - 1, group)
        group = tl.where(half * (group + 1) * (group + 2) <= program, group + 1, group)
        rest = program - half * group * (group + 1)
        return rest // GROUP, GROUP * group + rest % GROUP
    else:
        group = program // (GROUP * tiles)
        size = min(GROUP, other_tiles - group * GROUP)
        rest = program % (GROUP * tiles)
        return rest // size, group * GROUP + rest % size


@FastKernel
@triton.jit(do_not_specialize=["rows", "columns", "row_stride", "column_stride"])
def wide_both(
    rows_of, columns_of, row_ids_of, column_ids_of, bound, scale_of,
    row_totals, row_weighteds, column_totals, column_weighteds,
    rows, columns, row_stride, column_stride, slope, second_slope, limit,
    TRIANGLE: tl.constexpr, GUARDED: tl.constexpr, SCALED: tl.constexpr, SCALES: tl.constexpr,
    HAS_IDS: tl.constexpr, RAGGED: tl.constexpr, WITH_MEAN: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, D_BLOCKS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Add bounded sums of one tile to its rows and to its columns, atomically: [scale, row] and [scale, column].

    With TRIANGLE the queries are the keys, and both kinds of sums belong to the same rows. A tile on the diagonal then
    contains every pair twice, so its row sums are complete.
    """
    if GUARDED:  # noqa: SIM102 (the outer `if` is evaluated when the kernel is compiled)
        if not (tl.load(bound) <= limit):
            return
    if SCALED:
        slope *= tl.load(scale_of)
    tiles, other_tiles = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    tile, other = tile_of(tl.program_id(0), tiles, other_tiles, TRIANGLE, GROUP)
    if TRIANGLE:  # noqa: SIM102
        if (other < tile) | (other >= other_tiles) | (tile >= tiles):
            return
    s = wide_product(
        rows_of, columns_of, tile * BLOCK_M, other * BLOCK_N, row_stride, column_stride,
        PARTS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, D_BLOCKS,
    )  # fmt: skip
    row, column = tile * BLOCK_M + tl.arange(0, BLOCK_M), other * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ids = row
    if HAS_IDS:
        row_ids = tl.load(row_ids_of + row, mask=row < rows, other=0)
    mirrored = True
    if TRIANGLE:
        mirrored = other != tile
    for n in tl.static_range(SCALES):
        parts = tl.exp2(s * (slope if n == 0 else second_slope))
        parts = drop_pairs(parts, 0.0, row_ids, column_ids_of, column, columns, HAS_IDS, RAGGED)
        parts = tl.where((row < rows)[:, None], parts, 0.0)
        add_sums(row_totals + n * rows, row, rows, tl.sum(parts, 1))
        if WITH_MEAN:
            add_sums(row_weighteds + n * rows, row, rows, tl.sum(parts * s, 1))
        if mirrored:
            add_sums(column_totals + n * columns, column, columns, tl.sum(parts, 0))
            if WITH_MEAN:
                add_sums(column_weighteds + n * columns, column, columns, tl.sum(parts * s, 0))


@triton.jit
def panel_tile(first, end, first_column, end_column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Return the first row and the first column of a program's tile of a panel."""
    tiles, other_tiles = tl.cdiv(end - first, BLOCK_M), tl.cdiv(end_column - first_column, BLOCK_N)
    tile, other = tile_of(tl.program_id(0), tiles, other_tiles, False, GROUP)
    return first + tile * BLOCK_M, first_column + other * BLOCK_N


@FastKernel
@triton.jit(
    do_not_specialize=[
        "first", "end", "first_column", "end_column", "rows", "columns", "row_stride", "column_stride", "out_stride",
    ]
)  # fmt: skip
def wide_gradient(
    rows_of, columns_of, row_ids_of, column_ids_of, bias_of, bound, scale_of,
    row_alpha_of, row_beta_of, row_shift_of, alpha, beta, shift, out,
    first, end, first_column, end_column, rows, columns, row_stride, column_stride, out_stride,
    slope, second_slope, limit,
    SCALES: tl.constexpr, HAS_IDS: tl.constexpr, HAS_BIAS: tl.constexpr, WITH_BETA: tl.constexpr,
    ROW_SIDE: tl.constexpr, COLUMN_SIDE: tl.constexpr, BOUNDED: tl.constexpr, GUARDED: tl.constexpr,
    SCALED: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, D_BLOCKS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store d loss / d s of one tile of a panel, through the statistics of its rows, its columns, or both.

    The panel has the rows from `first` to `end` and the columns from `first_column` to `end_column`.

    Coefficients are [scale, row] and [scale, column].
    """
    if GUARDED:  # noqa: SIM102 (the outer `if` is evaluated when the kernel is compiled)
        if (tl.load(bound) <= limit) != BOUNDED:
            return
    if SCALED:
        slope *= tl.load(scale_of)
    start, column_start = panel_tile(first, end, first_column, end_column, BLOCK_M, BLOCK_N, GROUP)
    s = wide_product(
        rows_of, columns_of, start, column_start, row_stride, column_stride,
        PARTS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, D_BLOCKS,
    )  # fmt: skip
    row, column = start + tl.arange(0, BLOCK_M), column_start + tl.arange(0, BLOCK_N)
    inside, column_inside = row < end, column < end_column
    bias = bias_of_keys(bias_of, column, columns, False, HAS_BIAS)
    p = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for n in tl.static_range(SCALES):
        row_alpha, row_beta, row_shift = row_coefficients(
            row_alpha_of + n * rows, row_beta_of + n * rows, row_shift_of + n * rows, row, inside, ROW_SIDE, WITH_BETA
        )
        p += tile_gradient(
            s, slope if n == 0 else second_slope, bias, row_alpha, row_beta, row_shift,
            alpha + n * columns, beta + n * columns, shift + n * columns, column, column_inside,
            WITH_BETA, ROW_SIDE, COLUMN_SIDE, BOUNDED,
        )  # fmt: skip
    row_ids = row
    if HAS_IDS:
        row_ids = tl.load(row_ids_of + row, mask=inside, other=0)
    p = drop_pairs(p, 0.0, row_ids, column_ids_of, column, columns, HAS_IDS, False)
    place = (row - first).to(tl.int64)[:, None] * out_stride + (column - first_column)[None, :]
    tl.store(out + place, p.to(out.dtype.element_ty), mask=inside[:, None] & column_inside[None, :])
