"""Choose and launch the Triton kernels of the row statistics, without reading a value from the device.

M queries, K keys, D width, S scales.  queries [M,D], keys [K,D], ids [M] and [K], statistics and their gradients [S,M].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kontrast.kernels import triton_gradient as gradient_kernels
from kontrast.kernels import triton_rows as forward_kernels
from kontrast.kernels.triton_operands import NARROW_WIDTH, PRECISIONS, Guard, Operand, Shape, ceil_div, shape_of

LOG2_E = math.log2(math.e)


def scale_groups(scales: Sequence[float]) -> Iterator[tuple[slice, list[float]]]:
    """Yield the scales in pairs: the two scales of one launch share each tile of the affinity."""
    for start in range(0, len(scales), 2):
        yield slice(start, start + 2), list(scales[start : start + 2])


def splits_of(blocks: int, tiles: int, device: torch.device) -> tuple[int, int]:
    """Return the number of splits of the columns, enough to fill the device with programs, and the tiles per split."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    splits = max(1, min(ceil_div(2 * processors, blocks), tiles // 4))
    each = ceil_div(tiles, splits)
    return ceil_div(tiles, each), each


def launch_options(shape: Shape, piece: int, pieces: int | None, operand: Operand) -> dict[str, Any]:
    """Return the block sizes and settings that every kernel takes; `pieces` if it loops over pieces of the width."""
    options: dict[str, Any] = {"BLOCK_M": shape.rows, "BLOCK_N": shape.columns, "PARTS": 3 if operand.in_parts else 1}
    options |= {"PRECISION": PRECISIONS[operand.rows.dtype][0], "HAS_IDS": operand.ids is not None}
    options |= {"num_warps": shape.warps, "num_stages": shape.stages, "maxnreg": shape.registers}
    return options if pieces is None else {**options, "BLOCK_D": piece, "D_BLOCKS": pieces}


