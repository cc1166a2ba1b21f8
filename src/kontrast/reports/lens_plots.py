"""Turn lens.json into plots, numbers and the weights of a few queries."""

from __future__ import annotations

import itertools
from typing import Any

from kontrast.reports.run_files import ReportedRun, is_number, shorten

MAX_QUERIES = 3
NOTE = (
    "The weights of CACR at t⁺ = 1 and t⁻ = 2 on this run's projections (CACR, figure 6): the farther a view is, the "
    "more it is pulled; the nearer another image is, the more it is pushed away."
)


def drop_damaged_lens(run: ReportedRun) -> None:
    """Forget the content of lens.json if it can't be shown, and report that."""
    try:
        lens_plots([run]), lens_numbers(run, 0), lens_weights([run])
    except (LookupError, TypeError, ValueError, AttributeError):
        run.lens = {}
        run.problems.append("lens.json is damaged, so what it would show is missing.")


def lens_plots(runs: list[ReportedRun]) -> list[dict[str, Any]]:
    """Return the plots of lens.json in the form that curves.py describes.

    Plots of one line are drawn together if several runs have them; the title of each run then moves into the note.
    """
    frames: dict[str, dict[str, Any]] = {}
    for index, run in enumerate(runs):
        for number, plot in enumerate(run.lens.get("plots", [])):
            if len(runs) == 1 or len(plot["series"]) > 1 or "id" not in plot:
                frames[f"{index}:{number}"] = {**plot, "of": run.name if len(runs) > 1 else ""}
            else:
                empty = {**plot, "title": plot.get("name", plot["id"]), "series": []}
                frame = frames.setdefault(str(plot["id"]), empty)
                frame["series"].append({**plot["series"][0], "name": run.name, "run": index})
                frame["note"] = f"{frame.get('note', '')} {shorten(run.name)}: {shorten(plot['title'])}.".strip()
    return [_without_uneven_bars(frame) for frame in frames.values()]


def _without_uneven_bars(frame: dict[str, Any]) -> dict[str, Any]:
    """Draw bars as lines if the runs have them at different positions."""
    positions = [one["x"] for one in frame["series"]]
    uneven = frame.get("kind") == "bars" and any(x != positions[0] for x in positions)
    return {**frame, "kind": "line"} if uneven else frame


def lens_numbers(run: ReportedRun, index: int) -> list[dict[str, Any]]:
    """Return the numbers of lens.json, which are a list of {name, value, note} or, in old files, a plain table."""
    numbers = run.lens.get("numbers", [])
    if isinstance(numbers, dict):
        numbers = [{"name": name, "value": value} for name, value in numbers.items()]
    return [{"run": index, "note": "", **entry} for entry in numbers if is_number(entry["value"])]


def lens_weights(runs: list[ReportedRun]) -> list[dict[str, Any]]:
    """Return a few queries with their views and their hardest and easiest negatives, query by query over all runs."""
    by_query = itertools.zip_longest(*(run.lens.get("weights", [])[:MAX_QUERIES] for run in runs))
    return [
        {"run": index, "note": NOTE, **_short_query(query)}
        for queries in by_query
        for index, query in enumerate(queries)
        if query
    ]


def _short_query(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a query with short names, fewer digits and only the pictures that the page shows."""
    query = {"name": shorten(entry["query"]["name"]), "view": entry["query"]["view"]}
    return {"query": query} | {
        kind: [
            {"weight": float(f"{one['weight']:.4g}"), "image": one["image"], "name": shorten(one.get("name", ""))}
            for one in entry[kind]
        ]
        for kind in ("positives", "hardest", "easiest")
    }
