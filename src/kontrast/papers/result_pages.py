"""results/TABLE.json and results/TABLE.md: what was measured of a table, gathered over days, machines and processes.

A stored cell: its settings, the data's words and one record for each seed. Cells run with overrides are other cells,
kept apart under `changed`. Nothing is in the file that was not run.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kontrast.config.recipe import Recipe
from kontrast.errors import UsageError
from kontrast.files import disk_faults, read_json, take_lock, write_atomic, write_json
from kontrast.papers.figures import figures
from kontrast.papers.result_records import VERSION, checked
from kontrast.papers.tables import Table, TableCell, settings_of

WORDS = {
    "knn": "kNN",
    "linear": "linear (logistic regression)",
    "cacr": "linear (CACR's protocol)",
    "moco": "linear (MoCo's protocol)",
    "uniclr": "linear (UniCLR's protocol)",
    "simclr": "linear (SimCLR's protocol)",
}
CURVES = {
    "knn": ("kNN by epoch, first seed", 100.0, ".1f"),
    "multiplier": ("Mean multiplier by epoch, first seed", 1.0, ".3f"),
}
NUMBERS = {
    "best_epoch": ("the classifier's best epoch", 100.0, ".2f"),
    "multiplier": ("multiplier", 1.0, ".3f"),
    "positive_cosine": ("cosine of views", 1.0, ".3f"),
    "positive_variance": ("variance of views", 1.0, ".2e"),
}
Record = dict[str, Any]


def stored(out: Path, table: Table) -> Record:
    """What the results folder holds of the table."""
    path = out / f"{table.name}.json"
    if not path.is_file():
        return {"version": VERSION, "table": table.name, "title": table.title, "cells": []}
    return checked(read_json(path), path, "give another --out")


def find(tree: Record, cell: TableCell, changed: Record) -> Record | None:
    """The stored cell of these overrides."""
    return next((c for c in tree["cells"] if c["cell"] == cell.run_as and c["changed"] == changed), None)


def has_seed(tree: Record, cell: TableCell, changed: Record, seed: int) -> bool:
    entry = find(tree, cell, changed)
    return entry is not None and any(run["seed"] == seed for run in entry["runs"])


def refuse_other_settings(path: Path, entry: Record, settings: Record, data: str | None = None) -> None:
    """Runs under one name are runs of one thing: a recipe that changed since makes another cell. A setting that came
    into the program later stands at its default in the older runs."""
    before = {**{k: v for k, v in settings_of(Recipe()).items() if k in settings}, **entry["settings"]}
    keys = [key for key in sorted(before | settings) if before.get(key) != settings.get(key)]
    different = [f"{key} {before.get(key)} -> {settings.get(key)}" for key in keys]
    if data is not None and entry["data"] != data:
        different.append(f"data {entry['data']} -> {data}")
    if different:
        raise UsageError(
            f"{path} has the cell {entry['cell']!r} with other settings ({', '.join(different[:3])}): "
            "give another --out, or take the old cell out of the file"
        )


@contextlib.contextmanager
def changing(out: Path, table: Table) -> Iterator[Record]:
    """What is stored, to be changed; then it and its pages are written. One writer at a time, since several processes
    add to the same file, and nothing is written where something goes wrong on the way."""
    with disk_faults(out):
        out.mkdir(parents=True, exist_ok=True)
        handle = take_lock(out)
    try:
        tree = stored(out, table)
        yield tree
        order = {c.name: place for place, c in enumerate(table.cells)}
        tree["cells"].sort(key=lambda c: (order.get(c["cell"], len(order)), len(c["changed"]), str(c["changed"])))
        made = pages(table, tree)
        write_json(out / f"{table.name}.json", tree)
        write_pages(out, made)
    finally:
        os.close(handle)


def lay(tree: Record, path: Path, cell: TableCell, facts: Record, run: Record) -> None:
    """Lay one seed's record over the stored ones. facts: the cell's `changed`, `settings` and `data`."""
    entry = find(tree, cell, facts["changed"])
    if entry is None:
        entry = {"cell": cell.name, "recipe": cell.recipe, "changed": facts["changed"], "data": facts["data"]}
        entry |= {"settings": facts["settings"], "runs": []}
        tree["cells"].append(entry)
    refuse_other_settings(path, entry, facts["settings"], facts["data"])
    others = [r for r in entry["runs"] if r["seed"] != run["seed"]]
    entry["runs"] = sorted([*others, run], key=lambda r: r["seed"])


def add(out: Path, table: Table, cell: TableCell, changed: Record, settings: Record, data: str, run: Record) -> None:
    """Lay one seed's record over the stored ones and write it and its pages."""
    with changing(out, table) as tree:
        facts = {"changed": changed, "settings": settings, "data": data}
        lay(tree, out / f"{table.name}.json", cell, facts, run)


