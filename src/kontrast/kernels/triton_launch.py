"""Chooses and launches the Triton kernels of the row statistics. Nothing here reads a value off the device.

M queries, K keys, D width, S scales.  queries [M,D], keys [K,D], ids [M] and [K], statistics and their gradients [S,M].
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kontrast.kernels import triton_gradient as gradient_kernels
from kontrast.kernels import triton_rows as forward_kernels
from kontrast.kernels.tiled import SAFE_EXPONENT

LOG2_E = math.log2(math.e)

# From this many pairs on, the work outweighs the launches that let the device choose its own shortcut.
LARGE = 2**24


@dataclass(frozen=True)
class Shape:
    """How a kernel is cut: block sizes, warps, pipeline stages, the widest piece of a row, a cap on registers."""

    rows: int
    columns: int
    warps: int
    stages: int
    piece: int = 128
    registers: int | None = None


# By bytes of a number: shapes for rows of one piece, and for wider ones. Chosen by benchmarks/kernels.py --tune.
TABLE = {
    "rows": {2: Shape(64, 128, 4, 3), 4: Shape(128, 64, 8, 2)},
    "triangle": {2: Shape(128, 64, 8, 3), 4: Shape(64, 128, 4, 2)},
    "gradient": {2: Shape(128, 64, 4, 2), 4: Shape(128, 64, 8, 2)},
}
WIDE_TABLE = {2: Shape(128, 64, 4, 2), 4: Shape(64, 64, 4, 2, 64)}

# How each product is made on the matrix units: s, then the gradient. Wide float32 rows are cut into tf32 by the
# compiler, others into three bf16 parts by `cut`; fp16 needs tf32's exponents for the gradient.
PRECISIONS = {torch.float32: ("tf32x3", "tf32x3"), torch.float16: ("ieee", "tf32"), torch.bfloat16: ("ieee", "ieee")}


def shape_of(kernel: str, tensor: Tensor) -> tuple[Shape, int, int]:
    """The kernel's shape, and the piece and number of pieces that the width is cut into."""
    shape = TABLE[kernel][tensor.element_size()]
    if tensor.shape[1] > shape.piece:
        shape = WIDE_TABLE[tensor.element_size()]
    piece = min(max(16, triton.next_power_of_2(tensor.shape[1])), shape.piece)
    return shape, piece, triton.cdiv(tensor.shape[1], piece)


