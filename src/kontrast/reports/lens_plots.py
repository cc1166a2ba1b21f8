"""Turn lens.json into plots, numbers and the weights of a few queries. Damaged entries are skipped and reported."""

from __future__ import annotations

import itertools
from typing import Any

from kontrast.reports.curves import is_plot
from kontrast.reports.run_files import ReportedRun, is_number, shorten

MAX_QUERIES = 3
PICTURE = "data:image/png;base64,"
MAX_PICTURE = 20_000
NOTE = (
    "The weights of CACR at t⁺ = 1 and t⁻ = 2 on this run's projections (CACR, figure 6): the farther a view is, the "
    "more it is pulled; the nearer another image is, the more it is pushed away."
)


def lens_plots(runs: list[ReportedRun]) -> list[dict[str, Any]]:
    """Return the plots of lens.json in the form that curves.py describes.

    Plots of one line are drawn together if several runs have them; the title of each run then moves into the note.
    """
    frames: dict[str, dict[str, Any]] = {}
    for index, run in enumerate(runs):
        plots = run.lens.get("plots")
        for number, plot in enumerate(plots if isinstance(plots, list) else []):
            if not is_plot(plot):
                run.problems.append(f"lens.json: plot {number + 1} is damaged and not shown.")
            elif len(runs) == 1 or len(plot["series"]) > 1 or "id" not in plot:
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
    numbers = run.lens.get("numbers")
    if isinstance(numbers, dict):
        numbers = [{"name": name, "value": value} for name, value in numbers.items()]
    return [
        {"run": index, "name": shorten(e["name"]), "value": e["value"], "note": str(e.get("note", ""))}
        for e in (numbers if isinstance(numbers, list) else [])
        if isinstance(e, dict) and "name" in e and is_number(e.get("value"))
    ]


def lens_weights(runs: list[ReportedRun]) -> list[dict[str, Any]]:
    """Return a few queries with their views and their hardest and easiest negatives, query by query over all runs."""
    by_query = itertools.zip_longest(*(_weights_of(run, index) for index, run in enumerate(runs)))
    return [entry for entries in by_query for entry in entries if entry]


def _weights_of(run: ReportedRun, index: int) -> list[dict[str, Any]]:
    weights = run.lens.get("weights")
    entries = weights[:MAX_QUERIES] if isinstance(weights, list) else []
    queries = [query for query in map(_read_query, entries) if query]
    if len(queries) < len(entries):
        run.problems.append("lens.json: the weights of a query are damaged and not shown.")
    return [{"run": index, "note": NOTE, **query} for query in queries]


def _read_query(entry: Any) -> dict[str, Any] | None:
    try:
        query = {"name": shorten(entry["query"]["name"]), "view": _picture(entry["query"]["view"])}
        kinds = {kind: [_read_weight(one) for one in entry[kind]] for kind in ("positives", "hardest", "easiest")}
        return {"query": query, **kinds} if kinds["positives"] else None
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _read_weight(one: dict[str, Any]) -> dict[str, Any]:
    weight = float(one["weight"])
    if not 0 <= weight <= 1:
        raise ValueError(f"weight {weight}")
    return {"weight": float(f"{weight:.4g}"), "image": _picture(one["image"]), "name": shorten(one.get("name", ""))}


def _picture(address: str) -> str:
    """Return the address of an embedded picture; any other address would be a request."""
    if not address.startswith(PICTURE) or len(address) > MAX_PICTURE:
        raise ValueError("not an embedded picture")
    return address
