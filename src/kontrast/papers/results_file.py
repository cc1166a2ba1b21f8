"""Reads and checks results/TABLE.json, which collects what was measured over days, machines and processes.

An entry has a cell's settings, a description of its data, and one record per seed. Cells run with overrides are entries
of their own, with the changed settings under `changed`.
"""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import Any

from kontrast.config.recipe import BankSettings, PrototypeSettings, Recipe, TeacherSettings, TextSettings
from kontrast.errors import CheckpointError, UsageError
from kontrast.files import read_json
from kontrast.papers.tables import IRRELEVANT_SETTINGS, Table, TableCell, differing_keys, relevant_settings

VERSION = 1
SECTIONS: dict[str, Any] = {
    "teacher": TeacherSettings, "bank": BankSettings, "prototypes": PrototypeSettings, "text": TextSettings,
}  # fmt: skip
"""Sections that not every recipe has."""
ENTRY_KEYS = ("cell", "changed", "settings", "data", "runs")
RUN_KEYS = (
    "seed",
    "kontrast",
    "torch",
    "device",
    "precision",
    "seconds",
    "epochs",
    "at_once",
    "probes",
    "numbers",
    "curves",
)
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
    """Refuse a file of a newer version, or one that lacks something that the pages need."""
    try:
        newer = tree["version"] > VERSION
        for entry in tree["cells"]:
            itemgetter(*ENTRY_KEYS)(entry)
            for run in entry["runs"]:
                itemgetter(*(("seed", "failed") if "failed" in run else RUN_KEYS))(run)
                if "step_milliseconds" in run.get("numbers", {}):  # the name of version 0.2.0
                    run["numbers"]["step_time"] = run["numbers"].pop("step_milliseconds")
    except (KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path} is damaged or not a results file ({problem}): restore it") from None
    if newer:
        raise UsageError(f"{path} was written by a newer kontrast: upgrade, or use another results folder")
    return tree


def find_entry(tree: Record, cell: TableCell, changed: Record) -> Record | None:
    """The entry of a cell with these changed settings."""
    return next((e for e in tree["cells"] if e["cell"] == cell.run_as and e["changed"] == changed), None)


def finished_runs(entry: Record | None) -> list[Record]:
    return [run for run in entry["runs"] if "failed" not in run] if entry else []


def metric_values(runs: list[Record], metric: str) -> list[float]:
    """A probe's accuracy, another measured number, the end of a curve over epochs or the seconds of training, for each
    run that has it."""
    if metric == "seconds":
        return [run["seconds"] for run in runs]
    found = [run["probes"][metric]["accuracy"] for run in runs if metric in run["probes"]]
    found = found or [run["numbers"][metric] for run in runs if metric in run["numbers"]]
    return found or [run["curves"][metric][-1][1] for run in runs if run["curves"].get(metric)]


def refuse_other_settings(path: Path, entry: Record, settings: Record, data: str | None = None) -> None:
    """Refuse to add runs with other settings or data to an entry.

    A setting that was introduced after the entry was written had its default value, and one that doesn't change the
    result may have been removed.
    """
    stored = {k: v for k, v in entry["settings"].items() if not k.startswith(IRRELEVANT_SETTINGS)}
    sections = {key.partition(".")[0] for key in stored}
    usual = Recipe(**{name: kind() for name, kind in SECTIONS.items() if name in sections})
    before = {**{k: v for k, v in relevant_settings(usual).items() if k in settings}, **stored}
    after = {**settings, "data": entry["data"] if data is None else data}
    before["data"] = entry["data"]
    different = [f"{key} {before.get(key)} -> {after.get(key)}" for key in differing_keys(before, after)]
    if different:
        raise UsageError(
            f"{path} has the cell {entry['cell']!r} with other settings ({', '.join(different[:3])}): "
            "give another --out, or delete the old cell from the file"
        )


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
