"""The form of a results file (results/TABLE.json), and what is said of a file that has another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kontrast.errors import CheckpointError, UsageError
from kontrast.studies.schema import ANY, COUNT, NUMBER, POINT, SHARE, TEXT, WHOLE, fault

VERSION = 1
PROBE = {"accuracy": SHARE, "low": NUMBER, "high": NUMBER, "n": COUNT}
RUN = {
    "seed": WHOLE, "kontrast": TEXT, "torch": TEXT, "device": TEXT, "precision": TEXT, "seconds": NUMBER,
    "epochs": NUMBER, "at_once": WHOLE, "probes": {ANY: PROBE}, "numbers": {ANY: NUMBER}, "errors?": {ANY: NUMBER},
    "curves": {ANY: [POINT]},
}  # fmt: skip
FAILED_RUN = {"seed": WHOLE, "failed": TEXT}
CELL = {"cell": TEXT, "changed": {}, "settings": {}, "data": TEXT, "runs": [{}]}


def checked(tree: Any, path: Path, remedy: str) -> dict[str, Any]:
    """The tree of a results file, which has all that the table needs; one that lacks something is refused whole."""
    wrong = fault(tree, {"version": WHOLE, "cells": [{}]})
    if not wrong and tree["version"] > VERSION:
        raise UsageError(f"{path} was written by a newer kontrast: upgrade, or {remedy}")
    wrong = wrong or next((text for text in map(cell_fault, tree["cells"]) if text), "")
    if wrong:
        raise CheckpointError(f"{path} is damaged, or no results file: {wrong}; restore it, or {remedy}")
    return tree


def cell_fault(entry: dict[str, Any]) -> str:
    """What is wrong with a stored cell, or the first of its runs that something is wrong with."""
    named, wrong = f"cell {entry.get('cell')!r}", fault(entry, CELL)
    if wrong:
        return f"{named}: {wrong}"
    for run in entry["runs"]:
        wrong = fault(run, FAILED_RUN if "failed" in run else RUN)
        if wrong:
            return f"{named}, seed {run.get('seed')}: {wrong}"
    return ""
