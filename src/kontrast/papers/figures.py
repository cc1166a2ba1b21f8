"""A table's figures: curves by epoch, histograms, accuracy over what a group of cells sweeps (bits, batch sizes, λ)."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from typing import Any

from kontrast.papers.line_chart import Line, line_chart
from kontrast.papers.tables import Table, TableCell

Record = dict[str, Any]
Runs = Callable[[TableCell], list[Record]]  # the finished runs of a cell
FEWEST = 2
"""Points that make a line: fewer say nothing that the table does not."""
HISTOGRAMS = {"cosine_histogram": "cosine of views", "variance_histogram": "variance of views"}


def figures(table: Table, runs: Runs, curves: dict[str, tuple[str, float, str]]) -> dict[str, str]:
    """File names and SVG of what there is to draw. curves: title, factor and format by name, as the table has them."""
    found = {}
    for name, (title, factor, _) in curves.items():
        lines = [curve_line(table, cell, runs(cell), name, factor) for cell in table.run_cells]
        drawn = [line for line in lines if len(line.points) >= FEWEST]
        if drawn:
            found[f"{table.name}-{name}.svg"] = line_chart(title, "epoch", drawn, "%" if factor == 100 else "")
    for name, measured in HISTOGRAMS.items():
        lines = [line for line in histogram_lines(table, runs, name) if line.points]
        if lines:
            title = f"Density of the {measured} over images, first seed"
            found[f"{table.name}-{name.removesuffix('_histogram')}.svg"] = line_chart(title, measured, lines)
    for swept, lines in sweeps(table, runs).items():
        beside = "; dashed: under `paper` in the table" if any(line.beside for line in lines) else ""
        name = f"{table.name}-{re.sub(r'[^a-z]+', '', swept.lower()) or 'sweep'}.svg"
        found[name] = line_chart(f"Accuracy by {swept}, {table.probes[0]}{beside}", swept, lines, "%", exact=True)
    return found


def curve_line(table: Table, cell: TableCell, runs: list[Record], curve: str, factor: float) -> Line:
    """The first seed's curve."""
    measured: list[tuple[float, float]] = next((run["curves"][curve] for run in runs if run["curves"].get(curve)), [])
    return Line(full_label(table, cell), [(epoch, factor * value) for epoch, value in measured])


def histogram_lines(table: Table, runs: Runs, name: str) -> list[Line]:
    """Of the first group alone: more lines would hide each other. Shares over the width of their bins, since each run
    has bins of its own."""
    first = next(iter(table.groups))
    lines = []
    for cell in table.cells:
        if cell.group == first:
            points = curve_line(table, cell, runs(cell), name, 1.0).points
            width = points[1][0] - points[0][0] if len(points) >= FEWEST else 1.0
            lines.append(Line(cell.label, [(middle, share / width) for middle, share in points]))
    return lines


def full_label(table: Table, cell: TableCell) -> str:
    alone = len(table.groups) == 1
    return cell.label if alone else f"{table.groups[cell.group]}: {cell.label}"


def sweeps(table: Table, runs: Runs) -> dict[str, list[Line]]:
    """By what is swept, a line for each group whose labels differ in one number alone."""
    found: dict[str, list[Line]] = {}
    for group, title in table.groups.items():
        cells = [cell for cell in table.cells if cell.group == group]
        places = [re.fullmatch(r"(\D*?)\s*(\d+(?:\.\d+)?)\s*(\D*)", cell.label) for cell in cells]
        words = {f"{place[1]} {place[3]}".strip(" =") for place in places if place}
        if len(words) != 1 or not all(places):
            continue
        at = [float(place[2]) for place in places if place]
        ours = [(x, accuracy(runs(cell), table.probes[0])) for x, cell in zip(at, cells)]
        line = Line(
            title,
            sorted((x, y) for x, y in ours if y is not None),
            sorted((x, cell.paper) for x, cell in zip(at, cells) if cell.paper is not None),
        )
        if len(line.points) >= FEWEST:
            found.setdefault(words.pop(), []).append(line)
    return found


def accuracy(runs: list[Record], probe: str) -> float | None:
    """The mean over seeds, in percent."""
    values = [run["probes"][probe]["accuracy"] for run in runs if probe in run["probes"]]
    return 100 * statistics.fmean(values) if values else None