def triton_forward(
    queries: Tensor, keys: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None,
    scales: Sequence[float], with_mean: bool, unit: bool = False, key_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return lse [S,M] and mean [S,M], or [S,0] without the mean."""
    rows, keyed = Operand(queries, query_ids), None if keys is None else Operand(keys, key_ids, key_bias)
    columns = keyed or rows
    lse = queries.new_empty(len(scales), len(queries), dtype=torch.float32)
    mean = torch.empty_like(lse) if with_mean else lse.new_empty(len(scales), 0)
    for group, pair in scale_groups(scales):
        guard, parts = Guard(rows, keyed, pair, unit), (lse[group], mean[group])
        # Atomic sums have no fixed order, so a program that needs deterministic bits computes the whole square.
        triangle = guard.variants[0] and keyed is None and guard.many
        if triangle and not torch.are_deterministic_algorithms_enabled():
            if rows.width > NARROW_WIDTH:
                from kontrast.kernels.triton_wide_launch import launch_both

                launch_both(rows, None, guard, pair, parts, parts)
            else:
                launch_triangle(rows, guard, pair, *parts)
            variants = list(guard.variants[1:])
        else:
            variants = list(guard.variants)
        for bounded in variants:
            launch_rows(rows, columns, guard, pair, *parts, bounded)
    return lse, mean


def launch_rows(
    rows: Operand, columns: Operand, guard: Guard, scales: list[float], lse: Tensor, mean: Tensor, bounded: bool
) -> None:
    """Compute row sums over all columns; the columns are split if there are too few rows to fill the device."""
    shape, piece, pieces = shape_of("rows", rows.rows)
    blocks, tiles = ceil_div(rows.count, shape.rows), ceil_div(columns.count, shape.columns)
    splits, each = splits_of(blocks, tiles, rows.rows.device)
    tops, totals, weighteds = lse, lse, mean
    if splits > 1:
        tops, totals, weighteds = lse.new_empty(3, splits, *lse.shape)
    narrow = guard.narrow(bounded)
    forward_kernels.rows_forward[(blocks, splits)](
        rows.described(shape.rows, piece), columns.described(shape.columns, piece),
        rows.pointer(narrow), columns.pointer(narrow), columns.bias_pointer,
        guard.bound, guard.scale, tops, totals, weighteds,
        rows.count, columns.count, rows.stride, columns.stride, each,
        scales[0] * LOG2_E, scales[-1] * LOG2_E, guard.limit,
        SCALES=len(scales), WITH_MEAN=mean.shape[1] > 0, BOUNDED=bounded, GUARDED=guard.used,
        SCALED=guard.scaled, HAS_BIAS=columns.bias is not None, DIRECT=splits == 1,
        RAGGED=columns.count % shape.columns != 0, **launch_options(shape, piece, pieces, rows),
    )  # fmt: skip
    if splits > 1:
        launch_finish(tops, totals, weighteds, guard, lse, mean, bounded, summed=False)


def launch_triangle(rows: Operand, guard: Guard, scales: list[float], lse: Tensor, mean: Tensor) -> None:
    """Compute row sums from the tiles on and above the diagonal, if the queries are the keys."""
    shape, piece, _ = shape_of("triangle", rows.rows)
    sums = lse.new_zeros(2 if mean.shape[1] else 1, *lse.shape)
    blocks, tiles = ceil_div(rows.count, shape.columns), ceil_div(rows.count, shape.rows)
    chunk = max(8, ceil_div(tiles, 8))
    forward_kernels.triangle_forward[(blocks, ceil_div(tiles, chunk))](
        rows.described(shape.rows, piece), rows.described(shape.columns, piece),
        rows.pointer(guard.narrow(True)), guard.bound, sums[0], sums[-1],
        rows.count, rows.stride, chunk, scales[0] * LOG2_E, scales[-1] * LOG2_E, guard.limit,
        GUARDED=guard.used, SCALES=len(scales), WITH_MEAN=mean.shape[1] > 0,
        RAGGED=rows.count % shape.columns != 0, **launch_options(shape, piece, None, rows),
    )  # fmt: skip
    launch_finish(lse, sums[0], sums[-1], guard, lse, mean, bounded=True, summed=True)


def launch_finish(
    tops: Tensor, totals: Tensor, weighteds: Tensor,
    guard: Guard, lse: Tensor, mean: Tensor, bounded: bool, summed: bool,
) -> None:  # fmt: skip
    """Compute lse and mean from the sums of all splits; `summed` if the sums of all tiles are already added up."""
    splits = 1 if summed else len(tops)
    forward_kernels.finish[(ceil_div(lse.numel(), 256),)](
        tops, totals, weighteds, guard.bound, lse, mean, lse.numel(), splits, guard.limit,
        WITH_MEAN=mean.shape[1] > 0, HAS_TOPS=not summed, BOUNDED=bounded, GUARDED=guard.used, BLOCK=256,
    )  # fmt: skip


def triton_backward(
    grad_lse: Tensor | None, grad_mean: Tensor | None,
    queries: Tensor, keys: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None,
    lse: Tensor, mean: Tensor, scales: Sequence[float], detach_weights: bool, need_queries: bool, need_keys: bool,
    unit: bool = False, key_bias: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of queries and keys; if the queries are the keys, the first is the whole gradient."""
    rows, keyed = Operand(queries, query_ids), None if keys is None else Operand(keys, key_ids, key_bias)
    columns = keyed or rows
    to_queries = to_keys = None
    for group, pair in scale_groups(scales):
        # With separate keys each direction needs its own exponential anyway, so asking for the bound would not help.
        guard = Guard(rows, keyed, pair, unit, ask=keyed is None)
        from_lse, from_mean = (None if part is None else part[group].contiguous() for part in (grad_lse, grad_mean))
        terms = launch_coefficients(from_lse, from_mean, lse[group], mean[group], guard, pair, detach_weights)
        if rows.width > NARROW_WIDTH:
            from kontrast.kernels.triton_wide_launch import launch_gradient_tiles, multiply_panels

            launch = launch_gradient_tiles(rows, columns, (terms, terms if keyed is None else None), guard, pair)
            parts = multiply_panels(rows, keyed, launch, need_queries, need_keys)
        else:
            parts = None, None
            if need_queries:
                own = launch_gradient(rows, columns, terms, guard, pair, row_side=True, column_side=keyed is None)
                parts = own, None
            if keyed is not None and need_keys:
                other = launch_gradient(columns, rows, terms, guard, pair, row_side=False, column_side=True)
                parts = parts[0], other
        to_queries, to_keys = add(to_queries, parts[0]), add(to_keys, parts[1])
    return cast(to_queries, queries), None if keys is None else cast(to_keys, keys)


def add(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    return part if total is None else total if part is None else total + part


def cast(gradient: Tensor | None, like: Tensor) -> Tensor | None:
    return None if gradient is None else gradient.to(like.dtype)


class RowTerms(NamedTuple):
    """alpha, beta and shift [S,M] of one side of the pairs, and whether beta is used."""

    alpha: Tensor
    beta: Tensor
    shift: Tensor
    with_beta: bool


def launch_coefficients(
    grad_lse: Tensor | None, grad_mean: Tensor | None, lse: Tensor, mean: Tensor,
    guard: Guard, scales: list[float], detach_weights: bool,
) -> RowTerms:  # fmt: skip
    """Compute the numbers per row from which the gradient of the affinity is made."""
    with_beta = grad_mean is not None and not detach_weights
    alpha, shift = torch.empty_like(lse), torch.empty_like(lse)
    beta = torch.empty_like(lse) if with_beta else alpha
    gradient_kernels.gradient_coefficients[(ceil_div(lse.shape[1], 256), len(lse))](
        alpha if grad_lse is None else grad_lse, alpha if grad_mean is None else grad_mean, lse, mean, guard.bound,
        guard.scale, alpha, beta, shift, lse.shape[1], scales[0], scales[-1], guard.limit,
        HAS_LSE=grad_lse is not None, HAS_MEAN=grad_mean is not None, DETACHED=detach_weights,
        BOUNDED=guard.variants[0], GUARDED=guard.used, SCALED=guard.scaled, BLOCK=256,
    )  # fmt: skip
    return RowTerms(alpha, beta, shift, with_beta)


def launch_gradient(
    rows: Operand, columns: Operand, terms: RowTerms,
    guard: Guard, scales: list[float], row_side: bool, column_side: bool,
) -> Tensor:  # fmt: skip
    """Return the gradient of narrow rows [rows, D], through their statistics, those of their columns, or both."""
    shape, piece, _ = shape_of("gradient", rows.rows)
    blocks, tiles = ceil_div(rows.count, shape.rows), ceil_div(columns.count, shape.columns)
    splits, each = splits_of(blocks, tiles, rows.rows.device)
    out = rows.rows.new_empty(splits, rows.count, rows.width, dtype=rows.kind if splits == 1 else torch.float32)
    *coefficients, with_beta = terms
    for bounded in guard.variants:
        narrow = guard.narrow(bounded)
        gradient_kernels.rows_backward[(blocks, splits)](
            rows.described(shape.rows, piece), columns.described(shape.columns, piece),
            rows.pointer(narrow), *columns.spans(narrow, shape.columns),
            (columns if row_side else rows).bias_pointer, guard.bound,
            *coefficients, *coefficients, out,
            rows.count, columns.count, rows.stride, columns.stride, rows.width, each,
            scales[0] * LOG2_E, scales[-1] * LOG2_E, guard.limit,
            SCALES=len(scales), HAS_BIAS=(columns if row_side else rows).bias is not None,
            WITH_BETA=with_beta, ROW_SIDE=row_side, COLUMN_SIDE=column_side,
            BOUNDED=bounded, GUARDED=guard.used, SECOND_PRECISION=PRECISIONS[rows.rows.dtype][1],
            WIDE=rows.rows.dtype == torch.float16, BLOCK_D=piece,
            RAGGED=columns.count % shape.columns != 0, **launch_options(shape, piece, None, rows),
        )  # fmt: skip
    return out[0] if splits == 1 else out.sum(dim=0)
