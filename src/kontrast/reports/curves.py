"""metrics.jsonl to plots. A plot is a plain table that the page draws as it is; lens.json may hold more of them:

{"id", "name", "title", "note", "kind": "line"|"bars", "x": {"label", "zero": bool, "whole": bool},
 "y": {"label", "format": "number"|"percent", "log": bool, "zero": bool},
 "series": [{"name", "run", "x": [..], "y": [..], "low": [..], "high": [..]}], "references": [{"y", "label"}]}

"low" and "high" shade a band. "zero" draws the axis from 0, "whole" gives it whole ticks. Plots of one line that have
the same "id" in several runs are laid over each other under their "name", since a title speaks of one run alone.
"""

from __future__ import annotations

import decimal
import itertools
import math
import statistics
from typing import Any

from kontrast.reports.run_files import ReportedRun, is_number, real, shorten

MOST_POINTS = 300
FEWEST_POINTS = 60
ALL_POINTS = 60_000
VAST = 1e15  # from here on a number is said with an exponent, lest its zeros fill the page

ACCURACIES = ("knn", "linear", "logistic", "few-shot", "finetune")
WORDS = {"knn": "kNN", "lr": "learning rate", "images_per_second": "speed"}
NOTES = {
    "loss": "What training lowers; comparable between runs only under the same objective and batch.",
    "attraction": "The pull between views of one image. Lower: views of an image agree more.",
    "repulsion": "The push away from other images. Lower: features spread wider.",
    "effective_rank": "How many directions the features really use. Near 1: they have collapsed.",
    "conditional_entropy": "How many other images share an image's repulsion, at one scale for every method. At the "
    "dashed line all of them do, equally.",
    "lr": "The step size that the schedule gave the optimiser.",
    "images_per_second": "Images that entered training each second, all their views together.",
}
BELOW_ZERO = (
    "Below zero is no fault: not every loss has its lower bound at 0. That of DCL, whose denominator leaves the "
    "positive out, is −2/τ + log of the number of negatives."
)
UNITS = {"lr": "learning rate", "images_per_second": "images / s", "seconds": "seconds",
         "conditional_entropy": "H(X⁻|X) (nats)"}  # fmt: skip
FIRST = ("loss", "attraction", "repulsion")
LAST = ("lr", "images_per_second")
LIMIT = "_max"
PLACES = ("step", "epoch", "time", "version")


