"""Turn metrics.jsonl into plots. A plot is a plain dictionary that the page draws as it is; lens.json has more of them:

{"id", "name", "title", "note", "kind": "line"|"bars", "x": {"label", "zero": bool, "whole": bool},
 "y": {"label", "format": "number"|"percent", "log": bool, "zero": bool},
 "series": [{"name", "run", "x": [..], "y": [..], "low": [..], "high": [..]}], "references": [{"y", "label"}]}

"low" and "high" shade a band. "zero" starts the axis at 0, "whole" gives it integer ticks. If several runs have a plot
of one line with the same "id", they are drawn together under its "name", since each title is about one run.
"""

from __future__ import annotations

import decimal
import itertools
import math
import statistics
from typing import Any

from kontrast.reports.run_files import ReportedRun, is_finite, is_number, shorten

MAX_POINTS = 300
MIN_POINTS = 60
MAX_POINTS_OF_PAGE = 60_000
NEEDS_EXPONENT = 1e15  # from here on, numbers are shown with an exponent

ACCURACIES = ("knn", "linear", "logistic", "few-shot", "finetune")
NAMES = {
    "knn": "kNN", "lr": "learning rate", "images_per_second": "speed", "rankme": "RankMe", "alpha_req": "α-ReQ",
    "rankme_uncentered": "RankMe, uncentered", "lidar": "LiDAR", "lidar_above_noise": "LiDAR above noise",
    "lidar_signal": "LiDAR signal",
}  # fmt: skip
NOTES = {
    "loss": "What training minimizes. Compare it only between runs with the same objective and batch size.",
    "attraction": "The pull between views of the same image. Lower means that the views of an image agree more.",
    "repulsion": "The push away from other images. Lower means that the features are spread more widely.",
    "effective_rank": "How many directions the features actually use. Near 1, they have collapsed.",
    "conditional_entropy": "How evenly an image's repulsion is shared among the other images, measured at the same "
    "scale for every method. At the dashed line, all of them share it equally.",
    "conditional_entropy_own": "The same at the scale at which this run's objective weighs its negatives.",
    "rankme": "RankMe of the projections, centered: how evenly they use their directions. It also rises with noise.",
    "rankme_uncentered": "RankMe as in the paper, without centering: an offset that all images share hides rank.",
    "alpha_req": "α-ReQ: how fast the eigenvalues of the features decay. Features that transfer well are often near 1.",
    "lidar": "LiDAR: how many directions tell images apart relative to how views of an image vary. Noise has the most.",
    "lidar_above_noise": "LiDAR of the eigenvalues minus 1/views, the value that noise would have.",
    "lidar_signal": "The mean of LiDAR's eigenvalues as a multiple of that of noise. At 1, views of an image disagree.",
    "temperature": "The temperature that the loss has learned. A small one concentrates the repulsion on near images.",
    "lr": "The learning rate that the schedule gave the optimizer.",
    "images_per_second": "Training images per second; all views of an image count as one.",
}
ACCURACY_NOTE = "The share of test images classified correctly, measured during training."
BELOW_ZERO = (
    " A loss below zero is normal, since not every loss is bounded by 0. DCL, for example, leaves the positive out of "
    "the denominator and is bounded by −2/τ + log(number of negatives)."
)
UNITS = {"lr": "learning rate", "images_per_second": "images / s", "seconds": "seconds",
         "conditional_entropy": "H(X⁻|X) (nats)", "conditional_entropy_own": "H(X⁻|X) (nats)"}  # fmt: skip
FIRST = ("loss", "attraction", "repulsion")
LAST = ("lr", "images_per_second")
LIMIT = "_max"  # "conditional_entropy_max" is the largest possible value of "conditional_entropy"
POSITION_KEYS = ("step", "epoch", "time", "version")

Metrics = dict[str, tuple[list[float], list[float]]]
"""The positions, in epochs, and the values of each metric of a run."""


