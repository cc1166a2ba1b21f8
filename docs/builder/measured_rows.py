"""The numbers that were measured with an objective, picked from the tables in results/."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

from kontrast.papers.result_pages import PROBE_NAMES, interval_text, markdown_row, mean_text
from kontrast.papers.results_file import Record, find_entry, finished_runs, read_results
from kontrast.papers.tables import Table, TableCell, load_table, table_names

MOST = 12
"""Rows per table on the page of an objective; the table itself has all of them."""
HEAD = ["", "paper", "ours", "95% interval", "probe", "data", "epochs", "seeds"]
NOTHING = "It was not measured here yet. [Results](../results/index.md) lists what was."


def measured(name: str, results: Path) -> str:
    """Return tables of what was measured with an objective, in Markdown, or the sentence that nothing was.

    Args:
        name: A registered objective.
        results: The folder with the tables.
    """
    parts = []
    for table, tree in tables(results):
        rows = list(rows_of(name, table, tree))
        if rows:
            parts += [f"[{table.title}](../results/{table.name}.md)", "\n".join(table_of(rows[:MOST]))]
            parts += [f"The table has {len(rows) - MOST} more rows of this objective."] * (len(rows) > MOST)
    return "\n\n".join(parts) or NOTHING


@functools.cache
def tables(results: Path) -> list[tuple[Table, Record]]:
    """Return the tables of which something was measured, with what the results folder has of them."""
    read = [(table, read_results(results, table)) for table in map(load_table, table_names())]
    return [(table, tree) for table, tree in read if tree["cells"]]


def table_of(rows: list[list[str]]) -> list[str]:
    return [markdown_row(HEAD), markdown_row(["---"] * len(HEAD)), *map(markdown_row, rows)]


def rows_of(name: str, table: Table, tree: Record) -> Iterator[list[str]]:
    """Yield the rows of the cells that were trained with this objective and finished."""
    for cell in table.run_cells:
        entry = find_entry(tree, cell, {})
        runs = finished_runs(entry)
        if entry and runs and not cell.learner and entry["settings"].get("objective.name", "nt-xent") == name:
            probe = table.probes[0]
            facts = [mean_text(runs, probe, 100, ".2f"), interval_text(runs, probe), PROBE_NAMES.get(probe, probe)]
            epochs = " / ".join(dict.fromkeys(f"{run['epochs']:g}" for run in runs))
            yield [*paper_of(table, cell), *facts, entry["data"], epochs, str(len(runs))]


def paper_of(table: Table, cell: TableCell) -> list[str]:
    label = f"{table.groups[cell.group]}: {cell.label}"
    return [label, "" if cell.paper is None else f"{cell.paper:g} ({cell.where})"]