def merge(out: Path, table: Table, path: Path) -> int:
    """Add what another results file holds of the table, run on another machine, all of it or nothing; how many runs
    it was."""
    if not path.is_file():
        raise UsageError(f"--merge {path}: no such file; give the {table.name}.json of another results folder")
    known, tree = {cell.name: cell for cell in table.run_cells}, read_json(path)
    if not isinstance(tree, dict) or tree.get("table") != table.name:
        raise UsageError(f"{path} is not a results file of {table.name}")
    entries = checked(tree, path, "merge another file")["cells"]
    for entry in entries:
        if entry["cell"] not in known:
            raise UsageError(f"{path} has the cell {entry['cell']!r}, which {table.name} has not")
    with changing(out, table) as own:
        for entry in entries:
            for run in entry["runs"]:
                lay(own, out / f"{table.name}.json", known[entry["cell"]], entry, run)
    return sum(len(entry["runs"]) for entry in entries)


def finished(entry: Record | None) -> list[Record]:
    return [run for run in entry["runs"] if "failed" not in run] if entry else []


def pages(table: Table, tree: Record) -> dict[str, str]:
    """File names and texts for people: TABLE.md and the figures in it."""
    drawn = figures(table, lambda cell: finished(find(tree, cell, {})), CURVES)
    return {f"{table.name}.md": markdown(table, tree, list(drawn)), **drawn}


def write_pages(out: Path, made: dict[str, str]) -> list[Path]:
    for name, text in made.items():
        write_atomic(out / name, text)
    return [out / name for name in made]


def markdown(table: Table, tree: Record, drawn: list[str]) -> str:
    """The table, with figures of these names. A cell that was not run is blank."""
    source = f" from [{table.name}.json]({table.name}.json)" if tree["cells"] else ", of which nothing was run yet"
    command = shlex.join(["kontrast", "reproduce", table.origin or table.name])  # of a table of one's own, its file
    lines = [f"# {table.title}", "", f"Made by `{command}`{source}; not edited by hand.", ""]
    lines += [
        table.about,
        "",
        "Accuracies in percent, of the last epoch. Intervals are 95%: over seeds by Student's t where there are "
        "several, else over the test images.",
        "",
        *(f"![{name}]({name})\n" for name in drawn),
    ]
    for group, title in table.groups.items():
        cells = [(cell, find(tree, cell, {})) for cell in table.cells if cell.group == group]
        lines += [f"## {title}", "", *rows(table, [(cell.label, cell, entry) for cell, entry in cells]), ""]
    tried = [
        (cell, entry)
        for cell in table.cells
        for entry in tree["cells"]
        if entry["cell"] == cell.name and entry["changed"]
    ]
    if tried:
        lines += [
            "## Tried with other settings",
            "",
            *rows(table, [(changed_label(table, c, e), c, e) for c, e in tried]),
            "",
        ]
    for curve, (title, factor, form) in CURVES.items():
        lines += curve_table(table, tree, curve, title, factor, form)
    lines += failures(tree)
    return "\n".join(lines).rstrip() + "\n"


def changed_label(table: Table, cell: TableCell, entry: Record) -> str:
    return f"{table.groups[cell.group]}: {cell.label}; " + ", ".join(f"{k} = {v}" for k, v in entry["changed"].items())


def rows(table: Table, cells: list[tuple[str, TableCell, Record | None]]) -> list[str]:
    measured = [name for name in NUMBERS if any(name in run["numbers"] for _, _, e in cells for run in finished(e))]
    heads = ["", "paper", "where"]
    for number, probe in enumerate(table.probes):
        heads += [f"ours, {WORDS.get(probe, probe)}", "95% interval"] if number == 0 else [WORDS.get(probe, probe)]
    heads += [NUMBERS[name][0] for name in measured] + ["seeds", "epochs", "data", "device", "versions", "time a run"]
    lines = [line(heads), line(["---"] * len(heads))]
    return lines + [line(row(table, measured, *cell)) for cell in cells]


