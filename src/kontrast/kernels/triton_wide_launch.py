"""Launch the Triton kernels for wide rows, and for statistics of rows and columns together.

M queries, K keys, D width, S scales.  queries [M,D], keys [K,D], ids [M] and [K];  statistics of the rows [S,M] and of
the columns [S,K].
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from kontrast.kernels import triton_wide as wide_kernels
from kontrast.kernels.triton_launch import (
    LOG2_E,
    RowTerms,
    launch_finish,
    launch_options,
)  # fmt: skip
from kontrast.kernels.triton_operands import Guard, Operand, shape_of

Statistics = tuple[Tensor, Tensor]  # lse and mean, [S,M] or [S,K]

GROUP = 16
PANEL_BYTES = 2**29
"""The most memory for stored tiles of the gradient; a panel has at least as many rows as one tile."""


def launch_both(
    rows: Operand, keyed: Operand | None, guard: Guard, scales: list[float], by_row: Statistics, by_column: Statistics
) -> None:
    """Compute bounded statistics of rows and columns from the same tiles; of half of the tiles without keys."""
    columns = keyed or rows
    shape, piece, pieces = shape_of("both", rows.rows)
    with_mean = by_row[1].shape[1] > 0
    count = 2 if with_mean else 1
    sums = by_row[0].new_zeros(count * len(scales) * (rows.count + (columns.count if keyed else 0)))
    row_sums, column_sums = sums.split([count * len(scales) * n for n in (rows.count, columns.count if keyed else 0)])
    row_sums = row_sums.view(count, len(scales), rows.count)
    column_sums = column_sums.view(count, len(scales), columns.count) if keyed else row_sums
    tiles, other_tiles = triton.cdiv(rows.count, shape.rows), triton.cdiv(columns.count, shape.columns)
    groups = triton.cdiv(other_tiles, GROUP)
    programs = tiles * other_tiles if keyed else GROUP * GROUP // 2 * groups * (groups + 1)
    narrow = guard.narrow(True)
    wide_kernels.wide_both[(programs,)](
        rows.described(shape.rows, piece), columns.described(shape.columns, piece),
        rows.pointer(narrow), columns.pointer(narrow), guard.bound,
        row_sums[0], row_sums[-1], column_sums[0], column_sums[-1],
        rows.count, columns.count, rows.stride, columns.stride,
        scales[0] * LOG2_E, scales[-1] * LOG2_E, guard.limit,
        TRIANGLE=keyed is None, GUARDED=guard.used, SCALES=len(scales), WITH_MEAN=with_mean, GROUP=GROUP,
        RAGGED=columns.count % shape.columns != 0, **launch_options(shape, piece, pieces, rows),
    )  # fmt: skip
    for part, (lse, mean) in ((row_sums, by_row), *([(column_sums, by_column)] if keyed else [])):
        launch_finish(lse, part[0], part[-1], guard, lse, mean, bounded=True, summed=True)


def launch_panels(
    rows: Operand, keyed: Operand | None, sides: tuple[RowTerms | None, RowTerms | None],
    guard: Guard, scales: list[float], need_rows: bool, need_columns: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of the rows and of the columns, through the statistics of the rows, the columns, or both.

    d loss / d s is stored for one panel of rows at a time, in bf16 if the rows are, else in float32.
    """
    columns = keyed or rows
    shape, piece, pieces = shape_of("tiles", rows.rows)
    half = rows.rows.dtype == torch.bfloat16
    kind = torch.bfloat16 if half else torch.float32
    stride = triton.cdiv(columns.count, 8) * 8
    height = max(1, PANEL_BYTES // (stride * kind.itemsize * shape.rows)) * shape.rows
    height = even_panels(rows.count, height, shape.rows)
    panel = rows.rows.new_empty(height, stride, dtype=kind)[:, : columns.count]
    row_rows, column_rows = (side.rows[:, : side.width].to(kind) for side in (rows, columns))
    to_rows = rows.rows.new_empty(rows.count, rows.width, dtype=rows.kind if half else kind) if need_rows else None
    to_columns = None
    row_terms, column_terms = sides
    terms = row_terms or column_terms
    assert terms is not None
    for first in range(0, rows.count, height):
        end = min(first + height, rows.count)
        grid = (triton.cdiv(end - first, shape.rows) * triton.cdiv(columns.count, shape.columns),)
        for bounded in guard.variants:
            narrow = guard.narrow(bounded)
            wide_kernels.wide_gradient[grid](
                rows.described(shape.rows, piece), columns.described(shape.columns, piece),
                rows.pointer(narrow), columns.pointer(narrow), guard.bound,
                *(row_terms or terms)[:3], *(column_terms or terms)[:3], panel,
                first, end, rows.count, columns.count, rows.stride, columns.stride, stride,
                scales[0] * LOG2_E, scales[-1] * LOG2_E, guard.limit,
                SCALES=len(scales), WITH_BETA=terms.with_beta, GROUP=GROUP,
                ROW_SIDE=row_terms is not None, COLUMN_SIDE=column_terms is not None,
                BOUNDED=bounded, GUARDED=guard.used, **launch_options(shape, piece, pieces, rows),
            )  # fmt: skip
        part = panel[: end - first]
        with exact_products():
            if to_rows is not None:
                torch.mm(part, column_rows, out=to_rows[first:end])
            if keyed is not None and need_columns:
                to_columns = add_product(to_columns, part.T, row_rows[first:end])
    return to_rows, to_columns


def even_panels(rows: int, height: int, block: int) -> int:
    """Return the height of the fewest panels of about equal height, a multiple of the block."""
    panels = triton.cdiv(rows, height)
    return min(height, triton.cdiv(triton.cdiv(rows, panels), block) * block)


def add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return total + a b in float32."""
    if total is None:
        return product(a, b)
    if a.dtype == torch.float32:
        return torch.addmm(total, a, b, out=total)
    return torch.addmm(total, a, b, out_dtype=torch.float32)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a b in float32."""
    if a.dtype == torch.float32 or not a.is_cuda:
        return a.float() @ b.float()
    return torch.mm(a, b, out_dtype=torch.float32)


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Multiply float32 matrices in float32, also in a program that allows tf32."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    if before == "ieee":
        yield
        return
    settings.fp32_precision = "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = before
