"""Summarize run.json and the recipe: which data, which encoder, how long, which command."""

from __future__ import annotations

import json
from typing import Any

from kontrast.reports.run_files import ReportedRun, is_finite, shorten

ORDER = ("command", "device", "seed", "seconds", "started", "finished", "data", "versions")
HIDDEN = ("version", "data_place", "first_checkpoint")  # a page is shared: it must not show paths of this machine


def title(runs: list[ReportedRun]) -> str:
    """Return the page's title: the objective and the data if they are known, else the folder's name."""
    if len(runs) != 1:
        sources = {_source(run) for run in runs}
        return f"{len(runs)} runs" + (f" on {sources.pop()}" if len(sources) == 1 and None not in sources else "")
    objective, source = runs[0].setting("objective", "name"), _source(runs[0])
    return f"{objective} on {source}" if objective and source else str(objective or runs[0].name)


def summary(run: ReportedRun) -> str:
    """Return the line under the title: encoder, length, data, device and time."""
    images, seconds = _data(run).get("images"), run.info.get("seconds")
    parts = [
        run.setting("encoder", "name"),
        trained_length(run),
        f"{images:,} training images" if isinstance(images, int) else None,
        run.info.get("device"),
        duration(seconds) if is_finite(seconds) else None,
    ]
    return " · ".join(shorten(part).replace(" ", "\N{NO-BREAK SPACE}") for part in parts if part)


def trained_length(run: ReportedRun) -> str | None:
    """Return the epochs that the run really trained, which a step limit or a stop can make less than the recipe's."""
    epochs = next((line["epoch"] for line in reversed(run.lines) if is_finite(line.get("epoch"))), None)
    if epochs is None:
        return None
    text = f"{epochs:.1g}" if 0 < epochs < 0.1 else f"{round(epochs, 2):,}".removesuffix(".0")
    return f"{text} epoch{'s' * (text != '1')}"


def facts(run: ReportedRun) -> list[list[str]]:
    """Return pairs of label and value, the well-known ones first; a table in run.json becomes one line."""
    info = {key: value for key, value in run.info.items() if key not in HIDDEN and value not in (None, "", [], {})}
    info["versions"] = {name: info.pop(name) for name in ("kontrast", "torch", "python") if name in info}
    info["seed"] = run.recipe.get("seed")
    rows = [["folder", run.name]]
    for key in sorted(info, key=lambda key: ORDER.index(key) if key in ORDER else len(ORDER)):
        parts = info[key].items() if isinstance(info[key], dict) else [("", info[key])]
        text = ", ".join(f"{name} {_format(name or key, part)}".strip() for name, part in parts if part is not None)
        if text:
            rows.append(["time" if key == "seconds" else shorten(key.replace("_", " ")), text[:2000]])
    return rows


def differences(runs: list[ReportedRun]) -> list[list[str]]:
    """Return the settings in which the runs differ: the key, then the value of each run."""
    flat = [_flatten(run.recipe) for run in runs]
    keys = sorted({key for settings in flat for key in settings})
    rows = [[key, *(settings.get(key, "") for settings in flat)] for key in keys]
    return [[shorten(cell) for cell in row] for row in rows if len(set(row[1:])) > 1]


def duration(seconds: float) -> str:
    """Format seconds for people: 48.2 s, 3 min 20 s, 5 h 12 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"


def _data(run: ReportedRun) -> dict[str, Any]:
    data = run.info.get("data")
    return data if isinstance(data, dict) else {}


def _source(run: ReportedRun) -> str | None:
    """Return the name of the run's data without its folder."""
    source = _data(run).get("name") or run.setting("data", "source")
    return shorten(str(source).rstrip("/").rpartition("/")[2]) if source else None


def _format(key: str, value: Any) -> str:
    if key == "seconds" and is_finite(value):
        return duration(value)
    if key in ("started", "finished"):
        return str(value).replace("T", " ", 1)
    if isinstance(value, bool | list | dict):
        return json.dumps(value, ensure_ascii=False)
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 and key != "seed" else str(value)


def _flatten(table: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat
