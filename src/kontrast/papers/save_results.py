"""Adds runs to results/TABLE.json, and writes the pages that are made from it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from kontrast.errors import UsageError
from kontrast.files import disk_faults, read_json, take_lock, write_json
from kontrast.papers.result_pages import make_pages, write_pages
from kontrast.papers.results_file import (
    Record,
    check_results,
    find_entry,
    read_results,
    refuse_other_settings,
    results_path,
)
from kontrast.papers.tables import Table, TableCell


@contextlib.contextmanager
def update_results(out: Path, table: Table) -> Iterator[Record]:
    """Yield the stored results to change, then write them and their pages; an error leaves all files as they were.

    A lock lets one process at a time do this, since several may add to the same file.
    """
    with disk_faults(out):
        out.mkdir(parents=True, exist_ok=True)
        lock = take_lock(out)
    try:
        tree = read_results(out, table)
        yield tree
        order = {c.name: place for place, c in enumerate(table.cells)}
        tree["cells"].sort(key=lambda c: (order.get(c["cell"], len(order)), len(c["changed"]), str(c["changed"])))
        pages = make_pages(table, tree)
        write_json(results_path(out, table), tree)
        write_pages(out, pages)
    finally:
        os.close(lock)


def set_run(tree: Record, path: Path, cell: TableCell, facts: Record, run: Record) -> None:
    """Add or replace one seed's record. facts: the entry's `changed`, `settings` and `data`."""
    entry = find_entry(tree, cell, facts["changed"])
    if entry is None:
        described = {key: facts[key] for key in ("changed", "data", "settings")}
        entry = {"cell": cell.name, "recipe": cell.recipe, **described, "runs": []}
        tree["cells"].append(entry)
    refuse_other_settings(path, entry, facts["settings"], facts["data"])
    others = [r for r in entry["runs"] if r["seed"] != run["seed"]]
    entry["runs"] = sorted([*others, run], key=lambda r: r["seed"])


def add_run(out: Path, table: Table, cell: TableCell, facts: Record, run: Record) -> None:
    """Store one seed's record. facts: the cell's `changed`, `settings` and `data`."""
    with update_results(out, table) as tree:
        set_run(tree, results_path(out, table), cell, facts, run)


def merge_results(out: Path, table: Table, path: Path) -> int:
    """Add the runs of another results file, for example from another machine, and return how many there were."""
    known, tree = {cell.name: cell for cell in table.run_cells}, check_results(read_json(path), path)
    entries = tree["cells"]
    other = [entry["cell"] for entry in entries if entry["cell"] not in known]
    if tree.get("table") != table.name or other:
        raise UsageError(f"{path} is not a results file of {table.name}: it is of {tree.get('table')!r} {other or ''}")
    with update_results(out, table) as own:
        for entry in entries:
            for run in entry["runs"]:
                set_run(own, results_path(out, table), known[entry["cell"]], entry, run)
    return sum(len(entry["runs"]) for entry in entries)
