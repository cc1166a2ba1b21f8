"""Adds runs to results/TABLE.json, and writes the pages that are made from it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kontrast.errors import UsageError
from kontrast.files import disk_faults, read_json, take_lock, write_json
from kontrast.papers.result_pages import make_pages, write_pages
from kontrast.papers.results_file import Record, check_results, read_results, results_path, set_run
from kontrast.papers.tables import Table, TableCell


def add_runs(out: Path, table: Table, runs: Sequence[tuple[TableCell, Record, Record]]) -> None:
    """Add or replace the records of single seeds, and write the pages; an error leaves all files as they were.

    A lock lets one process at a time do this, since several may add to the same file.

    Args:
        out: the results folder.
        table: the table.
        runs: for each record its cell, the cell's `changed`, `settings` and `data`, and the record itself.
    """
    with disk_faults(out):
        out.mkdir(parents=True, exist_ok=True)
        lock = take_lock(out)
    try:
        path, tree = results_path(out, table), read_results(out, table)
        for cell, facts, run in runs:
            set_run(tree, path, cell, facts, run)
        order = {c.name: place for place, c in enumerate(table.cells)}
        tree["cells"].sort(key=lambda c: (order.get(c["cell"], len(order)), len(c["changed"]), str(c["changed"])))
        pages = make_pages(table, tree)
        write_json(path, tree)
        write_pages(out, pages)
    finally:
        os.close(lock)


def merge_results(out: Path, table: Table, path: Path) -> int:
    """Add the runs of another results file, for example from another machine, and return how many there were."""
    known, tree = {cell.name: cell for cell in table.run_cells}, check_results(read_json(path), path)
    entries = tree["cells"]
    other = [entry["cell"] for entry in entries if entry["cell"] not in known]
    if tree.get("table") != table.name or other:
        details = f"its table is {tree.get('table')!r}, its unknown cells: {', '.join(other) or 'none'}"
        raise UsageError(f"{path} is not a results file of {table.name}: {details}")
    runs = [(known[entry["cell"]], entry, run) for entry in entries for run in entry["runs"]]
    add_runs(out, table, runs)
    return len(runs)
