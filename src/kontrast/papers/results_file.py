"""Reads and checks results/TABLE.json, which collects what was measured over days, machines and processes.

An entry has a cell's settings, a description of its data, and one record per seed. Cells run with overrides are entries
of their own, with the changed settings under `changed`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kontrast.config.recipe import Recipe
from kontrast.errors import CheckpointError, UsageError
from kontrast.files import read_json
from kontrast.papers.tables import Table, TableCell, relevant_settings
from kontrast.studies.schema import ANY, find_mismatch

VERSION = 1
PROBE_SCHEMA = {"accuracy": float, "low": float, "high": float, "n": int}
RUN_SCHEMA = {
    "seed": int, "kontrast": str, "torch": str, "device": str, "precision": str, "seconds": float, "epochs": float,
    "at_once": int, "probes": {ANY: PROBE_SCHEMA}, "numbers": {ANY: float}, "errors?": {ANY: float},
    "curves": {ANY: [[float]]},
}  # fmt: skip
FAILED_SCHEMA = {"seed": int, "failed": str}
ENTRY_SCHEMA = {"cell": str, "changed": {}, "settings": {}, "data": str, "runs": [{}]}
Record = dict[str, Any]


def results_path(out: Path, table: Table) -> Path:
    return out / f"{table.name}.json"


def read_results(out: Path, table: Table) -> Record:
    """What the results folder has of the table; a tree without cells if there is no file yet."""
    path = results_path(out, table)
    if not path.is_file():
        return {"version": VERSION, "table": table.name, "title": table.title, "cells": []}
    return check_results(read_json(path), path)


def check_results(tree: Any, path: Path) -> Record:
    """Refuse the file if anything that the pages need is missing or damaged."""
    mismatch = find_mismatch(tree, {"version": int, "cells": [{}]})
    if not mismatch and tree["version"] > VERSION:
        raise UsageError(f"{path} was written by a newer kontrast: upgrade, or use another results folder")
    mismatch = mismatch or next((text for text in map(find_entry_mismatch, tree["cells"]) if text), "")
    if mismatch:
        raise CheckpointError(f"{path} is damaged or not a results file ({mismatch}): restore it or use another file")
    return tree


def find_entry_mismatch(entry: Record) -> str:
    name, mismatch = f"cell {entry.get('cell')!r}", find_mismatch(entry, ENTRY_SCHEMA)
    if mismatch:
        return f"{name}: {mismatch}"
    for run in entry["runs"]:
        mismatch = find_mismatch(run, FAILED_SCHEMA if "failed" in run else RUN_SCHEMA)
        if mismatch:
            return f"{name}, seed {run.get('seed')}: {mismatch}"
    return ""


def find_entry(tree: Record, cell: TableCell, changed: Record) -> Record | None:
    """The entry of a cell with these changed settings."""
    return next((e for e in tree["cells"] if e["cell"] == cell.run_as and e["changed"] == changed), None)


def finished_runs(entry: Record | None) -> list[Record]:
    return [run for run in entry["runs"] if "failed" not in run] if entry else []


def metric_values(runs: list[Record], metric: str) -> list[float]:
    """A probe's accuracy, or another measured number, for each run that has it."""
    found = [run["probes"][metric]["accuracy"] for run in runs if metric in run["probes"]]
    return found or [run["numbers"][metric] for run in runs if metric in run["numbers"]]


def refuse_other_settings(path: Path, entry: Record, settings: Record, data: str | None = None) -> None:
    """Refuse to add runs with other settings or data to an entry.

    A setting that was introduced after the entry was written had its default value.
    """
    before = {**{k: v for k, v in relevant_settings(Recipe()).items() if k in settings}, **entry["settings"]}
    keys = [key for key in sorted(before | settings) if before.get(key) != settings.get(key)]
    different = [f"{key} {before.get(key)} -> {settings.get(key)}" for key in keys]
    if data is not None and entry["data"] != data:
        different.append(f"data {entry['data']} -> {data}")
    if different:
        raise UsageError(
            f"{path} has the cell {entry['cell']!r} with other settings ({', '.join(different[:3])}): "
            "give another --out, or delete the old cell from the file"
        )
