"""Triton kernels of the row statistics: tiles of the affinity live in registers and are never stored.

M rows, K columns, D width, S scales (one or two a launch).  A tile of the affinity is [BLOCK_M, BLOCK_N]; a row of the
operands is cut into D_BLOCKS pieces of BLOCK_D.  Exponents are kept in powers of two: `slope` = scale * log2(e).

BOUNDED says that |slope * s| can't leave the safe range, so that exp2(slope * s) is summed as it is. It holds where the
largest norms, measured on the device, say so. With GUARDED both kinds are launched and the wrong one returns at once:
the host never waits for the answer.

MASK 0: no ids.  1: every tile is compared id by id.  2: only tiles whose spans of ids meet are.
"""

from __future__ import annotations

import triton
import triton.language as tl

@triton.jit
def id_spans(ids, low, high, count, BLOCK: tl.constexpr):
    """Smallest and largest id of each block: two blocks whose spans are apart hold no pair that is left out."""
    block = tl.program_id(0)
    index = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(ids + block.to(tl.int64) * BLOCK)
    values = tl.load(ids + index, mask=index < count, other=first)
    tl.store(low + block, tl.min(values, 0))
    tl.store(high + block, tl.max(values, 0))


@triton.jit
def affinity_tile(
    first, rows, columns, row, column, D_BLOCKS: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr
):
    """s of one tile, and the first piece of the tile's columns. `first` is the first piece of its rows."""
    piece = columns.load([column, 0])
    s = tl.dot(first, piece.T, input_precision=PRECISION)
    for d in tl.static_range(1, D_BLOCKS):
        s = tl.dot(
            rows.load([row, d * BLOCK_D]), columns.load([column, d * BLOCK_D]).T, acc=s, input_precision=PRECISION
        )
    return s, piece


