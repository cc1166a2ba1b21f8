"""The accuracies of the papers' tables in short, from results/, so that nobody types a number."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kontrast.config.recipe import parse_toml
from kontrast.config.recipe_files import recipe_text
from kontrast.errors import UsageError
from kontrast.papers.result_pages import main_text, markdown_row
from kontrast.papers.results_file import find_entry, finished_runs, read_results
from kontrast.papers.tables import ITEMS, load_table

NAME = re.compile(r"\{([\w.-]+)\}")


def highlights_table(out: Path) -> str:
    """The table for a results folder; a part of a row without runs is left out."""
    rows = [row for one in parse_toml(recipe_text(ITEMS), ITEMS.name)["highlights"] if (row := highlight_row(one, out))]
    return "\n".join([markdown_row(["table", "accuracy"]), markdown_row(["---", "---"]), *map(markdown_row, rows)])


def highlight_row(highlight: dict[str, Any], out: Path) -> list[str]:
    """The two columns of a row; empty if none of its cells was run."""
    table = load_table(highlight["table"])
    tree, cells = read_results(out, table), {cell.name: cell for cell in table.cells}
    runs = {}
    for name in NAME.findall(highlight["text"]):
        if name not in cells:
            raise UsageError(f"{ITEMS.name}: {table.name} has no cell {name!r}")
        runs[name] = finished_runs(find_entry(tree, cells[name], {}))
    parts = [part for part in highlight["text"].split("; ") if any(runs[name] for name in NAME.findall(part))]
    if not parts:
        return []
    text = NAME.sub(lambda found: main_text(table, runs[found[1]]) or "–", "; ".join(parts))
    counts = sorted({len(done) for done in runs.values() if done})
    seeds = " to ".join(map(str, dict.fromkeys([counts[0], counts[-1]])))
    where = f"[{highlight['title']}](../results/{table.name}.md), {highlight['what']}"
    return [where, f"{text} ({seeds} seed{'s' * (seeds != '1')})"]
