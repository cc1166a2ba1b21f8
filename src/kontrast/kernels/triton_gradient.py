"""Triton kernels for the gradient of the row statistics: tiles of the affinity are recomputed and used at once.

M rows, K columns, D width, S scales (one or two per launch).  alpha, beta, shift [scale, row]; names as in triton_rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kontrast.kernels.triton_fast_launch import FastKernel
from kontrast.kernels.triton_rows import bias_of_keys, drop_pairs, load_parts, product


@FastKernel
@triton.jit(do_not_specialize=["rows"])
def gradient_coefficients(
    grad_lse, grad_mean, lse, mean, bound, scale_of, alpha, beta, shift, rows, scale, second_scale, limit,
    HAS_LSE: tl.constexpr, HAS_MEAN: tl.constexpr, DETACHED: tl.constexpr,
    BOUNDED: tl.constexpr, GUARDED: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute alpha, beta and shift: the gradient is w_ij (alpha_i + beta_i s_ij), w_ij = exp2(slope s_ij - shift_i).

    If the exponents are bounded, alpha and beta contain the factor exp2(-shift_i) instead.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    a = scale
    if tl.program_id(1) == 1:
        a = second_scale
    if SCALED:
        a *= tl.load(scale_of)
    place = tl.program_id(1).to(tl.int64) * rows + row
    level = tl.load(lse + place, mask=inside, other=0.0)
    empty = level == float("-inf")
    level = tl.where(empty, 0.0, level * 1.4426950408889634)
    first = tl.zeros([BLOCK], tl.float32)
    second = tl.zeros([BLOCK], tl.float32)
    if HAS_LSE:
        first += a * tl.load(grad_lse + place, mask=inside, other=0.0)
    if HAS_MEAN:
        incoming = tl.load(grad_mean + place, mask=inside, other=0.0)
        if DETACHED:
            first += incoming
        else:
            first += (1 - a * tl.load(mean + place, mask=inside, other=0.0)) * incoming
            second = a * incoming
    if BOUNDED:
        safe = True
        if GUARDED:
            safe = tl.load(bound) <= limit
        factor = tl.where(safe, tl.exp2(-level), 1.0)
        first *= factor
        second *= factor
    tl.store(alpha + place, tl.where(empty, 0.0, first), mask=inside)
    tl.store(shift + place, level, mask=inside)
    if HAS_MEAN and not DETACHED:
        tl.store(beta + place, tl.where(empty, 0.0, second), mask=inside)


@triton.jit
def side_of_pairs(s, slope, alpha, beta, shift, WITH_BETA: tl.constexpr):
    """Return the gradient through one side of the pairs; its coefficients broadcast over the tile."""
    weight = tl.exp2(s * slope - shift)
    if WITH_BETA:
        return weight * (alpha + beta * s)
    else:
        return weight * alpha


@triton.jit
def tile_gradient(
    s, slope, bias, row_alpha, row_beta, row_shift, alpha, beta, shift, column, inside,
    WITH_BETA: tl.constexpr, ROW_SIDE: tl.constexpr, COLUMN_SIDE: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Return d loss / d s of one tile at one scale, through the statistics of its rows, its columns, or both."""
    if COLUMN_SIDE:
        column_alpha = tl.load(alpha + column, mask=inside, other=0.0)[None, :]
        column_beta = column_alpha
        if WITH_BETA:
            column_beta = tl.load(beta + column, mask=inside, other=0.0)[None, :]
    if BOUNDED:
        if ROW_SIDE and COLUMN_SIDE:
            first, second = row_alpha[:, None] + column_alpha, row_beta[:, None] + column_beta
        elif ROW_SIDE:
            first, second = row_alpha[:, None], row_beta[:, None]
        else:
            first, second = column_alpha, column_beta
        gradient = tl.exp2(s * slope)
        if WITH_BETA:
            gradient *= first + second * s
        else:
            gradient *= first
    else:
        if ROW_SIDE:
            gradient = side_of_pairs(
                s, slope, row_alpha[:, None], row_beta[:, None], row_shift[:, None] - bias, WITH_BETA
            )
        if COLUMN_SIDE:
            column_shift = tl.load(shift + column, mask=inside, other=0.0)[None, :]
            other = side_of_pairs(s, slope, column_alpha, column_beta, column_shift - bias, WITH_BETA)
            gradient = gradient + other if ROW_SIDE else other
    return gradient


