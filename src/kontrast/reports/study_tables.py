"""Read comparison.json and audit.json: the verdict, tables and plots that come first on the page of a study."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kontrast.reports.curves import is_plot
from kontrast.reports.run_files import ReportError, newer_version, shorten, without_nan


def read_study(path: Path) -> dict[str, Any]:
    """Return what the page can show of a study; `problems` names the tables and plots that it can't."""
    try:
        tree = without_nan(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        raise ReportError(f"{path} can't be read as a comparison or an audit: {error}") from None
    if not isinstance(tree, dict) or not isinstance(tree.get("kind"), str):
        raise ReportError(f"{path} contains neither a comparison nor an audit")
    tables, plots = _list(tree, "tables"), _list(tree, "plots")
    damaged = [f"table {n}" for n, table in enumerate(tables, 1) if not _is_table(table)]
    damaged += [f"plot {n}" for n, plot in enumerate(plots, 1) if not is_plot(plot)]
    problems = [f"{path.name}: {part} is damaged and not shown." for part in damaged]
    return {
        "kind": shorten(tree["kind"]),
        "title": shorten(tree.get("title", "")),
        "verdict": str(tree.get("verdict", ""))[:2000],
        "tables": [_with_short_cells(table) for table in tables if _is_table(table)],
        "plots": [plot for plot in plots if is_plot(plot)],
        "problems": problems + newer_version(tree, path.name),
    }


def _list(tree: dict[str, Any], key: str) -> list[Any]:
    value = tree.get(key)
    return value if isinstance(value, list) else []


def _is_table(table: Any) -> bool:
    """Whether it has a title, and one cell per column in every row."""
    try:
        return bool(table["title"]) and all(len(row) == len(table["columns"]) for row in table["rows"])
    except (KeyError, TypeError):
        return False


def _with_short_cells(table: dict[str, Any]) -> dict[str, Any]:
    return {
        "title": shorten(table["title"]),
        "note": str(table.get("note", ""))[:2000],
        "columns": [shorten(cell) for cell in table["columns"]],
        "rows": [[shorten(cell) for cell in row] for row in table["rows"]],
    }