@triton.jit
def touches(
    low, high, tile, row_low, row_high, columns, MASK: tl.constexpr, RAGGED: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Whether a tile may hold a pair that does not count."""
    if MASK == 1:
        return True
    else:
        touched = RAGGED and ((tile + 1) * BLOCK_N > columns)
        if MASK == 2:
            touched = touched | ((tl.load(low + tile) <= row_high) & (tl.load(high + tile) >= row_low))
        return touched


@triton.jit
def kept_pairs(row_ids, key_ids, column, columns, HAS_IDS: tl.constexpr):
    """Pairs of a tile that count: inside the matrix, and of different ids."""
    inside = column < columns
    keep = inside[None, :] & (tl.zeros_like(row_ids)[:, None] == 0)
    if HAS_IDS:
        keep = keep & (row_ids[:, None] != tl.load(key_ids + column, mask=inside, other=0)[None, :])
    return keep


@triton.jit
def add_tile(s, keep, top, total, weighted, slope, MASKED: tl.constexpr, WITH_MEAN: tl.constexpr, BOUNDED: tl.constexpr):
    """One tile into the sums of its rows: as they are, or relative to the largest exponent so far."""
    exponent = s * slope
    if MASKED:
        exponent = tl.where(keep, exponent, float("-inf"))
    if BOUNDED:
        parts = tl.exp2(exponent)
        shrink = 1.0
    else:
        new_top = tl.maximum(top, tl.max(exponent, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        parts = tl.exp2(exponent - shift[:, None])
        shrink = tl.exp2(top - shift)
        top = new_top
    total = total * shrink + tl.sum(parts, 1)
    if WITH_MEAN:
        weighted = weighted * shrink + tl.sum(parts * s, 1)
    return top, total, weighted


@triton.jit
def rows_forward(
    queries, keys, query_ids, key_ids, low, high, bound, tops, totals, weighteds,
    rows, columns, tiles_a_split, slope, second_slope, limit,
    SCALES: tl.constexpr, MASK: tl.constexpr, HAS_IDS: tl.constexpr, RAGGED: tl.constexpr, WITH_MEAN: tl.constexpr,
    BOUNDED: tl.constexpr, GUARDED: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, D_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Sums of one block of rows over one split of the columns, into [split, scale, row].

    DIRECT, where there is one split: lse and mean themselves, in the places of the tops and of the weighted sums.
    """
    if GUARDED:
        if (tl.load(bound) <= limit) != BOUNDED:
            return
    start = tl.program_id(0) * BLOCK_M
    split = tl.program_id(1)
    row = start.to(tl.int64) + tl.arange(0, BLOCK_M)
    row_ids = row
    if HAS_IDS:
        row_ids = tl.load(query_ids + row, mask=row < rows, other=tl.load(query_ids + start))
    row_low, row_high = tl.min(row_ids, 0), tl.max(row_ids, 0)
    first = queries.load([start, 0])
    top = tl.full([BLOCK_M], 0.0 if BOUNDED else float("-inf"), tl.float32)
    total, weighted = tl.zeros_like(top), tl.zeros_like(top)
    second_top, second_total, second_weighted = top, total, weighted
    for tile in range(split * tiles_a_split, min((split + 1) * tiles_a_split, tl.cdiv(columns, BLOCK_N))):
        s, _ = affinity_tile(first, queries, keys, start, tile * BLOCK_N, D_BLOCKS, BLOCK_D, PRECISION)
        if touches(low, high, tile, row_low, row_high, columns, MASK, RAGGED, BLOCK_N):
            column = tile * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
            keep = kept_pairs(row_ids, key_ids, column, columns, HAS_IDS)
            top, total, weighted = add_tile(s, keep, top, total, weighted, slope, True, WITH_MEAN, BOUNDED)
            if SCALES == 2:
                second_top, second_total, second_weighted = add_tile(
                    s, keep, second_top, second_total, second_weighted, second_slope, True, WITH_MEAN, BOUNDED
                )
        else:
            top, total, weighted = add_tile(s, s, top, total, weighted, slope, False, WITH_MEAN, BOUNDED)
            if SCALES == 2:
                second_top, second_total, second_weighted = add_tile(
                    s, s, second_top, second_total, second_weighted, second_slope, False, WITH_MEAN, BOUNDED
                )
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


@triton.jit
def triangle_forward(
    rows_of, columns_of, ids, low, high, bound, totals, weighteds,
    rows, tiles_a_chunk, slope, second_slope, limit,
    SCALES: tl.constexpr, MASK: tl.constexpr, HAS_IDS: tl.constexpr, RAGGED: tl.constexpr, WITH_MEAN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, D_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Bounded sums where queries are keys: a tile above the diagonal gives its rows' sums and its columns' too.

    One block of columns walks down a chunk of the rows above it. The columns' sums stay a tile until the end, since
    adding across a tile's rows is slow; both kinds are added to [scale, row] atomically.
    """
    if not (tl.load(bound) <= limit):
        return
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    start = block * BLOCK_N
    begin = tl.program_id(1) * tiles_a_chunk
    end = min(begin + tiles_a_chunk, tl.cdiv(min(start + BLOCK_N, rows), BLOCK_M))
    if begin >= end:
        return
    column = start.to(tl.int64) + tl.arange(0, BLOCK_N)
    column_ids = column
    if HAS_IDS:
        column_ids = tl.load(ids + column, mask=column < rows, other=tl.load(ids + start))
    column_low, column_high = tl.min(column_ids, 0), tl.max(column_ids, 0)
    first = columns_of.load([start, 0]).T
    below = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    below_weighted, second_below, second_below_weighted = below, below, below
    for tile in range(begin, end):
        s = tl.dot(rows_of.load([tile * BLOCK_M, 0]), first, input_precision=PRECISION)
        for d in tl.static_range(1, D_BLOCKS):
            s = tl.dot(
                rows_of.load([tile * BLOCK_M, d * BLOCK_D]), columns_of.load([start, d * BLOCK_D]).T,
                acc=s, input_precision=PRECISION,
            )  # fmt: skip
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        special = (tile + 1) * BLOCK_M > start
        if RAGGED:
            special = special | (start + BLOCK_N > rows)
        if MASK == 2:
            special = special | ((tl.load(low + tile) <= column_high) & (tl.load(high + tile) >= column_low))
        if MASK == 1:
            special = True
        below, below_weighted = add_both_ways(
            s, slope, row, column, ids, column_ids, totals, weighteds, rows, below, below_weighted,
            special, HAS_IDS, WITH_MEAN,
        )  # fmt: skip
        if SCALES == 2:
            second_below, second_below_weighted = add_both_ways(
                s, second_slope, row, column, ids, column_ids, totals + rows, weighteds + rows, rows,
                second_below, second_below_weighted, special, HAS_IDS, WITH_MEAN,
            )  # fmt: skip
    add_sums(totals, weighteds, column, rows, tl.sum(below, 0), tl.sum(below_weighted, 0), WITH_MEAN)
    if SCALES == 2:
        add_sums(
            totals + rows, weighteds + rows, column, rows,
            tl.sum(second_below, 0), tl.sum(second_below_weighted, 0), WITH_MEAN,
        )  # fmt: skip


@triton.jit
def add_both_ways(
    s, slope, row, column, ids, column_ids, totals, weighteds, rows, below, below_weighted,
    special, HAS_IDS: tl.constexpr, WITH_MEAN: tl.constexpr,
):  # fmt: skip
    """One tile: its row sums go out, its columns' are kept. On the diagonal each pair is counted once, by its row."""
    parts = tl.exp2(s * slope)
    if special:
        keep = (row[:, None] <= column[None, :]) & (column[None, :] < rows)
        if HAS_IDS:
            keep = keep & (tl.load(ids + row, mask=row < rows, other=0)[:, None] != column_ids[None, :])
        parts = tl.where(keep, parts, 0.0)
        mirrored = tl.where(row[:, None] < column[None, :], parts, 0.0)
        below += mirrored
        if WITH_MEAN:
            below_weighted += mirrored * s
    else:
        below += parts
        if WITH_MEAN:
            below_weighted += parts * s
    weighted = tl.sum(parts, 1)
    if WITH_MEAN:
        add_sums(totals, weighteds, row, rows, weighted, tl.sum(parts * s, 1), WITH_MEAN)
    else:
        add_sums(totals, weighteds, row, rows, weighted, weighted, WITH_MEAN)
    return below, below_weighted


@triton.jit
def add_sums(totals, weighteds, place, rows, total, weighted, WITH_MEAN: tl.constexpr):
    tl.atomic_add(totals + place, total, mask=place < rows, sem="relaxed")
    if WITH_MEAN:
        tl.atomic_add(weighteds + place, weighted, mask=place < rows, sem="relaxed")


@triton.jit
def finish(
    tops, totals, weighteds, bound, lse, mean, count, splits, limit,
    WITH_MEAN: tl.constexpr, HAS_TOPS: tl.constexpr, GUARDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """lse and mean [scale, row] from the sums of all splits [split, scale, row]."""
    if GUARDED:
        if not (tl.load(bound) <= limit):
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
