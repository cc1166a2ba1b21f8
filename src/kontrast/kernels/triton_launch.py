"""Choose and launch the Triton kernels of the row statistics, without reading a value from the device.

M queries, K keys, D width, S scales.  queries [M,D], keys [K,D], ids [M] and [K], statistics and their gradients [S,M].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import triton
from torch import Tensor

from kontrast.kernels import triton_gradient as gradient_kernels
from kontrast.kernels import triton_rows as forward_kernels
from kontrast.kernels.triton_operands import PRECISIONS, Guard, Operand, shape_of

LOG2_E = math.log2(math.e)


def scale_groups(scales: Sequence[float]) -> Iterator[tuple[slice, list[float]]]:
    """Yield the scales in pairs: the two scales of one launch share each tile of the affinity."""
    for start in range(0, len(scales), 2):
        yield slice(start, start + 2), list(scales[start : start + 2])


def splits_of(blocks: int, tiles: int, device: torch.device) -> tuple[int, int]:
    """Return the number of splits of the columns, enough to fill the device with programs, and the tiles per split."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    splits = max(1, min(triton.cdiv(2 * processors, blocks), tiles // 4))
    each = triton.cdiv(tiles, splits)
    return triton.cdiv(tiles, each), each


def triton_forward(
    queries: Tensor, keys: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None,
    scales: Sequence[float], with_mean: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return lse [S,M] and mean [S,M], or [S,0] without the mean."""
    rows, keyed = Operand(queries, query_ids), None if keys is None else Operand(keys, key_ids)
    columns = keyed or rows
    guard = Guard(rows, keyed)
    lse = queries.new_empty(len(scales), len(queries), dtype=torch.float32)
    mean = torch.empty_like(lse) if with_mean else lse.new_empty(len(scales), 0)
    for group, pair in scale_groups(scales):
        parts = lse[group], mean[group]
        # Atomic sums have no fixed order, so a program that needs deterministic bits computes the whole square.
        triangle = guard.used and keyed is None and not torch.are_deterministic_algorithms_enabled()
        if triangle:
            launch_triangle(rows, guard, pair, *parts)
        for bounded in (False,) if triangle or not guard.used else (True, False):
            launch_rows(rows, columns, guard, pair, *parts, bounded)
    return lse, mean


def launch_rows(
    rows: Operand, columns: Operand, guard: Guard, scales: list[float], lse: Tensor, mean: Tensor, bounded: bool
) -> None:
    """Compute row sums over all columns; the columns are split if there are too few rows to fill the device."""
    shape, piece, pieces = shape_of("rows", rows.rows)
    blocks, tiles = triton.cdiv(rows.count, shape.rows), triton.cdiv(columns.count, shape.columns)
    splits, each = splits_of(blocks, tiles, rows.rows.device)
    tops, totals, weighteds = lse, lse, mean
    if splits > 1:
        tops, totals, weighteds = lse.new_empty(3, splits, *lse.shape)
    forward_kernels.rows_forward[(blocks, splits)](
        rows.described(shape.rows, piece), columns.described(shape.columns, piece),
        rows.pointer(bounded), columns.pointer(bounded), guard.bound, tops, totals, weighteds,
        rows.count, columns.count, rows.stride, columns.stride, each,
        scales[0] * LOG2_E, scales[-1] * LOG2_E, guard.limit(scales),
        SCALES=len(scales), WITH_MEAN=mean.shape[1] > 0, BOUNDED=bounded, GUARDED=guard.used, DIRECT=splits == 1,
        PARTS=3 if rows.in_parts else 1, PRECISION=PRECISIONS[rows.rows.dtype][0],
        BLOCK_M=shape.rows, BLOCK_N=shape.columns, BLOCK_D=piece, D_BLOCKS=pieces,
        HAS_IDS=rows.ids is not None, RAGGED=columns.count % shape.columns != 0,
        num_warps=shape.warps, num_stages=shape.stages, maxnreg=shape.registers,
    )  # fmt: skip
    if splits > 1:
        launch_finish(tops, totals, weighteds, guard, scales, lse, mean, bounded, triangle=False)


def launch_triangle(rows: Operand, guard: Guard, scales: list[float], lse: Tensor, mean: Tensor) -> None:
    """Compute row sums from the tiles on and above the diagonal, if the queries are the keys."""
    shape, piece, pieces = shape_of("triangle", rows.rows)
    sums = lse.new_zeros(2 if mean.shape[1] else 1, *lse.shape)
    blocks, tiles = triton.cdiv(rows.count, shape.columns), triton.cdiv(rows.count, shape.rows)
    chunk = max(8, triton.cdiv(tiles, 8))
    forward_kernels.triangle_forward[(blocks, triton.cdiv(tiles, chunk))](
        rows.described(shape.rows, piece), rows.described(shape.columns, piece),
        rows.pointer(narrow=True), guard.bound, sums[0], sums[-1],
        rows.count, rows.stride, chunk, scales[0] * LOG2_E, scales[-1] * LOG2_E, guard.limit(scales),
        SCALES=len(scales), WITH_MEAN=mean.shape[1] > 0, PRECISION=PRECISIONS[rows.rows.dtype][0],
        PARTS=3 if rows.in_parts else 1, BLOCK_M=shape.rows, BLOCK_N=shape.columns, BLOCK_D=piece, D_BLOCKS=pieces,
        HAS_IDS=rows.ids is not None, RAGGED=rows.count % shape.columns != 0,
        num_warps=shape.warps, num_stages=shape.stages, maxnreg=shape.registers,
    )  # fmt: skip
    launch_finish(lse, sums[0], sums[-1], guard, scales, lse, mean, bounded=True, triangle=True)


def launch_finish(
    tops: Tensor, totals: Tensor, weighteds: Tensor,
    guard: Guard, scales: list[float], lse: Tensor, mean: Tensor, bounded: bool, triangle: bool,
) -> None:  # fmt: skip
    """Compute lse and mean from the sums of all splits."""
    splits = 1 if triangle else len(tops)
    forward_kernels.finish[(triton.cdiv(lse.numel(), 256),)](
        tops, totals, weighteds, guard.bound, lse, mean, lse.numel(), splits, guard.limit(scales),
        WITH_MEAN=mean.shape[1] > 0, HAS_TOPS=not triangle, BOUNDED=bounded, GUARDED=guard.used, BLOCK=256,
    )  # fmt: skip


def triton_backward(
    grad_lse: Tensor | None, grad_mean: Tensor | None,
    queries: Tensor, keys: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None,
    lse: Tensor, mean: Tensor, scales: Sequence[float], detach_weights: bool, need_queries: bool, need_keys: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of queries and keys; if the queries are the keys, the first is the whole gradient."""
    rows, keyed = Operand(queries, query_ids), None if keys is None else Operand(keys, key_ids)
    columns = keyed or rows
    # With separate keys each direction needs its own exponential anyway, so the bound would not help.
    guard = Guard(rows, keyed, worthwhile=keyed is None)
    to_queries = to_keys = None
    for group, pair in scale_groups(scales):
        from_lse, from_mean = (None if part is None else part[group].contiguous() for part in (grad_lse, grad_mean))
        terms = launch_coefficients(from_lse, from_mean, lse[group], mean[group], guard, pair, detach_weights)
        if need_queries:
            part = launch_gradient(rows, columns, terms, guard, pair, row_side=True, column_side=keyed is None)
            to_queries = part if to_queries is None else to_queries + part
        if keyed is not None and need_keys:
            part = launch_gradient(columns, rows, terms, guard, pair, row_side=False, column_side=True)
            to_keys = part if to_keys is None else to_keys + part
    return cast(to_queries, queries), None if keys is None else cast(to_keys, keys)


def cast(gradient: Tensor | None, like: Tensor) -> Tensor | None:
    return None if gradient is None else gradient.to(like.dtype)


def launch_coefficients(
    grad_lse: Tensor | None, grad_mean: Tensor | None, lse: Tensor, mean: Tensor,
    guard: Guard, scales: list[float], detach_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, bool]:  # fmt: skip
    """Return alpha, beta and shift [S,M], and whether beta is used."""
    with_beta = grad_mean is not None and not detach_weights
    alpha, shift = torch.empty_like(lse), torch.empty_like(lse)
    beta = torch.empty_like(lse) if with_beta else alpha
    gradient_kernels.gradient_coefficients[(triton.cdiv(lse.shape[1], 256), len(lse))](
        alpha if grad_lse is None else grad_lse, alpha if grad_mean is None else grad_mean, lse, mean, guard.bound,
        alpha, beta, shift, lse.shape[1], scales[0], scales[-1], guard.limit(scales),
        HAS_LSE=grad_lse is not None, HAS_MEAN=grad_mean is not None, DETACHED=detach_weights, GUARDED=guard.used,
        BLOCK=256,
    )  # fmt: skip
    return alpha, beta, shift, with_beta


def launch_gradient(
    rows: Operand, columns: Operand, terms: tuple[Tensor, Tensor, Tensor, bool],
    guard: Guard, scales: list[float], row_side: bool, column_side: bool,
) -> Tensor:  # fmt: skip
    """Return the gradient of the rows [rows, D], through their statistics, those of their columns, or both."""
    shape, piece, pieces = shape_of("gradient", rows.rows)
    blocks, tiles = triton.cdiv(rows.count, shape.rows), triton.cdiv(columns.count, shape.columns)
    splits, each = splits_of(blocks * pieces, tiles, rows.rows.device)
    out = rows.rows.new_empty(splits, rows.count, rows.width, dtype=rows.kind if splits == 1 else torch.float32)
    *coefficients, with_beta = terms
    precision, second_precision = PRECISIONS[rows.rows.dtype]
    for bounded in (True, False) if guard.used else (False,):
        gradient_kernels.rows_backward[(blocks, splits, pieces)](
            rows.described(shape.rows, piece), columns.described(shape.columns, piece),
            rows.pointer(bounded), *columns.spans(bounded, shape.columns), guard.bound,
            *coefficients, *coefficients, out,
            rows.count, columns.count, rows.stride, columns.stride, rows.width, each,
            scales[0] * LOG2_E, scales[-1] * LOG2_E, guard.limit(scales),
            SCALES=len(scales), WITH_BETA=with_beta, ROW_SIDE=row_side, COLUMN_SIDE=column_side,
            BOUNDED=bounded, GUARDED=guard.used, PRECISION=precision, SECOND_PRECISION=second_precision,
            WIDE=rows.rows.dtype == torch.float16,
            PARTS=3 if rows.in_parts else 1, BLOCK_M=shape.rows, BLOCK_N=shape.columns, BLOCK_D=piece, D_BLOCKS=pieces,
            HAS_IDS=rows.ids is not None, RAGGED=columns.count % shape.columns != 0,
        num_warps=shape.warps, num_stages=shape.stages, maxnreg=shape.registers,
        )  # fmt: skip
    return out[0] if splits == 1 else out.sum(dim=0)
