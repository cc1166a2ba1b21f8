"""lens.json to plots, numbers and the pictures of a query's weights. What is not in their form is left out and said."""

from __future__ import annotations

import itertools
from typing import Any

from kontrast.reports.curves import is_plot
from kontrast.reports.run_files import ReportedRun, shorten

MOST_QUERIES = 3
PICTURE = "data:image/png;base64,"
LONGEST_PICTURE = 20_000
NOTE = (
    "Weights of CACR at t⁺ = 1 and t⁻ = 2 on this run's projections (CACR "
    "figure 6): a view is pulled the more the farther it is, another image pushed the more the nearer it is."
)


def lens_plots(runs: list[ReportedRun]) -> list[dict[str, Any]]:
    """The plots of lens.json, in the form that curves.py describes; one-line plots of several runs share one frame,
    under the plot's name, and what each run's own title says is told below it."""
    shared: dict[str, dict[str, Any]] = {}
    for place, run in enumerate(runs):
        plots = run.lens.get("plots")
        for number, plot in enumerate(plots if isinstance(plots, list) else []):
            if not is_plot(plot):
                run.problems.append(f"lens.json: plot {number + 1} is left out, since it has no series of x and y.")
            elif len(runs) == 1 or len(plot["series"]) > 1 or "id" not in plot:
                shared[f"{place}:{number}"] = {**plot, "of": run.name if len(runs) > 1 else ""}
            else:
                empty = {**plot, "title": plot.get("name", plot["id"]), "series": []}
                frame = shared.setdefault(str(plot["id"]), empty)
                frame["series"].append({**plot["series"][0], "name": run.name, "run": place})
                frame["note"] = f"{frame.get('note', '')} {shorten(run.name)}: {shorten(plot['title'])}.".strip()
    return [_drawable(frame) for frame in shared.values()]


def _drawable(frame: dict[str, Any]) -> dict[str, Any]:
    """Bars of different places would be a comb: they become lines."""
    places = [one["x"] for one in frame["series"]]
    return {**frame, "kind": "line"} if frame.get("kind") == "bars" and any(x != places[0] for x in places) else frame


def lens_numbers(run: ReportedRun, place: int) -> list[dict[str, Any]]:
    """The single numbers of lens.json: under "numbers", a list of {name, value, note} or a plain table."""
    found = run.lens.get("numbers")
    if isinstance(found, dict):
        found = [{"name": name, "value": value} for name, value in found.items()]
    entries = found if isinstance(found, list) else []
    return [
        {"run": place, "name": shorten(e["name"]), "value": e["value"], "note": str(e.get("note", ""))}
        for e in entries
        if isinstance(e, dict) and "name" in e and isinstance(e.get("value"), int | float) and e["value"] == e["value"]
    ]


def lens_weights(runs: list[ReportedRun]) -> list[dict[str, Any]]:
    """Of a few queries: the query, its views, its hardest and its easiest negatives, each with its picture; query by
    query, since runs on the same data ask the same ones."""
    by_query = itertools.zip_longest(*(_weights_of(run, place) for place, run in enumerate(runs)))
    return [entry for entries in by_query for entry in entries if entry]


def _weights_of(run: ReportedRun, place: int) -> list[dict[str, Any]]:
    found = run.lens.get("weights")
    entries = found if isinstance(found, list) else []
    told = [entry for entry in map(_told, entries[:MOST_QUERIES]) if entry]
    if len(told) < len(entries[:MOST_QUERIES]):
        run.problems.append("lens.json: a query's weights are left out, since they are not whole.")
    return [{"run": place, "note": NOTE, **entry} for entry in told]


def _told(entry: Any) -> dict[str, Any] | None:
    try:
        query = {"name": shorten(entry["query"]["name"]), "view": _picture(entry["query"]["view"])}
        kinds = {kind: [_weighted(one) for one in entry[kind]] for kind in ("positives", "hardest", "easiest")}
        return {"query": query, **kinds} if kinds["positives"] else None
    except (KeyError, TypeError, ValueError):
        return None


def _weighted(one: dict[str, Any]) -> dict[str, Any]:
    weight = one["weight"]
    if isinstance(weight, bool) or not 0 <= weight <= 1:
        raise ValueError(f"a weight of {weight}")
    return {"weight": float(f"{weight:.4g}"), "image": _picture(one["image"]), "name": shorten(one.get("name", ""))}


def _picture(address: str) -> str:
    """A picture inside its address; any other address would be a request."""
    if not address.startswith(PICTURE) or len(address) > LONGEST_PICTURE:
        raise ValueError("no picture")
    return address