class Operand:
    """Rows as the kernels read them: contiguous, each starting on a multiple of 16 bytes; float32 in parts."""

    def __init__(self, rows: Tensor, ids: Tensor | None):
        self.count, self.width = rows.shape
        self.kind = rows.dtype
        self.ids = None if ids is None else ids.contiguous()
        # The interpreter has no bf16 product; float32 holds each exactly.
        rows = rows.float() if interpreting() and rows.dtype == torch.bfloat16 else rows
        excess = -self.width % 8
        rows = torch.nn.functional.pad(rows, (0, excess)) if excess else rows.contiguous()
        self.rows = rows.clone() if rows.data_ptr() % 16 else rows
        self.in_parts = self.kind == torch.float32 and self.width <= TABLE["gradient"][4].piece
        self.stride = 0
        self.read = self.cut() if self.in_parts else self.rows

    def cut(self) -> Tensor:
        """Three parts of bf16's precision that add up to the rows: [3 * stride, width]."""
        self.stride = triton.cdiv(self.count, 128) * 128
        width = self.rows.shape[1]
        parts = self.rows.new_empty(3 * self.stride, width, dtype=torch.float32 if interpreting() else torch.bfloat16)
        piece = min(128, triton.next_power_of_2(width))
        grid = triton.cdiv(self.stride, 32), triton.cdiv(width, piece)
        forward_kernels.cut[grid](self.rows, parts, self.count, self.stride, width, BLOCK=32, BLOCK_D=piece)
        return parts

    def pointer(self, narrow: bool) -> Tensor:
        """The ids (narrow: their lower halves), or any pointer where no kernel reads them."""
        return self.rows if self.ids is None else self.ids.to(torch.int32) if narrow else self.ids

    def spans(self, narrow: bool, block: int) -> tuple[Tensor, Tensor, Tensor]:
        """The ids, and the smallest and largest of each block; or any pointers where no kernel reads them."""
        ids = self.pointer(narrow)
        if self.ids is None:
            return ids, ids, ids
        low, high = ids.new_empty(2, triton.cdiv(self.count, block))
        forward_kernels.id_spans[(len(low),)](ids, low, high, self.count, BLOCK=block)
        return ids, low, high

    def described(self, block: int, piece: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(self.read, [block, piece])


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def scale_groups(scales: Sequence[float]) -> Iterator[tuple[slice, list[float]]]:
    """Scales two by two: those of one launch share each tile of the affinity."""
    for start in range(0, len(scales), 2):
        yield slice(start, start + 2), list(scales[start : start + 2])


class Guard:
    """Whether the shortcuts hold, measured on the device, never read on the host.

    `bound` is the largest |s| that the rows' norms allow; it is infinite where the lower halves of the ids are not
    enough to tell them apart.
    """

    def __init__(self, queries: Operand, keys: Operand | None, worthwhile: bool = True):
        self.used = worthwhile and queries.count * (keys or queries).count >= LARGE
        self.bound = queries.rows  # any pointer does where no kernel reads it
        if not self.used:
            return
        sides = [queries] if keys is None else [queries, keys]
        norms = [torch.linalg.vector_norm(side.rows, dim=1, dtype=torch.float32).amax() for side in sides]
        self.bound = norms[0] * norms[-1]
        if queries.ids is not None:
            ends = [end.double() for side in sides for end in torch.aminmax(side.ids)]
            span = torch.maximum(ends[1], ends[-1]) - torch.minimum(ends[0], ends[-2])
            self.bound = self.bound.masked_fill(span >= 2**32 - 1, torch.inf)

    def limit(self, scales: Sequence[float]) -> float:
        largest = max(abs(scale) for scale in scales)
        return SAFE_EXPONENT / largest if largest > 0 else 3e38


def splits_of(blocks: int, tiles: int, device: torch.device) -> tuple[int, int]:
    """In how many splits the columns are walked, and the tiles of each: enough programs to fill the device."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    splits = max(1, min(triton.cdiv(2 * processors, blocks), tiles // 4))
    each = triton.cdiv(tiles, splits)
    return triton.cdiv(tiles, each), each


def triton_forward(
    queries: Tensor,
    keys: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    scales: Sequence[float],
    with_mean: bool,
) -> tuple[Tensor, Tensor]:
    """lse [S,M] and mean [S,M] (or [S,0] where it is not wanted)."""
    rows, keyed = Operand(queries, query_ids), None if keys is None else Operand(keys, key_ids)
    columns = keyed or rows
    guard = Guard(rows, keyed)
    lse = queries.new_empty(len(scales), len(queries), dtype=torch.float32)
    mean = torch.empty_like(lse) if with_mean else lse.new_empty(len(scales), 0)
    for group, pair in scale_groups(scales):
        parts = lse[group], mean[group]
        # Atomic sums come in any order, so a program that asks for the same bits every time walks the whole square.
        triangle = guard.used and keyed is None and not torch.are_deterministic_algorithms_enabled()
        if triangle:
            launch_triangle(rows, guard, pair, *parts)
        for bounded in (False,) if triangle or not guard.used else (True, False):
            launch_rows(rows, columns, guard, pair, *parts, bounded)
    return lse, mean


def launch_rows(
    rows: Operand, columns: Operand, guard: Guard, scales: list[float], lse: Tensor, mean: Tensor, bounded: bool
) -> None:
    """Row sums over all columns, split where there are too few rows to fill the device."""
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
    """Row sums where queries are keys, from the tiles on and above the diagonal."""
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
    """lse and mean from the sums of all splits, by the kernel that goes with the one that made them."""
    splits = 1 if triangle else len(tops)
    forward_kernels.finish[(triton.cdiv(lse.numel(), 256),)](
        tops, totals, weighteds, guard.bound, lse, mean, lse.numel(), splits, guard.limit(scales),
        WITH_MEAN=mean.shape[1] > 0, HAS_TOPS=not triangle, BOUNDED=bounded, GUARDED=guard.used, BLOCK=256,
    )  # fmt: skip


def triton_backward(
    grad_lse: Tensor | None,
    grad_mean: Tensor | None,
    queries: Tensor,
    keys: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    lse: Tensor,
    mean: Tensor,
    scales: Sequence[float],
    detach_weights: bool,
    need_queries: bool,
    need_keys: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients to queries and keys; where queries are keys, both sides' share in the first."""
    rows, keyed = Operand(queries, query_ids), None if keys is None else Operand(keys, key_ids)
    columns = keyed or rows
    # One direction alone needs one exponential a pair either way, so only queries that are keys gain by the bound.
    guard = Guard(rows, keyed, worthwhile=keyed is None)
    to_queries = to_keys = None
    for group, pair in scale_groups(scales):
        incoming = [None if part is None else part[group].contiguous() for part in (grad_lse, grad_mean)]
        terms = launch_coefficients(*incoming, lse[group], mean[group], guard, pair, detach_weights)
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
    """alpha, beta and shift [S,M], and whether beta is used at all."""
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
    """Gradient to the rows [rows, D], from their own statistics, their columns', or both."""
    shape, piece, pieces = shape_of("gradient", rows.rows)
    blocks, tiles = triton.cdiv(rows.count, shape.rows), triton.cdiv(columns.count, shape.columns)
    splits, each = splits_of(blocks * pieces, tiles, rows.rows.device)
    out = rows.rows.new_empty(splits, rows.count, rows.width, dtype=rows.kind if splits == 1 else torch.float32)
    *coefficients, with_beta = terms
    precision, second_precision = PRECISIONS[rows.rows.dtype]
    for bounded in (True, False) if guard.used else (False,):
        gradient_kernels.rows_backward[(blocks, splits, pieces)](
            rows.described(shape.rows, piece), columns.described(shape.columns, piece),
            rows.pointer(bounded), *columns.spans(bounded, shape.columns), guard.bound, *coefficients, *coefficients, out,
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
