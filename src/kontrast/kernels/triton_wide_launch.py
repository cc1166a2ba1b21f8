"""Launch the Triton kernels for wide rows, and for statistics of rows and columns together.

M queries, K keys, D width, S scales.  queries [M,D], keys [K,D], ids [M] and [K];  statistics of the rows [S,M] and of
the columns [S,K].
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kontrast.kernels import triton_wide as wide_kernels
from kontrast.kernels.dense import INTERPRETED
from kontrast.kernels.triton_launch import (
    LOG2_E,
    RowTerms,
    cast,
    launch_coefficients,
    launch_finish,
    launch_options,
    launch_rows,
)  # fmt: skip
from kontrast.kernels.triton_operands import Guard, Operand, Shape, ceil_div, shape_of

Statistics = tuple[Tensor, Tensor]  # lse and mean, [S,M] or [S,K]

GROUP = 16
PANEL_BYTES = 2**29
"""The most memory for a panel with all columns; it has at least as many rows as one tile."""
PANEL_SIDE = 2**13
"""The most rows and columns of a panel whose products with rows and with columns are both needed: they are fast if
neither of its sides is short, so such a panel can be smaller than one with all columns."""


class Panel(NamedTuple):
    """Some rows and columns of d loss / d s, and the memory [rows, columns] in which they are stored."""

    rows: slice
    columns: slice
    stored: Tensor

    @property
    def ends(self) -> tuple[int, int, int, int]:
        """The first row and the end of the rows, and the same of the columns."""
        return self.rows.start, self.rows.stop, self.columns.start, self.columns.stop

    def tiles(self, shape: Shape) -> int:
        """Return the number of tiles of a shape."""
        first, end, first_column, end_column = self.ends
        return ceil_div(end - first, shape.rows) * ceil_div(end_column - first_column, shape.columns)


PanelLauncher = Callable[[Panel], None]


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
    tiles, other_tiles = ceil_div(rows.count, shape.rows), ceil_div(columns.count, shape.columns)
    groups = ceil_div(other_tiles, GROUP)
    programs = tiles * other_tiles if keyed else GROUP * GROUP // 2 * groups * (groups + 1)
    narrow = guard.narrow(True)
    wide_kernels.wide_both[(programs,)](
        rows.described(shape.rows, piece), columns.described(shape.columns, piece),
        rows.pointer(narrow), columns.pointer(narrow), guard.bound, guard.scale,
        row_sums[0], row_sums[-1], column_sums[0], column_sums[-1],
        rows.count, columns.count, rows.stride, columns.stride,
        scales[0] * LOG2_E, scales[-1] * LOG2_E, guard.limit,
        TRIANGLE=keyed is None, GUARDED=guard.used, SCALED=guard.scaled, SCALES=len(scales), WITH_MEAN=with_mean,
        GROUP=GROUP, RAGGED=columns.count % shape.columns != 0, **launch_options(shape, piece, pieces, rows),
    )  # fmt: skip
    for part, (lse, mean) in ((row_sums, by_row), *([(column_sums, by_column)] if keyed else [])):
        launch_finish(lse, part[0], part[-1], guard, lse, mean, bounded=True, summed=True)


def launch_gradient_tiles(
    rows: Operand, columns: Operand, sides: tuple[RowTerms | None, RowTerms | None], guard: Guard, scales: list[float]
) -> PanelLauncher:
    """Return a function that stores a panel of d loss / d s, through the statistics of rows, columns, or both."""
    row_terms, column_terms = sides
    terms = row_terms or column_terms
    assert terms is not None

    def launch(panel: Panel) -> None:
        shape, piece, pieces = shape_of("tiles", rows.rows)
        grid = (panel.tiles(shape),)
        for bounded in guard.variants:
            narrow = guard.narrow(bounded)
            wide_kernels.wide_gradient[grid](
                rows.described(shape.rows, piece), columns.described(shape.columns, piece),
                rows.pointer(narrow), columns.pointer(narrow), columns.bias_pointer, guard.bound, guard.scale,
                *(row_terms or terms)[:3], *(column_terms or terms)[:3], panel.stored,
                *panel.ends, rows.count, columns.count, rows.stride, columns.stride, panel.stored.stride(0),
                scales[0] * LOG2_E, scales[-1] * LOG2_E, guard.limit,
                SCALES=len(scales), HAS_BIAS=columns.bias is not None, WITH_BETA=terms.with_beta, GROUP=GROUP,
                SCALED=guard.scaled,
                ROW_SIDE=row_terms is not None, COLUMN_SIDE=column_terms is not None,
                BOUNDED=bounded, GUARDED=guard.used, **launch_options(shape, piece, pieces, rows),
            )  # fmt: skip

    return launch


def multiply_panels(
    rows: Operand, keyed: Operand | None, launch: PanelLauncher, need_rows: bool, need_columns: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the rows and of the keys, from one panel of d loss / d s at a time.

    `launch` stores a panel, in bf16 if the rows are, else in float32.
    """
    columns = keyed or rows
    kind = panel_type(rows)
    row_rows, column_rows = (side.rows[:, : side.width].to(kind) for side in (rows, columns))
    need_columns = need_columns and keyed is not None
    square = need_rows and need_columns
    to_rows = to_columns = None
    if square:
        to_rows = rows.rows.new_zeros(rows.count, rows.width, dtype=torch.float32)
    elif need_rows:
        to_rows = rows.rows.new_empty(rows.count, rows.width, dtype=rows.kind if kind == torch.bfloat16 else kind)
    if need_columns:
        to_columns = rows.rows.new_zeros(columns.count, columns.width, dtype=torch.float32)
    for panel in iter_panels(rows, columns, launch, square):
        with exact_products():
            if to_rows is not None and square:
                add_product(to_rows[panel.rows], panel.stored, column_rows[panel.columns])
            elif to_rows is not None:
                torch.mm(panel.stored, column_rows, out=to_rows[panel.rows])
            if to_columns is not None:
                add_product(to_columns[panel.columns], panel.stored.T, row_rows[panel.rows])
    return to_rows, to_columns


