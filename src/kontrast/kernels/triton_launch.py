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
    """How a kernel is cut: block sizes, warps and pipeline stages."""

    rows: int
    columns: int
    warps: int
    stages: int


TABLE = {
    "rows": {2: Shape(128, 128, 8, 3), 4: Shape(64, 64, 4, 2)},
    "triangle": {2: Shape(128, 128, 8, 3), 4: Shape(64, 64, 4, 2)},
    "gradient": {2: Shape(128, 128, 8, 3), 4: Shape(64, 64, 4, 2)},
}


def shape_of(kernel: str, tensor: Tensor) -> tuple[Shape, int, int]:
    """The kernel's shape, and the piece and number of pieces that the width is cut into."""
    bytes_each = tensor.element_size()
    piece = min(max(16, triton.next_power_of_2(tensor.shape[1])), 128)
    shape = TABLE[kernel][bytes_each]
    return shape, piece, triton.cdiv(tensor.shape[1], piece)


@dataclass(frozen=True)
class Operand:
    """Rows as the kernels read them: contiguous, and padded so that each starts on a multiple of 16 bytes."""

    rows: Tensor
    ids: Tensor | None
    width: int
    kind: torch.dtype

    @classmethod
    def of(cls, rows: Tensor, ids: Tensor | None) -> Operand:
        width, kind = rows.shape[1], rows.dtype
        if interpreting() and rows.dtype == torch.bfloat16:
            rows = rows.float()  # the interpreter has no bf16 product; float32 holds each exactly
        excess = -width % (16 // rows.element_size())
        rows = torch.nn.functional.pad(rows, (0, excess)) if excess else rows.contiguous()
        if rows.data_ptr() % 16:
            rows = rows.clone()
        return cls(rows, None if ids is None else ids.contiguous(), width, kind)

    @property
    def pointer(self) -> Tensor:
        """The ids, or any pointer where no kernel reads them."""
        return self.rows if self.ids is None else self.ids

    def described(self, block: int, piece: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(self.rows, [block, piece])

    def spans(self, block: int) -> tuple[Tensor, Tensor]:
        """Smallest and largest id of each block."""
        assert self.ids is not None
        low = self.ids.new_empty(triton.cdiv(len(self.ids), block))
        high = torch.empty_like(low)
        forward_kernels.id_spans[(len(low),)](self.ids, low, high, len(self.ids), BLOCK=block)
        return low, high


def large(rows: Operand, columns: Operand) -> bool:
    return len(rows.rows) * len(columns.rows) >= LARGE


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def precision(tensor: Tensor) -> str:
    return "tf32x3" if tensor.dtype == torch.float32 else "ieee"


def scale_groups(scales: Sequence[float]) -> Iterator[tuple[slice, list[float]]]:
    """Scales two by two: those of one launch share each tile of the affinity."""
    for start in range(0, len(scales), 2):
        yield slice(start, start + 2), list(scales[start : start + 2])


class Guard:
    """The largest |s| that the rows' norms allow, measured on the device, and what each launch compares it with."""

    def __init__(self, queries: Operand, keys: Operand | None, worthwhile: bool = True):
        self.used = worthwhile and large(queries, keys or queries)
        self.bound = queries.rows  # any pointer does where no kernel reads it
        if self.used:
            sides = [queries] if keys is None else [queries, keys]
            norms = [torch.linalg.vector_norm(side.rows, dim=1, dtype=torch.float32).amax() for side in sides]
            self.bound = norms[0] * norms[-1]

    def limit(self, scales: Sequence[float]) -> float:
        largest = max(abs(scale) for scale in scales)
        return SAFE_EXPONENT / largest if largest > 0 else 3e38


def masking(columns: Operand, block: int, large: bool) -> tuple[dict[str, int | bool], Tensor, Tensor]:
    """Compile-time flags of the mask, and the spans of the columns' ids (any pointer where they are not read)."""
    flags = {"HAS_IDS": columns.ids is not None, "RAGGED": len(columns.rows) % block != 0}
    if columns.ids is None:
        return {**flags, "MASK": 0}, columns.rows, columns.rows
    if not large:
        return {**flags, "MASK": 1}, columns.ids, columns.ids
    return {**flags, "MASK": 2}, *columns.spans(block)


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
    rows, keyed = Operand.of(queries, query_ids), None if keys is None else Operand.of(keys, key_ids)
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
    flags, low, high = masking(columns, shape.columns, guard.used)
    blocks, tiles = triton.cdiv(len(rows.rows), shape.rows), triton.cdiv(len(columns.rows), shape.columns)
    splits, each = splits_of(blocks, tiles, rows.rows.device)
    tops, totals, weighteds = lse, lse, mean
    if splits > 1:
        tops, totals, weighteds = lse.new_empty(3, splits, *lse.shape)
    forward_kernels.rows_forward[(blocks, splits)](
        rows.described(shape.rows, piece), columns.described(shape.columns, piece),
        rows.pointer, columns.pointer, low, high, guard.bound, tops, totals, weighteds,
        len(rows.rows), len(columns.rows), each, scales[0] * LOG2_E, scales[-1] * LOG2_E, guard.limit(scales),
        SCALES=len(scales), WITH_MEAN=mean.shape[1] > 0, BOUNDED=bounded, GUARDED=guard.used, DIRECT=splits == 1,
        PRECISION=precision(rows.rows), BLOCK_M=shape.rows, BLOCK_N=shape.columns, BLOCK_D=piece, D_BLOCKS=pieces,
        num_warps=shape.warps, num_stages=shape.stages, **flags,
    )  # fmt: skip
    if splits > 1:
        launch_finish(tops, totals, weighteds, guard, scales, lse, mean, triangle=False)


def launch_triangle(rows: Operand, guard: Guard, scales: list[float], lse: Tensor, mean: Tensor) -> None:
    """Row sums where queries are keys, from the tiles on and above the diagonal."""
    shape, piece, pieces = shape_of("triangle", rows.rows)
    flags, low, high = masking(rows, shape.rows, large=True)
    flags["RAGGED"] = len(rows.rows) % shape.columns != 0
    sums = lse.new_zeros(2 if mean.shape[1] else 1, *lse.shape)
    blocks, tiles = triton.cdiv(len(rows.rows), shape.columns), triton.cdiv(len(rows.rows), shape.rows)
    chunk = max(8, triton.cdiv(tiles, 8))
    forward_kernels.triangle_forward[(blocks, triton.cdiv(tiles, chunk))](
        rows.described(shape.rows, piece), rows.described(shape.columns, piece),
        rows.pointer, low, high, guard.bound, sums[0], sums[-1],
        len(rows.rows), chunk, scales[0] * LOG2_E, scales[-1] * LOG2_E, guard.limit(scales),
        SCALES=len(scales), WITH_MEAN=mean.shape[1] > 0, PRECISION=precision(rows.rows),
        BLOCK_M=shape.rows, BLOCK_N=shape.columns, BLOCK_D=piece, D_BLOCKS=pieces,
        num_warps=shape.warps, num_stages=shape.stages, **flags,
    )  # fmt: skip
    launch_finish(lse, sums[0], sums[-1], guard, scales, lse, mean, triangle=True)


def launch_finish(
    tops: Tensor, totals: Tensor, weighteds: Tensor,
    guard: Guard, scales: list[float], lse: Tensor, mean: Tensor, triangle: bool,
) -> None:  # fmt: skip
    splits = 1 if triangle else len(tops)
    forward_kernels.finish[(triton.cdiv(lse.numel(), 256),)](
        tops, totals, weighteds, guard.bound, lse, mean, lse.numel(), splits, guard.limit(scales),
        WITH_MEAN=mean.shape[1] > 0, HAS_TOPS=not triangle, GUARDED=triangle, BLOCK=256,
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
    rows, keyed = Operand.of(queries, query_ids), None if keys is None else Operand.of(keys, key_ids)
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
    flags, low, high = masking(columns, shape.columns, large(rows, columns))
    blocks, tiles = triton.cdiv(len(rows.rows), shape.rows), triton.cdiv(len(columns.rows), shape.columns)
    splits, each = splits_of(blocks * pieces, tiles, rows.rows.device)
    alone = splits == 1 and len(scales) <= 2
    out = rows.rows.new_empty(splits, len(rows.rows), rows.width, dtype=rows.kind if alone else torch.float32)
    *coefficients, with_beta = terms
    for bounded in (True, False) if guard.used else (False,):
        gradient_kernels.rows_backward[(blocks, splits, pieces)](
            rows.described(shape.rows, piece), columns.described(shape.columns, piece),
            rows.pointer, columns.pointer, low, high, guard.bound, *coefficients, *coefficients, out,
            len(rows.rows), len(columns.rows), rows.width, each,
            scales[0] * LOG2_E, scales[-1] * LOG2_E, guard.limit(scales),
            SCALES=len(scales), WITH_BETA=with_beta, ROW_SIDE=row_side, COLUMN_SIDE=column_side,
            BOUNDED=bounded, GUARDED=guard.used, PRECISION=precision(rows.rows), WIDE=rows.rows.dtype == torch.float16,
            BLOCK_M=shape.rows, BLOCK_N=shape.columns, BLOCK_D=piece, D_BLOCKS=pieces,
            num_warps=shape.warps, num_stages=shape.stages, **flags,
        )  # fmt: skip
    return out[0] if splits == 1 else out.sum(dim=0)
