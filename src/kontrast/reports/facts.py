"""Summarize run.json and the recipe: which data, which encoder, how long, which command."""

from __future__ import annotations

import datetime
import json
import shlex
from typing import Any

from kontrast.reports.run_files import ReportedRun, is_finite, shorten

LABELS = {
    "command": "command",
    "device": "device",
    "seed": "seed",
    "seconds": "time",
    "started": "started",
    "finished": "finished",
    "status": "status",
    "data": "data",
    "versions": "versions",
}
HIDDEN = ("version", "data_place", "first_checkpoint")  # a page is shared: it must not show paths of this machine


def title(runs: list[ReportedRun]) -> str:
    """Return the page's title: the objective and the data if they are known, else the folder's name."""
    if not runs:
        return "kontrast"
    if len(runs) > 1:
        sources = {_source(run) for run in runs}
        same = len(sources) == 1 and None not in sources
        return f"{len(runs)} runs on {sources.pop()}" if same else f"{len(runs)} runs"
    objective, source = runs[0].setting("objective", "name"), _source(runs[0])
    return f"{objective} on {source}" if objective and source else str(objective or runs[0].name)


def summary(run: ReportedRun) -> str:
    """Return the line under the title: encoder, length, data, device and time."""
    info = run.info.get("data")
    data = info if isinstance(info, dict) else {}
    images = data.get("train") or data.get("images") or data.get("count")
    seconds = run.info.get("seconds")
    parts = [
        run.setting("encoder", "name"),
        trained_length(run),
        f"{images:,} training images" if isinstance(images, int) else None,
        run.info.get("device"),
        duration(seconds) if isinstance(seconds, int | float) else None,
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
    tools = {name: info.pop(name) for name in ("kontrast", "torch", "python") if isinstance(info.get(name), str)}
    if tools:
        info.setdefault("versions", tools)
    info.setdefault("seed", run.recipe.get("seed", ""))
    order = [key for key in LABELS if key in info] + [key for key in info if key not in LABELS]
    rows = [["folder", run.name]]
    for key in order:
        value = info[key]
        if isinstance(value, dict):
            text = ", ".join(f"{name} {_format(name, inner)}" for name, inner in value.items() if inner is not None)
        else:
            text = _format(key, value)
        if value != "":
            rows.append([LABELS.get(key, key.replace("_", " ")), text])
    return [[shorten(label), value[:2000]] for label, value in rows]


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


def _source(run: ReportedRun) -> str | None:
    """Return the name of the run's data without its folder."""
    data = run.info.get("data")
    name = data.get("name") if isinstance(data, dict) else None
    source = name or run.setting("data", "source")
    return shorten(str(source).rstrip("/").rpartition("/")[2]) if source else None


def _format(key: str, value: Any) -> str:
    if key == "command" and isinstance(value, list):
        return shlex.join(map(str, value))
    if key == "seconds" and isinstance(value, int | float):
        return duration(value)
    if key in ("started", "finished") and isinstance(value, int | float) and value > 1e8:
        return datetime.datetime.fromtimestamp(value, datetime.UTC).isoformat(" ", "seconds")
    if key in ("started", "finished") and isinstance(value, str):
        return value.replace("T", " ", 1)
    if isinstance(value, bool) or value is None or isinstance(value, list | dict):
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
