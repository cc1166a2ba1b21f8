"""Read the tables of transfer.json and find the pictures beside it."""

from __future__ import annotations

from typing import Any

from kontrast.reports.run_files import ReportedRun, read_bytes, shorten

MOST_ROWS = 1000
PICTURE_NOTE = "Test images with what the detector on the trained encoder found; the real boxes are dotted."


def transfer_sections(run: ReportedRun) -> list[dict[str, Any]]:
    """Return the tables of a run's transfers, each with the content of its picture, which may be empty."""
    sections = []
    for table in filter(is_table, run.transfer):
        task = str(table.get("task", ""))
        picture = read_bytes(run.path / f"transfer-{task}.png") if task.isalpha() else b""
        rows = [list(map(shorten, row)) for row in table["rows"][:MOST_ROWS]]
        columns, note = list(map(shorten, table["columns"])), shorten(table.get("note", ""))
        texts = {"title": shorten(table.get("title", "")), "note": note, "columns": columns, "rows": rows}
        sections.append({**texts, "picture": picture, "picture_note": PICTURE_NOTE})
    return sections


def is_table(table: Any) -> bool:
    """Whether an entry of transfer.json can be shown."""
    columns, rows = (table.get(key) for key in ("columns", "rows")) if isinstance(table, dict) else (None, None)
    return (
        isinstance(columns, list)
        and isinstance(rows, list)
        and all(isinstance(row, list) and len(row) == len(columns) > 0 for row in rows)
    )
