"""Draws a table's figures: curves by epoch, histograms, and accuracy against what a group of cells sweeps."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable

from kontrast.lens.measures import BATCH
from kontrast.papers.line_chart import Line, line_chart
from kontrast.papers.results_file import Record, metric_values
from kontrast.papers.tables import Table, TableCell

Runs = Callable[[TableCell], list[Record]]  # the finished runs of a cell
MIN_POINTS = 2  # a single point shows nothing that the table does not
HISTOGRAMS = {"cosine_histogram": "cosine of views", "variance_histogram": "variance of views",
              "projection_histogram": "first random projection"}  # fmt: skip


def draw_figures(table: Table, runs: Runs, curves: dict[str, tuple[str, float, str]]) -> dict[str, str]:
    """File names and SVG texts of all figures. curves: title, factor and format by name of the curve."""
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
        lines = [line for line in histogram_lines(table, runs, name) if line.points]
        if lines:
            title = f"Density of the {measured} over images, first seed"
            figures[f"{table.name}-{name.removesuffix('_histogram')}.svg"] = line_chart(title, measured, lines)
    for swept, lines in sweep_lines(table, runs).items():
        dashed = "; dashed: the numbers under `paper`" if any(line.reference for line in lines) else ""
        name = f"{table.name}-{re.sub(r'[^a-z]+', '', swept.lower()) or 'sweep'}.svg"
        title, unit = (f"Accuracy by {swept}, {table.main}", "%") if table.probes else (f"{table.main} by {swept}", "")
        figures[name] = line_chart(f"{title}{dashed}", swept, lines, unit, exact=True)
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


def histogram_lines(table: Table, runs: Runs, name: str) -> list[Line]:
    """Densities of the first group only, since more lines would hide each other.

    Shares are divided by the width of the bins, which differs between runs.
    """
    first = next(iter(table.groups))
    lines = []
    for cell in table.cells:
        if cell.group == first:
            points = curve_line(table, cell, runs(cell), name, 1.0).points
            width = points[1][0] - points[0][0] if len(points) >= MIN_POINTS else 1.0
            lines.append(Line(cell.label, [(middle, share / width) for middle, share in points]))
    return lines


def full_label(table: Table, cell: TableCell) -> str:
    return cell.label if len(table.groups) == 1 else f"{table.groups[cell.group]}: {cell.label}"


def sweep_lines(table: Table, runs: Runs) -> dict[str, list[Line]]:
    """Lines by the name of the swept setting: one per group whose labels differ only in a number."""
    found: dict[str, list[Line]] = {}
    for group, title in table.groups.items():
        cells = [cell for cell in table.cells if cell.group == group]
        matches = [re.fullmatch(r"(\D*?)\s*(\d+(?:\.\d+)?)\s*(\D*)", cell.label) for cell in cells]
        names = {f"{match[1]} {match[3]}".strip(" =") for match in matches if match}
        if len(names) != 1 or not all(matches):
            continue
        values = [float(match[2]) for match in matches if match]
        measured = [(x, metric_values(runs(cell), table.main)) for x, cell in zip(values, cells)]
        factor = 100 if table.probes else 1
        ours = sorted((x, factor * statistics.fmean(accuracies)) for x, accuracies in measured if accuracies)
        paper = sorted((x, cell.paper) for x, cell in zip(values, cells) if cell.paper is not None)
        line = Line(title, ours, paper)
        if len(line.points) >= MIN_POINTS:
            found.setdefault(names.pop(), []).append(line)
    return found