@triton.jit
def add_product(
    gradient, p, b, b1, b2,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return gradient + p b. Tensor cores truncate when they add, so parts of float32 are summed tile by tile."""
    if WIDE:
        return tl.dot(p, b.to(tl.float32), gradient, input_precision=PRECISION)
    elif PARTS == 3:
        head = p.to(b.dtype)
        rest = p - head.to(tl.float32)
        second = rest.to(b.dtype)
        third = (rest - second.to(tl.float32)).to(b.dtype)
        fresh = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        return gradient + product(head, second, third, b, b1, b2, fresh, PARTS, PRECISION)
    else:
        return tl.dot(p.to(b.dtype), b, gradient, input_precision=PRECISION)


@FastKernel
@triton.jit(do_not_specialize=["rows", "columns", "row_stride", "column_stride", "tiles_a_split"])
def rows_backward(
    rows_of, columns_of, row_ids_of, column_ids_of, low, high, bias_of, bound,
    row_alpha_of, row_beta_of, row_shift_of, alpha, beta, shift, out,
    rows, columns, row_stride, column_stride, width, tiles_a_split, slope, second_slope, limit,
    SCALES: tl.constexpr, HAS_IDS: tl.constexpr, HAS_BIAS: tl.constexpr, RAGGED: tl.constexpr, WITH_BETA: tl.constexpr,
    ROW_SIDE: tl.constexpr, COLUMN_SIDE: tl.constexpr, BOUNDED: tl.constexpr, GUARDED: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, SECOND_PRECISION: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one block of rows over one split of the columns.

    The output is [split, row, width]. ROW_SIDE alone gives the gradient of the queries; COLUMN_SIDE alone, with rows
    and columns swapped, that of the keys; both give the whole gradient if the queries are the keys. WIDE computes the
    second product in tf32, because fp16 has too small a range. Beyond the last column the operand is zero, so the
    factor there only has to be finite, which it is if BOUNDED.
    """
    if GUARDED:  # noqa: SIM102 (the outer `if` is evaluated when the kernel is compiled)
        if (tl.load(bound) <= limit) != BOUNDED:
            return
    start = tl.program_id(0) * BLOCK_M
    split = tl.program_id(1)
    row = start + tl.arange(0, BLOCK_M)
    row_ids = row
    if HAS_IDS:
        row_ids = tl.load(row_ids_of + row, mask=row < rows, other=tl.load(row_ids_of + start))
    row_low, row_high = tl.min(row_ids, 0), tl.max(row_ids, 0)
    row_alpha, row_beta, row_shift = row_coefficients(
        row_alpha_of, row_beta_of, row_shift_of, row, row < rows, ROW_SIDE, WITH_BETA
    )
    second_alpha, second_beta, second_shift = row_coefficients(
        row_alpha_of + rows, row_beta_of + rows, row_shift_of + rows, row, row < rows,
        ROW_SIDE and SCALES == 2, WITH_BETA,
    )  # fmt: skip
    a, a1, a2 = load_parts(rows_of, start, row_stride, 0, PARTS)
    gradient = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for tile in range(split * tiles_a_split, min((split + 1) * tiles_a_split, tl.cdiv(columns, BLOCK_N))):
        b, b1, b2 = load_parts(columns_of, tile * BLOCK_N, column_stride, 0, PARTS)
        s = product(a, a1, a2, b.T, b1.T, b2.T, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PARTS, PRECISION)
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = column < columns
        if ROW_SIDE:
            bias = bias_of_keys(bias_of, column, columns, False, HAS_BIAS)
        else:
            bias = bias_of_keys(bias_of, row, rows, True, HAS_BIAS)
        p = tile_gradient(
            s, slope, bias, row_alpha, row_beta, row_shift, alpha, beta, shift, column, inside,
            WITH_BETA, ROW_SIDE, COLUMN_SIDE, BOUNDED,
        )  # fmt: skip
        if SCALES == 2:
            p += tile_gradient(
                s, second_slope, bias, second_alpha, second_beta, second_shift,
                alpha + columns, beta + columns, shift + columns, column, inside,
                WITH_BETA, ROW_SIDE, COLUMN_SIDE, BOUNDED,
            )  # fmt: skip
        if HAS_IDS:  # noqa: SIM102 (the outer `if` is evaluated when the kernel is compiled)
            if (tl.load(low + tile) <= row_high) & (tl.load(high + tile) >= row_low):
                p = drop_pairs(p, 0.0, row_ids, column_ids_of, column, columns, True, False)
        p = drop_pairs(p, 0.0, row_ids, column_ids_of, column, columns, False, RAGGED and not BOUNDED)
        gradient = add_product(gradient, p, b, b1, b2, PARTS, SECOND_PRECISION, WIDE, BLOCK_M, BLOCK_D)
    d = tl.arange(0, BLOCK_D)
    place = (split.to(tl.int64) * rows + row)[:, None] * width + d[None, :]
    tl.store(out + place, gradient.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (d < width)[None, :])


@triton.jit
def row_coefficients(alpha, beta, shift, row, inside, USED: tl.constexpr, WITH_BETA: tl.constexpr):
    """Load the coefficients of a block of rows; zeros if they are not used."""
    row_alpha = tl.zeros(row.shape, tl.float32)
    row_beta, row_shift = row_alpha, row_alpha
    if USED:
        row_alpha, row_shift = (
            tl.load(alpha + row, mask=inside, other=0.0),
            tl.load(shift + row, mask=inside, other=0.0),
        )
        if WITH_BETA:
            row_beta = tl.load(beta + row, mask=inside, other=0.0)
    return row_alpha, row_beta, row_shift
