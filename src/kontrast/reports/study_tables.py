"""comparison.json and audit.json to what leads the page: a sentence, tables of text, and plots in curves.py's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kontrast.reports.curves import is_plot
from kontrast.reports.run_files import NEWEST, ReportError, plain, shorten


def read_study(path: Path) -> dict[str, Any]:
    """The study's parts that a page can show; what is not in their form is left out, and `problems` says so."""
    try:
        tree = plain(json.loads(Path(path).read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        raise ReportError(f"{path} can't be read as a comparison or an audit: {error}") from None
    if not isinstance(tree, dict) or not isinstance(tree.get("kind"), str):
        raise ReportError(f"{path} holds neither a comparison nor an audit")
    tables, plots = _listed(tree, "tables"), _listed(tree, "plots")
    problems = [f"{Path(path).name}: table {n} is left out." for n, t in enumerate(tables, 1) if not _is_table(t)]
    problems += [f"{Path(path).name}: plot {n} is left out." for n, p in enumerate(plots, 1) if not is_plot(p)]
    if isinstance(tree.get("version"), int) and tree["version"] > NEWEST:
        problems.append(f"{Path(path).name} was written by a newer kontrast and is shown as far as this one knows it.")
    return {
        "kind": shorten(tree["kind"]),
        "title": shorten(tree.get("title", "")),
        "verdict": str(tree.get("verdict", ""))[:2000],
        "tables": [_text(table) for table in tables if _is_table(table)],
        "plots": [plot for plot in plots if is_plot(plot)],
        "problems": problems,
    }


def _listed(tree: dict[str, Any], key: str) -> list[Any]:
    found = tree.get(key)
    return found if isinstance(found, list) else []


def _is_table(table: Any) -> bool:
    """Columns, and rows as long as they are."""
    try:
        return bool(table["title"]) and all(len(row) == len(table["columns"]) for row in table["rows"])
    except (KeyError, TypeError):
        return False


def _text(table: dict[str, Any]) -> dict[str, Any]:
    return {
        "title": shorten(table["title"]),
        "note": str(table.get("note", ""))[:2000],
        "columns": [shorten(cell) for cell in table["columns"]],
        "rows": [[shorten(cell) for cell in row] for row in table["rows"]],
    }
