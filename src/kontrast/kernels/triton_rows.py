"""Triton kernels of the row statistics: tiles of the affinity stay in registers and are never stored.

M rows, K columns, D width, S scales (one or two per launch).  A tile of the affinity is [BLOCK_M, BLOCK_N]; a wide row
of an operand is split into D_BLOCKS pieces of BLOCK_D.  Exponents are powers of two: `slope` = scale * log2(e).

BOUNDED means that |slope * s| stays in the safe range, so that exp2(slope * s) can be summed as it is. Whether it does
follows from the largest norms: the host knows those of unit rows; for others the device finds them, and with GUARDED
both variants are launched and the wrong one returns at once, so that the host never waits for the answer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kontrast.kernels.triton_fast_launch import FastKernel


@triton.jit
def load_parts(source, row, stride, d, PARTS: tl.constexpr):
    """Load the three parts of a block of rows. If there is only one part, it is returned three times."""
    first = source.load([row, d])
    if PARTS == 3:
        return first, source.load([row + stride, d]), source.load([row + 2 * stride, d])
    else:
        return first, first, first


@triton.jit
def product(a, a1, a2, b, b1, b2, acc, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """Return acc + (a + a1 + a2)(b + b1 + b2), smallest terms first, without those below float32's precision."""
    if PARTS == 3:
        acc = tl.dot(a2, b, acc)
        acc = tl.dot(a, b2, acc)
        acc = tl.dot(a1, b1, acc)
        acc = tl.dot(a1, b, acc)
        acc = tl.dot(a, b1, acc)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def wide_product(
    rows, columns, row, column, row_stride, column_stride,
    PARTS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, D_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return a tile of s, summed over the pieces of the width. Tensor cores truncate sums, so parts start anew."""
    s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for d in range(D_BLOCKS):
        a, a1, a2 = load_parts(rows, row, row_stride, d * BLOCK_D, PARTS)
        b, b1, b2 = load_parts(columns, column, column_stride, d * BLOCK_D, PARTS)
        if PARTS == 3:
            s += product(a, a1, a2, b.T, b1.T, b2.T, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PARTS, PRECISION)
        else:
            s = tl.dot(a, b.T, s, input_precision=PRECISION)
    return s


@triton.jit
def drop_pairs(tile, value, row_ids, key_ids, column, columns, HAS_IDS: tl.constexpr, RAGGED: tl.constexpr):
    """Set pairs that don't count to `value`: those with equal ids, and those beyond the last column."""
    if HAS_IDS:
        column_ids = tl.load(key_ids + column, mask=column < columns, other=0)
        tile = tl.where(row_ids[:, None] == column_ids[None, :], value, tile)
    if RAGGED:
        tile = tl.where((column < columns)[None, :], tile, value)
    return tile


@triton.jit
def bias_of_keys(bias, key, keys, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Return what the bias adds to the exponents of a tile, whose keys are its rows (ROWS) or its columns."""
    if not HAS_BIAS:
        return 0.0
    else:
        values = 1.4426950408889634 * tl.load(bias + key, mask=key < keys, other=0.0)
        if ROWS:
            return values[:, None]
        else:
            return values[None, :]


@triton.jit
def add_tile(
    s, top, total, weighted, slope, bias, row_ids, key_ids, column, columns,
    HAS_IDS: tl.constexpr, RAGGED: tl.constexpr, WITH_MEAN: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Add one tile to the sums of its rows, relative to the largest exponent so far unless BOUNDED, without a bias."""
    if BOUNDED:
        parts = drop_pairs(tl.exp2(s * slope), 0.0, row_ids, key_ids, column, columns, HAS_IDS, RAGGED)
        shrink = 1.0
    else:
        exponent = drop_pairs(s * slope + bias, float("-inf"), row_ids, key_ids, column, columns, HAS_IDS, RAGGED)
        new_top = tl.maximum(top, tl.max(exponent, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        parts = tl.exp2(exponent - shift[:, None])
        shrink = tl.exp2(top - shift)
        top = new_top
    total = total * shrink + tl.sum(parts, 1)
    if WITH_MEAN:
        weighted = weighted * shrink + tl.sum(parts * s, 1)
    return top, total, weighted


@FastKernel
@triton.jit(do_not_specialize=["rows", "columns", "row_stride", "column_stride", "tiles_a_split"])
def rows_forward(
    queries, keys, query_ids, key_ids, bias_of, bound, scale_of, tops, totals, weighteds,
    rows, columns, row_stride, column_stride, tiles_a_split, slope, second_slope, limit,
    SCALES: tl.constexpr, HAS_IDS: tl.constexpr, HAS_BIAS: tl.constexpr, RAGGED: tl.constexpr, WITH_MEAN: tl.constexpr,
    BOUNDED: tl.constexpr, GUARDED: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, D_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Compute the sums of one block of rows over one split of the columns: [split, scale, row].

    DIRECT, for a single split, writes lse and mean to `tops` and `weighteds` instead. SCALED multiplies the slopes by
    `scale_of`, a scale that only the device knows.
    """
    if GUARDED:  # noqa: SIM102 (the outer `if` is evaluated when the kernel is compiled)
        if (tl.load(bound) <= limit) != BOUNDED:
            return
    if SCALED:
        slope *= tl.load(scale_of)
    start = tl.program_id(0) * BLOCK_M
    split = tl.program_id(1)
    row = start + tl.arange(0, BLOCK_M)
    row_ids = row
    if HAS_IDS:
        row_ids = tl.load(query_ids + row, mask=row < rows, other=0)
    if D_BLOCKS == 1:
        a, a1, a2 = load_parts(queries, start, row_stride, 0, PARTS)
    top = tl.full([BLOCK_M], 0.0 if BOUNDED else float("-inf"), tl.float32)
    total, weighted = tl.zeros_like(top), tl.zeros_like(top)
    second_top, second_total, second_weighted = top, total, weighted
    for tile in range(split * tiles_a_split, min((split + 1) * tiles_a_split, tl.cdiv(columns, BLOCK_N))):
        if D_BLOCKS == 1:
            b, b1, b2 = load_parts(keys, tile * BLOCK_N, column_stride, 0, PARTS)
            s = product(a, a1, a2, b.T, b1.T, b2.T, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PARTS, PRECISION)
        else:
            s = wide_product(
                queries, keys, start, tile * BLOCK_N, row_stride, column_stride,
                PARTS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, D_BLOCKS,
            )  # fmt: skip
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        bias = bias_of_keys(bias_of, column, columns, False, HAS_BIAS)
        top, total, weighted = add_tile(
            s, top, total, weighted, slope, bias, row_ids, key_ids, column, columns, HAS_IDS, RAGGED, WITH_MEAN, BOUNDED
        )
        if SCALES == 2:
            second_top, second_total, second_weighted = add_tile(
                s, second_top, second_total, second_weighted, second_slope, bias, row_ids, key_ids, column, columns,
                HAS_IDS, RAGGED, WITH_MEAN, BOUNDED,
            )  # fmt: skip
    place = split.to(tl.int64) * SCALES * rows + row
    store_sums(tops, totals, weighteds, place, row < rows, top, total, weighted, WITH_MEAN, DIRECT)
    if SCALES == 2:
        store_sums(
            tops, totals, weighteds, place + rows, row < rows,
            second_top, second_total, second_weighted, WITH_MEAN, DIRECT,
        )  # fmt: skip


@triton.jit
def store_sums(
    tops, totals, weighteds, place, inside, top, total, weighted, WITH_MEAN: tl.constexpr, DIRECT: tl.constexpr
):
    if DIRECT:
        tl.store(tops + place, (top + tl.log2(total)) * 0.6931471805599453, mask=inside)
        weighted = tl.where(total > 0, weighted / tl.where(total > 0, total, 1.0), 0.0)
    else:
        tl.store(tops + place, top, mask=inside)
        tl.store(totals + place, total, mask=inside)
    if WITH_MEAN:
        tl.store(weighteds + place, weighted, mask=inside)


@FastKernel
@triton.jit(do_not_specialize=["rows", "stride", "tiles_a_chunk"])
def triangle_forward(
    rows_of, columns_of, ids, bound, totals, weighteds,
    rows, stride, tiles_a_chunk, slope, second_slope, limit,
    GUARDED: tl.constexpr, SCALES: tl.constexpr, HAS_IDS: tl.constexpr, RAGGED: tl.constexpr, WITH_MEAN: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute bounded sums if the queries are the keys: a tile above the diagonal serves its rows and its columns.

    One block of columns visits a chunk of the rows above it, those at the diagonal last. The sums of the columns stay a
    tile until the end, because adding across the rows of a tile is slow. Both are added to [scale, row] atomically.
    """
    if GUARDED:  # noqa: SIM102 (the outer `if` is evaluated when the kernel is compiled)
        if not (tl.load(bound) <= limit):
            return
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_N
    begin = tl.program_id(1) * tiles_a_chunk
    end = min(begin + tiles_a_chunk, tl.cdiv(min(start + BLOCK_N, rows), BLOCK_M))
    if begin >= end:
        return
    column = start + tl.arange(0, BLOCK_N)
    column_ids = column
    if HAS_IDS:
        column_ids = tl.load(ids + column, mask=column < rows, other=0)
    b, b1, b2 = load_parts(columns_of, start, stride, 0, PARTS)
    below = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    below_weighted, second_below, second_below_weighted = below, below, below
    for tile in range(begin, min(end, start // BLOCK_M)):
        below, below_weighted, second_below, second_below_weighted = triangle_tile(
            b, b1, b2, rows_of, ids, column_ids, totals, weighteds, rows, stride, tile * BLOCK_M, start,
            slope, second_slope, below, below_weighted, second_below, second_below_weighted,
            False, SCALES, HAS_IDS, RAGGED, WITH_MEAN, PARTS, PRECISION, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    for tile in range(max(begin, start // BLOCK_M), end):
        below, below_weighted, second_below, second_below_weighted = triangle_tile(
            b, b1, b2, rows_of, ids, column_ids, totals, weighteds, rows, stride, tile * BLOCK_M, start,
            slope, second_slope, below, below_weighted, second_below, second_below_weighted,
            True, SCALES, HAS_IDS, RAGGED, WITH_MEAN, PARTS, PRECISION, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    add_sums(totals, column, rows, tl.sum(below, 0))
    if WITH_MEAN:
        add_sums(weighteds, column, rows, tl.sum(below_weighted, 0))
    if SCALES == 2:
        add_sums(totals + rows, column, rows, tl.sum(second_below, 0))
        if WITH_MEAN:
            add_sums(weighteds + rows, column, rows, tl.sum(second_below_weighted, 0))


@triton.jit
def triangle_tile(
    b, b1, b2, rows_of, ids, column_ids, totals, weighteds, rows, stride, top_row, start,
    slope, second_slope, below, below_weighted, second_below, second_below_weighted,
    DIAGONAL: tl.constexpr, SCALES: tl.constexpr, HAS_IDS: tl.constexpr, RAGGED: tl.constexpr, WITH_MEAN: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the row sums of one tile and add to its column sums, at each scale."""
    a, a1, a2 = load_parts(rows_of, top_row, stride, 0, PARTS)
    s = product(a, a1, a2, b.T, b1.T, b2.T, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PARTS, PRECISION)
    row = top_row + tl.arange(0, BLOCK_M)
    column = start + tl.arange(0, BLOCK_N)
    row_ids = row
    if HAS_IDS:
        row_ids = tl.load(ids + row, mask=row < rows, other=0)
    below, below_weighted = add_both_ways(
        s, slope, row, column, row_ids, column_ids, totals, weighteds, rows, below, below_weighted,
        DIAGONAL, HAS_IDS, RAGGED, WITH_MEAN,
    )  # fmt: skip
    if SCALES == 2:
        second_below, second_below_weighted = add_both_ways(
            s, second_slope, row, column, row_ids, column_ids, totals + rows, weighteds + rows, rows,
            second_below, second_below_weighted, DIAGONAL, HAS_IDS, RAGGED, WITH_MEAN,
        )  # fmt: skip
    return below, below_weighted, second_below, second_below_weighted


@triton.jit
def add_both_ways(
    s, slope, row, column, row_ids, column_ids, totals, weighteds, rows, below, below_weighted,
    DIAGONAL: tl.constexpr, HAS_IDS: tl.constexpr, RAGGED: tl.constexpr, WITH_MEAN: tl.constexpr,
):  # fmt: skip
    """Add a tile to its rows and columns. On the diagonal, row <= column counts for the row, row < column for both."""
    parts = tl.exp2(s * slope)
    if HAS_IDS:
        parts = tl.where(row_ids[:, None] == column_ids[None, :], 0.0, parts)
    if RAGGED:
        parts = tl.where((column < rows)[None, :], parts, 0.0)
    mirrored = parts
    if DIAGONAL:
        parts = tl.where(row[:, None] <= column[None, :], parts, 0.0)
        mirrored = tl.where(row[:, None] < column[None, :], parts, 0.0)
    below += mirrored
    add_sums(totals, row, rows, tl.sum(parts, 1))
    if WITH_MEAN:
        below_weighted += mirrored * s
        add_sums(weighteds, row, rows, tl.sum(parts * s, 1))
    return below, below_weighted


@triton.jit
def add_sums(sums, place, rows, values):
    tl.atomic_add(sums + place, values, mask=place < rows, sem="relaxed")


@FastKernel
@triton.jit(do_not_specialize=["count", "splits"])
def finish(
    tops, totals, weighteds, bound, lse, mean, count, splits, limit,
    WITH_MEAN: tl.constexpr, HAS_TOPS: tl.constexpr, BOUNDED: tl.constexpr, GUARDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute lse and mean [scale, row] from the sums of all splits [split, scale, row]."""
    if GUARDED:  # noqa: SIM102 (the outer `if` is evaluated when the kernel is compiled)
        if (tl.load(bound) <= limit) != BOUNDED:
            return
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    top = tl.zeros([BLOCK], tl.float32)
    if HAS_TOPS:
        top = tl.full([BLOCK], float("-inf"), tl.float32)
        for split in range(splits):
            top = tl.maximum(top, tl.load(tops + split * count + place, mask=inside, other=0.0))
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        at = split * count + place
        shrink = tl.full([BLOCK], 1.0, tl.float32)
        if HAS_TOPS:
            shrink = tl.exp2(tl.load(tops + at, mask=inside, other=0.0) - shift)
        total += shrink * tl.load(totals + at, mask=inside, other=1.0)
        if WITH_MEAN:
            weighted += shrink * tl.load(weighteds + at, mask=inside, other=0.0)
    tl.store(lse + place, (shift + tl.log2(total)) * 0.6931471805599453, mask=inside)
    if WITH_MEAN:
        tl.store(mean + place, tl.where(total > 0, weighted / tl.where(total > 0, total, 1.0), 0.0), mask=inside)