def panel_type(rows: Operand) -> torch.dtype:
    return torch.bfloat16 if rows.rows.dtype == torch.bfloat16 else torch.float32


def iter_panels(rows: Operand, columns: Operand, launch: PanelLauncher, square: bool = False) -> Iterator[Panel]:
    """Yield each panel, whose tiles are stored; all have the same memory. A panel that is not `square` has all columns.

    A product with a panel is fast if neither of its sides is short.
    """
    shape, kind = shape_of("tiles", rows.rows)[0], panel_type(rows)
    width = even_panels(columns.count, PANEL_SIDE, shape.columns) if square else columns.count
    stride = ceil_div(width, 8) * 8
    most = PANEL_SIDE if square else max(1, PANEL_BYTES // (stride * kind.itemsize * shape.rows)) * shape.rows
    height = even_panels(rows.count, most, shape.rows)
    memory = rows.rows.new_empty(height, stride, dtype=kind)
    for first in range(0, rows.count, height):
        end = min(first + height, rows.count)
        for first_column in range(0, columns.count, width):
            end_column = min(first_column + width, columns.count)
            stored = memory[: end - first, : end_column - first_column]
            panel = Panel(slice(first, end), slice(first_column, end_column), stored)
            launch(panel)
            yield panel


def triton_two_way_forward(
    queries: Tensor, keys: Tensor, query_ids: Tensor | None, key_ids: Tensor | None, scale: Tensor, with_mean: bool,
    number: float | None, unit: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return lse and mean of the rows [M] and of the columns [K]; empty means if they are not wanted.

    `number` is the scale if the host knows it.
    """
    rows, columns = Operand(queries, query_ids), Operand(keys, key_ids)
    guard, scales = guard_of(rows, columns, scale, number, unit)
    sides = []
    for side in (rows, columns):
        lse = queries.new_empty(1, side.count, dtype=torch.float32)
        sides.append((lse, torch.empty_like(lse) if with_mean else lse.new_empty(1, 0)))
    for bounded in guard.variants:
        # Atomic sums have no fixed order, so a program that needs deterministic bits computes each side by itself.
        if bounded and not torch.are_deterministic_algorithms_enabled():
            launch_both(rows, columns, guard, scales, *sides)
        else:
            launch_rows(rows, columns, guard, scales, *sides[0], bounded)
            launch_rows(columns, rows, guard, scales, *sides[1], bounded)
    (lse, mean), (column_lse, column_mean) = sides
    return lse[0], mean[0], column_lse[0], column_mean[0]


def triton_two_way_backward(
    grads: Sequence[Tensor | None], outputs: Sequence[Tensor],
    queries: Tensor, keys: Tensor, query_ids: Tensor | None, key_ids: Tensor | None, scale: Tensor,
    detach_weights: bool, need_queries: bool, need_keys: bool, need_scale: bool,
    number: float | None, unit: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    r"""Return the gradients of queries, keys and scale.

    With G = d loss / d s, sum_ij G_ij s_ij = <q, dq> = a da + sum_i g_mean mean_i, over rows and columns, gives da.
    """
    rows, columns = Operand(queries, query_ids), Operand(keys, key_ids)
    guard, scales = guard_of(rows, columns, scale, number, unit)
    terms: list[RowTerms | None] = []
    for n in (0, 2):
        grad_lse, grad_mean = (None if grad is None else grad[None].contiguous() for grad in grads[n : n + 2])
        grad_mean = grad_mean if outputs[n + 1].numel() else None
        missing = grad_lse is None and grad_mean is None
        lse, mean = outputs[n][None], outputs[n + 1][None]
        terms.append(
            None if missing else launch_coefficients(grad_lse, grad_mean, lse, mean, guard, scales, detach_weights)
        )
    row_terms, column_terms = terms
    if row_terms is not None and column_terms is not None and row_terms.with_beta != column_terms.with_beta:
        row_terms, column_terms = (with_beta(side) for side in (row_terms, column_terms))
    launch = launch_gradient_tiles(rows, columns, (row_terms, column_terms), guard, scales)
    to_queries, to_keys = multiply_panels(rows, columns, launch, need_queries or need_scale, need_keys)
    to_scale = None
    if need_scale:
        assert to_queries is not None
        to_scale = (queries.float() * to_queries).sum()
        for grad, mean in ((grads[1], outputs[1]), (grads[3], outputs[3])):
            if grad is not None and mean.numel():
                to_scale = to_scale - (grad * mean).sum()
        to_scale = to_scale / scale
    return cast(to_queries if need_queries else None, queries), cast(to_keys, keys), to_scale


def guard_of(
    rows: Operand, columns: Operand, scale: Tensor, number: float | None, unit: bool
) -> tuple[Guard, list[float]]:
    """Return the guard and the scales of a launch: the number, or 1 if only the device knows the scale."""
    if number is not None:
        return Guard(rows, columns, [number], unit), [number]
    return Guard(rows, columns, [1.0], unit, scale=scale), [1.0]


def with_beta(terms: RowTerms) -> RowTerms:
    """Return coefficients with an explicit beta."""
    return terms if terms.with_beta else RowTerms(terms.alpha, torch.zeros_like(terms.alpha), terms.shift, True)


def even_panels(rows: int, height: int, block: int) -> int:
    """Return the height of the fewest panels of about equal height, a multiple of the block."""
    panels = ceil_div(rows, height)
    return min(height, ceil_div(ceil_div(rows, panels), block) * block)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b to the total, in float32."""
    if a.dtype == torch.float32 or not a.is_cuda:
        total.addmm_(a.float(), b.float())
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a b in float32."""
    if a.dtype == torch.float32 or not a.is_cuda:
        return a.float() @ b.float()
    return torch.mm(a, b, out_dtype=torch.float32)


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Multiply float32 matrices in float32, also in a program that allows tf32, and under autocast."""
    settings = torch.backends.cuda.matmul
    before, device = settings.fp32_precision, "cpu" if INTERPRETED else "cuda"
    casting = torch.is_autocast_enabled(device)
    with torch.autocast(device, enabled=False) if casting else contextlib.nullcontext():
        if before == "ieee":
            yield
            return
        settings.fp32_precision = "ieee"
        try:
            yield
        finally:
            settings.fp32_precision = before
