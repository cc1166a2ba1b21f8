"""run.json and the recipe to what a reader asks of a run: on what, with what, how long, by which command."""

from __future__ import annotations

import datetime
import json
import shlex
from typing import Any

from kontrast.reports.run_files import ReportedRun, real, shorten

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
HIDDEN = ("version", "data_place", "first_checkpoint")  # a page is for others too: not where the images lie here


def title(runs: list[ReportedRun]) -> str:
    """What the page is about: objective and data where they are known, else the folder."""
    if not runs:
        return "kontrast"
    if len(runs) > 1:
        sources = {_source(run) for run in runs}
        return (
            f"{len(runs)} runs on {sources.pop()}" if len(sources) == 1 and None not in sources else f"{len(runs)} runs"
        )
    objective, source = runs[0].setting("objective", "name"), _source(runs[0])
    return f"{objective} on {source}" if objective and source else str(objective or runs[0].name)


def summary(run: ReportedRun) -> str:
    """One line under the title: encoder, length, data, device, time."""
    known = run.info.get("data")
    data = known if isinstance(known, dict) else {}
    images = data.get("train") or data.get("images") or data.get("count")
    seconds = run.info.get("seconds")
    parts = [
        run.setting("encoder", "name"),
        trained_length(run),
        f"{images:,} train images" if isinstance(images, int) else None,
        run.info.get("device"),
        duration(seconds) if isinstance(seconds, int | float) else None,
    ]
    return " · ".join(shorten(part).replace(" ", "\N{NO-BREAK SPACE}") for part in parts if part)


def trained_length(run: ReportedRun) -> str | None:
    """How long the run did train, in epochs: a limit of steps or a stop may end it long before the recipe's length."""
    epochs = next((line["epoch"] for line in reversed(run.lines) if real(line.get("epoch"))), None)
    if epochs is None:
        return None
    text = f"{epochs:.1g}" if 0 < epochs < 0.1 else f"{round(epochs, 2):,}".removesuffix(".0")
    return f"{text} epoch{'s' * (text != '1')}"


def facts(run: ReportedRun) -> list[list[str]]:
    """Label and value, the well-known first; a table inside run.json becomes one line a key."""
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
            pairs = ", ".join(f"{name} {_say(name, inner)}" for name, inner in value.items() if inner is not None)
            rows.append([LABELS.get(key, key.replace("_", " ")), pairs])
        elif value != "":
            rows.append([LABELS.get(key, key.replace("_", " ")), _say(key, value)])
    return [[shorten(label), value[:2000]] for label, value in rows]


def differences(runs: list[ReportedRun]) -> list[list[str]]:
    """The settings that are not the same in all runs: key, then each run's value."""
    flat = [_flatten(run.recipe) for run in runs]
    keys = sorted({key for settings in flat for key in settings})
    rows = [[key, *(settings.get(key, "") for settings in flat)] for key in keys]
    return [[shorten(cell) for cell in row] for row in rows if len(set(row[1:])) > 1]


def duration(seconds: float) -> str:
    """Seconds as a person says them: 48.2 s, 3 min 20 s, 5 h 12 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"


def _source(run: ReportedRun) -> str | None:
    data = run.info.get("data")
    name = data.get("name") if isinstance(data, dict) else None
    source = name or run.setting("data", "source")
    return shorten(str(source).rstrip("/").rpartition("/")[2]) if source else None


def _say(key: str, value: Any) -> str:
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


def _flatten(table: dict[str, Any], before: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{before}{key}.")
        else:
            flat[f"{before}{key}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat
