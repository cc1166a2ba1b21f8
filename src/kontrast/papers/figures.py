"""Draws a table's figures: curves by epoch, histograms, and numbers against what a group of cells sweeps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from kontrast.lens.measures import BATCH
from kontrast.papers.line_chart import Line, line_chart
from kontrast.papers.results_file import Record, metric_values
from kontrast.papers.tables import Table, TableCell, file_word, sweeps

Runs = Callable[[TableCell], list[Record]]  # the finished runs of a cell
MIN_POINTS = 2  # a single point shows nothing that the table does not
HISTOGRAMS = {"cosine_histogram": "cosine of views", "variance_histogram": "variance of views",
              "projection_histogram": "first random projection"}  # fmt: skip


def draw_figures(
    table: Table, runs: Runs, curves: dict[str, tuple[str, float, str]], numbers: dict[str, tuple[str, float, str]]
) -> dict[str, str]:
    """File names and SVG texts of all figures. curves, numbers: title, factor and format by name."""
    figures: dict[str, str] = {}
    for name, (title, factor, _) in curves.items():
        if name.startswith("conditional_entropy"):
            figures |= entropy_figures(table, runs, name, title)
            continue
        lines = [curve_line(table, cell, runs(cell), name, factor) for cell in table.run_cells]
        drawn = [line for line in lines if len(line.points) >= MIN_POINTS]
        if drawn:
            figures[f"{table.name}-{name}.svg"] = line_chart(title, "epoch", drawn, "%" if factor == 100 else "")
    for name, measured in HISTOGRAMS.items():
        figures |= histogram_figures(table, runs, name, measured)
    if table.probes:
        figures |= sweep_figures(table, runs, table.main, "Accuracy", 100.0)
    for name, (title, factor, _) in numbers.items():
        figures |= sweep_figures(table, runs, name, title, factor)
    return figures


def entropy_figures(table: Table, runs: Runs, curve: str, title: str) -> dict[str, str]:
    """One figure per group, since its methods are compared on the same images, with the largest possible entropy."""
    figures = {}
    for group, name in table.groups.items():
        lines = [
            Line(cell.label, curve_line(table, cell, runs(cell), curve, 1.0).points)
            for cell in table.cells
            if cell.group == group
        ]
        drawn = [line for line in lines if len(line.points) >= MIN_POINTS]
        if drawn:
            epochs = [epoch for line in drawn for epoch, _ in line.points]
            most = math.log(BATCH - 1)
            limit = Line(f"the most that is possible, ln({BATCH - 1})", (), [(min(epochs), most), (max(epochs), most)])
            file = f"{table.name}-{curve.replace('_', '-')}-{group}.svg"
            figures[file] = line_chart(f"{title}: {name}", "epoch", [*drawn, limit])
    return figures


def curve_line(table: Table, cell: TableCell, runs: list[Record], curve: str, factor: float) -> Line:
    """The first seed's curve."""
    measured: list[tuple[float, float]] = next((run["curves"][curve] for run in runs if run["curves"].get(curve)), [])
    return Line(full_label(table, cell), [(epoch, factor * value) for epoch, value in measured])


def histogram_figures(table: Table, runs: Runs, name: str, measured: str) -> dict[str, str]:
    """Densities, one figure per group, since more lines would hide each other; none if all its runs are other groups'.

    Shares are divided by the width of the bins, which differs between runs.
    """
    figures = {}
    for group, title in table.groups.items():
        lines, own = [], False
        for cell in table.cells:
            points = curve_line(table, cell, runs(cell), name, 1.0).points if cell.group == group else ()
            if len(points) >= MIN_POINTS:
                width, own = points[1][0] - points[0][0], own or not cell.same_as
                lines.append(Line(cell.label, [(middle, share / width) for middle, share in points]))
        if own:
            file = f"{table.name}-{name.removesuffix('_histogram')}-{group}.svg"
            figures[file] = line_chart(f"{title}: density of the {measured} over images, first seed", measured, lines)
    return figures


def full_label(table: Table, cell: TableCell) -> str:
    return cell.label if len(table.groups) == 1 else f"{table.groups[cell.group]}: {cell.label}"


def sweep_figures(table: Table, runs: Runs, metric: str, title: str, factor: float) -> dict[str, str]:
    """One figure per swept setting, with a line per group; the paper's numbers are those of the table's main number."""
    figures, is_main = {}, metric == table.main
    for swept, groups in sweeps(table).items():
        lines = []
        for group, cells in groups.items():
            measured = [(x, metric_values(runs(cell), metric)) for x, cell in cells]
            ours = sorted((x, factor * statistics.fmean(values)) for x, values in measured if values)
            paper = sorted((x, cell.paper) for x, cell in cells if is_main and cell.paper is not None)
            if len(ours) >= MIN_POINTS:
                lines.append(Line(table.groups[group], ours, paper))
        if lines:
            file = f"{table.name}-{file_word(swept)}{'' if is_main else '-' + metric.replace('_', '-')}.svg"
            dashed = "; dashed: the numbers under `paper`" if any(line.reference for line in lines) else ""
            probe = f", {table.main}" if metric in table.probes else ""
            text = f"{title[0].upper()}{title[1:]} by {swept}{probe}{dashed}"
            figures[file] = line_chart(text, swept, lines, "%" if factor == 100 else "", exact=True)
    return figures