def curve_plots(runs: list[ReportedRun], references: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One plot a metric, one line a run. Accuracies lead, then the loss and its terms, then schedule and speed."""
    found = [_measured(run) for run in runs]
    keys = {key for metrics in found for key in metrics if not key.endswith(LIMIT)}
    order = sorted(keys, key=lambda key: (_rank(key), key))
    drawn = sum(key in metrics for metrics in found for key in metrics)
    limit = max(FEWEST_POINTS, min(MOST_POINTS, ALL_POINTS // max(1, drawn)))
    plots = []
    for key in order:
        series = [
            {"name": run.name, "run": number, **thin(*metrics[key], limit)}
            for number, (run, metrics) in enumerate(zip(runs, found))
            if key in metrics
        ]
        marks = references.get(key, []) if len(runs) == 1 else []
        plots.append(_plot(key, series, marks + _limits(key, found), found))
    return plots


def _limits(key: str, found: list[dict[str, tuple[list[float], list[float]]]]) -> list[dict[str, Any]]:
    """A metric's greatest possible value (`conditional_entropy_max`) as a dashed line, not as a curve of its own."""
    limits = {metrics[key + LIMIT][1][-1] for metrics in found if key + LIMIT in metrics}
    return [{"y": _short(value), "label": "maximum"} for value in sorted(limits)]


def thin(x: list[float], y: list[float], limit: int) -> dict[str, list[float | None]]:
    """At most `limit` points: means over equal stretches, with the least and the greatest value of each beside them."""
    if len(x) <= limit:
        return {"x": [_short(v) for v in x], "y": [_short(v) for v in y]}
    edges = [round(i * len(x) / limit) for i in range(limit + 1)]
    thinned: dict[str, list[float | None]] = {"x": [], "y": [], "low": [], "high": []}
    for a, b in itertools.pairwise(edges):
        good = [v for v in y[a:b] if math.isfinite(v)]
        thinned["x"].append(_short(x[b - 1]))
        for column, measure in (("y", statistics.fmean), ("low", min), ("high", max)):
            thinned[column].append(_short(measure(good)) if good else None)
    return thinned


def number(value: float) -> str:
    """A number for a sentence: three figures, thousands apart; a half goes up, as in the page's script."""
    if not math.isfinite(value):
        return f"{value:g}"
    short = decimal.Context(prec=3, rounding=decimal.ROUND_HALF_UP).create_decimal(repr(value))
    text = _half_up(value, ",.0f") if 1000 <= abs(short) < VAST else f"{float(short):.3g}"
    return text.replace("-", "\N{MINUS SIGN}")


def percent(value: float) -> str:
    return f"{tenths(100 * value)}%"


def tenths(value: float) -> str:
    """One decimal, as JavaScript's toFixed gives it: the page shows many of these numbers a second time."""
    return _half_up(value, ".1f")


def _half_up(value: float, form: str) -> str:
    """The value in a fixed form with a half rounded away from zero; Python's own formatting rounds it to even."""
    with decimal.localcontext(prec=400, rounding=decimal.ROUND_HALF_UP):  # digits for the largest of floats
        return format(decimal.Decimal(value), form)


def is_plot(plot: Any) -> bool:
    """Has what drawing needs: labels, and series whose columns are equally long lists."""
    try:
        columns = [
            (one["x"], one["y"], one.get("low") or one["y"], one.get("high") or one["y"]) for one in plot["series"]
        ]
        whole = all(isinstance(c, list) and len(c) == len(four[0]) > 0 for four in columns for c in four)
        numbers = all(any(map(real, c)) for four in columns for c in four)
        return bool(columns) and whole and numbers and bool(plot["title"] and plot["x"]["label"] and plot["y"]["label"])
    except (KeyError, TypeError, AttributeError):
        return False


def is_accuracy(key: str) -> bool:
    return key.startswith(ACCURACIES) or key.endswith("accuracy")


def _measured(run: ReportedRun) -> dict[str, tuple[list[float], list[float]]]:
    """Every number of the run by its name, with the epochs (or steps) at which it was taken."""
    metrics: dict[str, tuple[list[float], list[float]]] = {}
    for line, place in zip([*run.lines, *run.speed], _places(run.lines) + _places(run.speed)):
        for key, value in line.items():
            if key in PLACES or not is_number(value) or place is None:
                continue
            xs, ys = metrics.setdefault(shorten(key), ([], []))
            xs.append(place)
            ys.append(float(value))
    return {key: (xs, ys) for key, (xs, ys) in metrics.items() if any(map(math.isfinite, ys))}


def _places(lines: list[dict[str, Any]]) -> list[float | None]:
    """Where each line stands, in epochs. Whole epochs that are said of many lines are divided by their steps."""
    training = [line for line in lines if real(line.get("epoch")) and real(line.get("step")) and _trains(line)]
    starts: dict[float, float] = {}
    for line in training:
        starts[line["epoch"]] = min(line["step"], starts.get(line["epoch"], math.inf))
    whole = all(float(epoch).is_integer() for epoch in starts)
    if not whole or len(training) <= len(starts):
        return [float(line["epoch"]) if real(line.get("epoch")) else None for line in lines]
    order = sorted(starts)
    gaps = [(starts[b] - starts[a]) / (b - a) for a, b in itertools.pairwise(order)]
    steps = statistics.median(gaps) if gaps else max(line["step"] for line in training) - starts[order[0]] + 1
    inside = {id(line) for line in training}
    return [
        line["epoch"] - min(order[0], 1) + (line["step"] - starts[line["epoch"]]) / max(steps, 1)
        if id(line) in inside
        else (float(line["epoch"]) if real(line.get("epoch")) else None)
        for line in lines
    ]


def _plot(key: str, series: list[dict[str, Any]], references: list[dict[str, Any]], found: Any) -> dict[str, Any]:
    accuracy = is_accuracy(key)
    values = [v for metrics in found if key in metrics for v in metrics[key][1] if math.isfinite(v)]
    log = key not in LAST and not accuracy and min(values) > 0 and max(values) / min(values) > 1000
    label = "accuracy" if accuracy else UNITS.get(key, WORDS.get(key, key.replace("_", " ")))
    return {
        "id": key,
        "title": _title(key, series, [_last(found[one["run"]], key + LIMIT) for one in series]),
        "note": _note(key, min(values)),
        "kind": "line",
        "x": {"label": "epoch", "zero": True, "whole": True},
        "y": {"label": label, "format": "percent" if accuracy else "number", "log": log, "zero": key in LAST},
        "series": series,
        "references": references,
    }


def _note(key: str, lowest: float) -> str:
    """What the metric means, and of a loss below zero that this is as it should be."""
    if is_accuracy(key):
        return "Share of test images named right, as training went on."
    return f"{NOTES['loss']} {BELOW_ZERO}" if key == "loss" and lowest < 0 else NOTES.get(key, "")


def _title(key: str, series: list[dict[str, Any]], limits: list[float | None]) -> str:
    """What there is to see, in one line. limits: each run's greatest possible value, where it is known."""
    word = WORDS.get(key, key.replace("_", " "))
    word = word[:1].upper() + word[1:] if key != "knn" else word
    say = percent if is_accuracy(key) else number
    ends = [_ends(one["y"]) for one in series]
    if len(series) > 1:
        if is_accuracy(key):
            best = max(range(len(series)), key=lambda i: ends[i][1])
            return f"{word} accuracy: “{shorten(series[best]['name'])}” ends highest, at {say(ends[best][1])}"
        shares = [end / limit for (_, end), limit in zip(ends, limits) if limit]
        if len(shares) == len(series):
            best = max(range(len(series)), key=shares.__getitem__)
            return f"{word}: “{shorten(series[best]['name'])}” ends nearest its maximum, at {say(ends[best][1])} nats"
        return word if key in LAST else f"{word}: {_movement(series)}"
    (first, last), peak = ends[0], max(v for v in series[0]["y"] if v is not None)
    if key == "images_per_second":
        return f"Median speed: {number(statistics.median(v for v in series[0]['y'] if v is not None))} images/s"
    if key == "lr":
        return f"Learning rate peaked at {number(peak)}"
    word += " accuracy" if is_accuracy(key) else ""
    if len(series[0]["y"]) == 1 or say(first) == say(last):
        return f"{word}: {say(last)}"
    return f"{word} {'rose' if last > first else 'fell'} from {say(first)} to {say(last)}"


def _movement(series: list[dict[str, Any]]) -> str:
    """In how many of several runs a metric fell; a run of one point did not move, so its value is told instead."""
    lines = [_ends(one["y"]) for one in series if sum(v is not None for v in one["y"]) > 1]
    if lines:
        those = "runs" if len(lines) == len(series) else "runs with more than one point"
        return f"fell in {sum(b < a for a, b in lines)} of {len(lines)} {those}"
    points = [_ends(one["y"])[1] for one in series]
    low, high = number(min(points)), number(max(points))
    return f"{low} to {high} in {len(series)} runs" if low != high else f"{low} in each of {len(series)} runs"


def _last(metrics: dict[str, tuple[list[float], list[float]]], key: str) -> float | None:
    return metrics[key][1][-1] if key in metrics else None


def _ends(values: list[float | None]) -> tuple[float, float]:
    good = [v for v in values if v is not None]
    return good[0], good[-1]


def _rank(key: str) -> tuple[int, int]:
    if is_accuracy(key):
        return 0, 0
    if key in FIRST:
        return 1, FIRST.index(key)
    return (3, LAST.index(key)) if key in LAST else (2, 0)


def _trains(line: dict[str, Any]) -> bool:
    return "loss" in line or "images_per_second" in line


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