def curve_plots(runs: list[ReportedRun], references: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return one plot per metric with one line per run: accuracies, then the loss and its terms, then the rest."""
    measured = [_metrics_of(run) for run in runs]
    keys = {key for metrics in measured for key in metrics if not key.endswith(LIMIT)}
    order = sorted(keys, key=lambda key: (_rank(key), key))
    drawn = sum(len(metrics) for metrics in measured)
    limit = max(MIN_POINTS, min(MAX_POINTS, MAX_POINTS_OF_PAGE // max(1, drawn)))
    plots = []
    for key in order:
        series = [
            {"name": run.name, "run": number, **thin(*metrics[key], limit)}
            for number, (run, metrics) in enumerate(zip(runs, measured))
            if key in metrics
        ]
        plots.append(_plot(key, series, references.get(key, []) if len(runs) == 1 else [], measured))
    return plots


def thin(x: list[float], y: list[float], limit: int) -> dict[str, list[float | None]]:
    """Reduce a curve to at most `limit` points: the mean, minimum and maximum of equally long intervals."""
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
    """Format a number for a sentence with three significant digits, rounding halves up like the page's script."""
    if not math.isfinite(value):
        return f"{value:g}"
    short = decimal.Context(prec=3, rounding=decimal.ROUND_HALF_UP).create_decimal(repr(value))
    text = _half_up(value, ",.0f") if 1000 <= abs(short) < NEEDS_EXPONENT else f"{float(short):.3g}"
    return text.replace("-", "\N{MINUS SIGN}")


def percent(value: float) -> str:
    """Format a share as a percentage with one decimal."""
    return f"{tenths(100 * value)}%"


def tenths(value: float) -> str:
    """Format with one decimal, like JavaScript's toFixed, since the script shows many of these numbers again."""
    return _half_up(value, ".1f")


def _half_up(value: float, form: str) -> str:
    """Format with halves rounded away from zero, while Python's own formatting rounds them to even."""
    with decimal.localcontext(prec=400, rounding=decimal.ROUND_HALF_UP):  # enough digits for the largest float
        return format(decimal.Decimal(value), form)


def is_accuracy(key: str) -> bool:
    return key.startswith(ACCURACIES) or key.endswith("accuracy")


def _metrics_of(run: ReportedRun) -> Metrics:
    """Return each metric of the run as the epochs at which it was measured and its values."""
    metrics: Metrics = {}
    for line, position in zip([*run.lines, *run.speed], _positions(run.lines) + _positions(run.speed)):
        for key, value in line.items():
            if key in POSITION_KEYS or not is_number(value) or position is None:
                continue
            xs, ys = metrics.setdefault(shorten(key), ([], []))
            xs.append(position)
            ys.append(float(value))
    return {key: (xs, ys) for key, (xs, ys) in metrics.items() if any(map(math.isfinite, ys))}


def _positions(lines: list[dict[str, Any]]) -> list[float | None]:
    """Return the position of each line in epochs. If many lines have the same whole epoch, their steps divide it."""
    steps_of_training = [line for line in lines if "loss" in line or "images_per_second" in line]
    training = [line for line in steps_of_training if is_finite(line.get("epoch")) and is_finite(line.get("step"))]
    starts: dict[float, float] = {}
    for line in training:
        starts[line["epoch"]] = min(line["step"], starts.get(line["epoch"], math.inf))
    given = [float(line["epoch"]) if is_finite(line.get("epoch")) else None for line in lines]
    if not all(float(epoch).is_integer() for epoch in starts) or len(training) <= len(starts):
        return given
    order = sorted(starts)
    gaps = [(starts[b] - starts[a]) / (b - a) for a, b in itertools.pairwise(order)]
    steps = statistics.median(gaps) if gaps else max(line["step"] for line in training) - starts[order[0]] + 1
    divided = {
        id(line): line["epoch"] - min(order[0], 1) + (line["step"] - starts[line["epoch"]]) / max(steps, 1)
        for line in training
    }
    return [divided.get(id(line), epoch) for line, epoch in zip(lines, given)]


def _plot(
    key: str, series: list[dict[str, Any]], references: list[dict[str, Any]], measured: list[Metrics]
) -> dict[str, Any]:
    accuracy = is_accuracy(key)
    values = [v for metrics in measured if key in metrics for v in metrics[key][1] if math.isfinite(v)]
    limits = [metrics[key + LIMIT][1][-1] for metrics in measured if key in metrics and key + LIMIT in metrics]
    log = key not in LAST and not accuracy and min(values) > 0 and max(values) / min(values) > 1000
    label = "accuracy" if accuracy else UNITS.get(key, NAMES.get(key, key.replace("_", " ")))
    return {
        "id": key,
        "title": _title(key, series, limits),
        "note": ACCURACY_NOTE if accuracy else NOTES.get(key, "") + BELOW_ZERO * (key == "loss" and min(values) < 0),
        "kind": "line",
        "x": {"label": "epoch", "zero": True, "whole": True},
        "y": {"label": label, "format": "percent" if accuracy else "number", "log": log, "zero": key in LAST},
        "series": series,
        "references": references + [{"y": _short(limit), "label": "maximum"} for limit in sorted(set(limits))],
    }


def _title(key: str, series: list[dict[str, Any]], limits: list[float]) -> str:
    """Return a title that says what the plot shows. `limits` are the largest possible values of runs that have one."""
    name = NAMES.get(key, key.replace("_", " "))
    name = name if key in NAMES and key not in LAST else name[:1].upper() + name[1:]
    text = percent if is_accuracy(key) else number
    ends = [_ends(one["y"]) for one in series]
    if len(series) > 1:
        if is_accuracy(key):
            best = max(range(len(series)), key=lambda i: ends[i][1])
            return f"{name} accuracy: “{shorten(series[best]['name'])}” ends highest, at {text(ends[best][1])}"
        if len(limits) == len(series) and all(limits):
            best = max(range(len(series)), key=lambda i: ends[i][1] / limits[i])
            return f"{name}: “{shorten(series[best]['name'])}” ends nearest its maximum, at {text(ends[best][1])} nats"
        return name if key in LAST else f"{name}: {_movement(series)}"
    (first, last), peak = ends[0], max(v for v in series[0]["y"] if v is not None)
    if key == "images_per_second":
        return f"Median speed: {number(statistics.median(v for v in series[0]['y'] if v is not None))} images/s"
    if key == "lr":
        return f"Learning rate peaked at {number(peak)}"
    name += " accuracy" if is_accuracy(key) else ""
    if len(series[0]["y"]) == 1 or text(first) == text(last):
        return f"{name}: {text(last)}"
    return f"{name} {'rose' if last > first else 'fell'} from {text(first)} to {text(last)}"


def _movement(series: list[dict[str, Any]]) -> str:
    """Return in how many runs a metric fell, or its values if every run has only one point."""
    lines = [_ends(one["y"]) for one in series if sum(v is not None for v in one["y"]) > 1]
    if lines:
        counted = "runs" if len(lines) == len(series) else "runs with more than one point"
        return f"fell in {sum(b < a for a, b in lines)} of {len(lines)} {counted}"
    points = [_ends(one["y"])[1] for one in series]
    low, high = number(min(points)), number(max(points))
    return f"{low} to {high} in {len(series)} runs" if low != high else f"{low} in each of {len(series)} runs"


def _ends(values: list[float | None]) -> tuple[float, float]:
    good = [v for v in values if v is not None]
    return good[0], good[-1]


def _rank(key: str) -> tuple[int, int]:
    if is_accuracy(key):
        return 0, 0
    if key in FIRST:
        return 1, FIRST.index(key)
    return (3, LAST.index(key)) if key in LAST else (2, 0)


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