def row(table: Table, measured: list[str], label: str, cell: TableCell, entry: Record | None) -> list[str]:
    paper = [label, "" if cell.paper is None else f"{cell.paper:g}", cell.where]
    done = finished(entry)
    if entry is None or not done:
        return paper + [""] * (len(table.probes) + 1 + len(measured) + 6)
    ours = []
    for number, probe in enumerate(table.probes):
        values = values_of(done, probe)
        ours.append(f"{100 * statistics.fmean(values):.2f}" if values else "")
        if number == 0:
            ours.append(interval_words(done, probe))
    for name in measured:
        found = values_of(done, name)
        _, factor, form = NUMBERS[name]
        ours.append(format(factor * statistics.fmean(found), form) if found else "")
    return [*paper, *ours, *conditions(entry, done)]


def conditions(entry: Record, done: list[Record]) -> list[str]:
    """Seeds, epochs and data as run, device, versions and time."""
    seconds, most = statistics.fmean(run["seconds"] for run in done), max(run["at_once"] for run in done)
    beside = f" ({most} at once)" if most > 1 else ""
    return [
        " ".join(f"{run['seed']}{' (collapsed)' * has_collapsed(run)}" for run in done),
        " / ".join(dict.fromkeys(f"{run['epochs']:g}" for run in done)),
        entry["data"],
        " / ".join(dict.fromkeys(f"{run['device']}, {run['precision']}" for run in done)),
        " / ".join(dict.fromkeys(f"kontrast {run['kontrast']}, torch {run['torch']}" for run in done)),
        (f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s") + beside,
    ]


def has_collapsed(run: Record) -> bool:
    """Whether the features had all but one direction left at the run's last evaluation."""
    from kontrast.training.loop import COLLAPSED

    ranks = run["curves"].get("effective_rank")
    return bool(ranks) and ranks[-1][1] < COLLAPSED


def values_of(runs: list[Record], metric: str) -> list[float]:
    """A probe's accuracy, or a number that was measured, of each run that has it."""
    found = [run["probes"][metric]["accuracy"] for run in runs if metric in run["probes"]]
    return found or [run["numbers"][metric] for run in runs if metric in run["numbers"]]


def interval_words(runs: list[Record], probe: str) -> str:
    from kontrast.probes.intervals import over_seeds

    with_it = [run["probes"][probe] for run in runs if probe in run["probes"]]
    if not with_it:
        return ""
    over = over_seeds([found["accuracy"] for found in with_it])
    low, high = (max(0.0, over[0]), min(1.0, over[1])) if over else (with_it[0]["low"], with_it[0]["high"])
    return f"{100 * low:.2f} to {100 * high:.2f}" + (" (seeds)" if over else " (images)")


def curve_table(table: Table, tree: Record, curve: str, title: str, factor: float, form: str) -> list[str]:
    """The first seed's curve of each cell, at the epochs at which any was measured."""
    found = {}
    for cell in table.run_cells:
        done = [run for run in finished(find(tree, cell, {})) if run["curves"].get(curve)]
        if done:
            found[f"{table.groups[cell.group]}: {cell.label}"] = dict(map(tuple, done[0]["curves"][curve]))
    epochs = sorted({epoch for values in found.values() for epoch in values})
    if len(epochs) < 2:
        return []
    lines = [f"## {title}", "", line(["", *(f"{epoch:g}" for epoch in epochs)]), line(["---"] * (len(epochs) + 1))]
    for name, values in found.items():
        lines.append(line([name, *(format(factor * values[e], form) if e in values else "" for e in epochs)]))
    return [*lines, ""]


def failures(tree: Record) -> list[str]:
    failed = [(c["cell"], c["changed"], run) for c in tree["cells"] for run in c["runs"] if "failed" in run]
    if not failed:
        return []
    lines = [
        f"- {cell}{f' {changed}' if changed else ''}, seed {run['seed']}: {run['failed']}"
        for cell, changed, run in failed
    ]
    return ["## Runs that failed", "", *lines, ""]


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
