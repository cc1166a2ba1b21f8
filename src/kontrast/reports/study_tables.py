"""Read comparison.json and audit.json: the verdict, tables and plots that come first on the page of a study."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kontrast.reports.run_files import ReportError, newer_version, read_bytes, shorten, without_nan


def read_study(path: Path) -> dict[str, Any]:
    """Return what the page shows of a study."""
    try:
        tree = without_nan(json.loads(read_bytes(path)))
        return {
            "kind": tree["kind"],
            "title": shorten(tree.get("title", "")),
            "verdict": tree.get("verdict", ""),
            "tables": [_with_short_cells(table) for table in tree.get("tables", [])],
            "plots": tree.get("plots", []),
            "problems": newer_version(tree, path.name),
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ReportError(f"{path} can't be read as a comparison or an audit: {error!r}") from None


def _with_short_cells(table: dict[str, Any]) -> dict[str, Any]:
    columns, rows = table["columns"], table["rows"]
    short = {"columns": list(map(shorten, columns)), "rows": [list(map(shorten, row)) for row in rows]}
    return {"title": shorten(table["title"]), "note": table.get("note", ""), **short}
