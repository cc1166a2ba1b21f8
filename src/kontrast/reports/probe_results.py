"""Turn probes.json into the results beside their controls, and into the verdict: one sentence with the outcome."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

from kontrast.reports.curves import number, percent, tenths
from kontrast.reports.run_files import ReportedRun, is_finite, is_number, shorten

FEATURES = {
    "trained": "trained encoder",
    "starting weights": "starting weights",
    "untrained": "untrained encoder",
    "pixels": "raw pixels",
}
CONTROLS = {
    "starting weights": "the weights that it started from",
    "pixels": "raw pixels",
    "untrained": "the same encoder untrained",
}
PROBES = {"knn": "kNN", "linear": "linear probe", "logistic": "logistic probe", "finetune": "fine-tuned",
          "zero-shot": "zero-shot", "zero-shot-unseen": "zero-shot, unseen combinations",
          "zero-shot-unseen-pairs": "zero-shot, color and digit of unseen combinations",
          **{f"{way}-r{k}": f"{way.replace('-', ' ')}, among the first {k}"
             for way in ("image-to-text", "text-to-image") for k in (1, 5, 10)}}  # fmt: skip
LINEAR = "with a linear layer on top"
METHODS = {"knn": "by nearest neighbors", "linear": LINEAR, "logistic": LINEAR}
OTHER_CHANCE = ("-r1", "-r5", "-r10", "-pairs")
"""Ends of the names of results whose chance is not one in the number of classes."""
MAX_CLASSES = 1000
Classes = dict[str, tuple[int, float]]  # test images and accuracy by the name of a class
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t of a 95% interval for 1 to 10 degrees of freedom. More seeds use the last value, a little too wide."""


def result_groups(runs: list[ReportedRun]) -> list[dict[str, Any]]:
    """Return one group per probe, kNN first, with one row per run and kind of features."""
    groups: dict[str, dict[str, Any]] = {}
    counts = {count for count in map(_count_classes, runs) if count}
    chance = 1 / counts.pop() if len(counts) == 1 else None
    for index, run in enumerate(runs):
        for key, probe in _named_probes(run):
            title = PROBES.get(probe["probe"], probe["probe"]) + key.removeprefix(probe["probe"])
            group = groups.setdefault(key, {"probe": key, "title": title, "rows": []})
            group["rows"].append({**_row(index, probe), "per_class": _classes(probe)})
            other = _protocol_value(probe, "data") or len({_protocol_value(p, "labels") for p in run.probes}) > 1
            of_classes = not probe["probe"].endswith(OTHER_CHANCE)
            group["chance"] = chance if of_classes and not other else None
    for group in groups.values():
        group["classes"] = class_table([row.pop("per_class") for row in group["rows"]], group["rows"], runs)
        order = lambda row: ([*FEATURES, row["features"]].index(row["features"]), row["run"])  # noqa: E731
        group["rows"] = sorted(_with_means(group["rows"]), key=order)
    return sorted(groups.values(), key=lambda group: [*PROBES, group["probe"]].index(group["probe"]))


def class_table(found: list[Classes], rows: list[dict[str, Any]], runs: list[ReportedRun]) -> dict[str, Any] | None:
    """Return the accuracy by class: one column per kind of features of one run, or per run; None without classes."""
    several = len(runs) > 1
    columns: dict[str, Classes] = {}
    for classes, row in zip(found, rows):
        if classes and (row["features"] == "trained" or not several):
            title = shorten(runs[row["run"]].name) if several else row["label"]
            columns.setdefault(title, classes)  # those of the first seed
    images = {name: n for classes in columns.values() for name, (n, _) in classes.items()}
    if not images:
        return None
    body = []
    for name, n in list(images.items())[:MAX_CLASSES]:
        accuracies = (percent(classes[name][1]) if name in classes else "–" for classes in columns.values())
        body.append([name, shorten(f"{n:,}"), *accuracies])
    return {"columns": ["class", "test images", *columns], "rows": body}


def _classes(probe: dict[str, Any]) -> Classes:
    """Return the test images and the accuracy of each class by its name; entries of another form are left out."""
    rows = probe.get("per_class")
    good = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    numbers = [row for row in good if is_finite(row.get("n")) and is_finite(row.get("accuracy"))]
    return {shorten(str(row.get("class", row.get("label")))): (int(row["n"]), row["accuracy"]) for row in numbers}


def references(run: ReportedRun) -> dict[str, list[dict[str, Any]]]:
    """Return the accuracies of the controls, which are horizontal lines in the accuracy plots."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for probe in run.probes:
        features = str(probe.get("features"))
        if features in CONTROLS and not _protocol_value(probe, "data") and not _protocol_value(probe, "labels"):
            lines.setdefault(probe["probe"], []).append({"y": probe["accuracy"], "label": FEATURES[features]})
    return lines


def verdict(runs: list[ReportedRun]) -> str:
    """Return the first sentences of the page, which say how well the training worked."""
    return _verdict_of_one(runs[0]) if len(runs) == 1 else _verdict_of_several(runs)


def _verdict_of_one(run: ReportedRun) -> str:
    probe, rows = _headline(run)
    unfinished = "" if run.finished or not run.info else "This run has not finished. "
    if "trained" not in rows:
        return unfinished + _verdict_without_accuracy(run)
    trained = rows["trained"]
    images = f"{int(trained['n']):,} test images" if trained.get("n") else "the test images"
    method = METHODS.get(probe, f"({probe})")
    text = f"The trained encoder classifies {percent(trained['accuracy'])} of {images} correctly {method}"
    controls = [rows[key] for key in CONTROLS if key in rows]
    if not controls:
        return f"{unfinished}{text}."
    others = joined([f"{percent(c['accuracy'])} for {CONTROLS[c['features']]}" for c in controls])
    best = max(controls, key=lambda control: control["accuracy"])
    return f"{unfinished}{text}, compared with {others}. {_margin(trained, best, len(controls))}"


def joined(parts: list[str]) -> str:
    """Join words to a list: a, b and c."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def _margin(trained: dict[str, Any], control: dict[str, Any], count: int) -> str:
    name = "the better control" if count < 3 else "the best control"
    points = 100 * (trained["accuracy"] - control["accuracy"])
    if points <= 0:
        below = f"is {tenths(-points)} points below" if points else "equals"
        return f"That {below} {name}: by this measure, training did not help."
    gained = f"{tenths(points)} points"
    if _overlap(trained, control):
        return f"That is {gained} above {name}, but the intervals overlap, so this is not certain."
    return f"Training gained {gained} over {name}."


def _overlap(higher: dict[str, Any], lower: dict[str, Any]) -> bool:
    return None not in (higher.get("low"), lower.get("high")) and higher["low"] <= lower["high"]


def _verdict_without_accuracy(run: ReportedRun) -> str:
    losses = [line["loss"] for line in run.lines if is_number(line.get("loss"))]
    if not losses and run.lens and not run.recipe_text:
        return "These are the lens measurements of an embeddings file; there is no training run to show."
    if not losses:
        return "No training step has been recorded yet."
    epochs = max((line["epoch"] for line in run.lines if is_number(line.get("epoch"))), default=None)
    length = f"{number(epochs)} epoch{'s' * (epochs != 1)}" if epochs and epochs >= 1 else "the steps so far"
    first, last = number(losses[0]), number(losses[-1])
    text = f"Over {length} the loss went from {first} to {last}." if first != last else f"The loss is {last}."
    if run.gallery and not any(point.get("label") is not None for point in run.gallery["points"]):
        return f"{text} The images have no labels, so there is no accuracy: judge by the map and the neighbors."
    return text if run.probes else f"{text} No probe has been run yet."


def _verdict_of_several(runs: list[ReportedRun]) -> str:
    headlines = [(run, *_headline(run)) for run in runs]
    scored = [(run, probe, rows["trained"]) for run, probe, rows in headlines if "trained" in rows]
    if len(scored) < 2 or len({probe for _, probe, _ in scored}) > 1:
        return f"{len(runs)} runs side by side."
    scored.sort(key=lambda entry: -entry[2]["accuracy"])
    (best, probe, first), (other, _, second) = scored[:2]
    result = f"{percent(first['accuracy'])} ({PROBES.get(probe, probe)})"
    points = 100 * (first["accuracy"] - second["accuracy"])
    names = [f"“{shorten(run.name)}”" for run in (best, other)]
    if points == 0:
        return f"Of {len(runs)} runs, {names[0]} and {names[1]} share the highest accuracy: {result}."
    text = f"Of {len(runs)} runs, {names[0]} is ahead with {result}, {tenths(points)} points above {names[1]}"
    return text + ("; their intervals overlap, so the order is not certain." if _overlap(first, second) else ".")


def _headline(run: ReportedRun) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return the probe that the verdict is about, with one row per kind of features."""
    own = [probe for probe in run.probes if not _protocol_value(probe, "data")]
    own = [probe for probe in own if _protocol_value(probe, "labels") == _protocol_value(own[-1], "labels")]
    names = [probe["probe"] for probe in own if probe.get("features") == "trained"]
    probe = next((name for name in PROBES if name in names), names[0] if names else "")
    rows = _with_means([_row(0, p) for p in own if p["probe"] == probe])
    return probe, {row["features"]: row for row in rows if "single" not in row}


def _protocol_value(probe: dict[str, Any], key: str) -> str:
    """Return the `data` or `labels` that a probe used instead of the run's own, or ""."""
    protocol = probe.get("protocol")
    return str(protocol.get(key) or "") if isinstance(protocol, dict) else ""


def _named_probes(run: ReportedRun) -> list[tuple[str, dict[str, Any]]]:
    """Return the probes with names that keep other data, other labels and other protocols apart."""
    named = [(_name(probe), probe) for probe in run.probes]
    seen: dict[tuple[str, str, Any], set[str]] = {}
    for name, probe in named:
        seen.setdefault((name, str(probe.get("features")), probe.get("seed")), set()).add(_protocol(probe))
    ambiguous = {name for (name, _, _), protocols in seen.items() if len(protocols) > 1}
    return [(f"{name}, {_protocol(p)}" if name in ambiguous else name, p) for name, p in named]


def _name(probe: dict[str, Any]) -> str:
    data, labels = _protocol_value(probe, "data"), _protocol_value(probe, "labels")
    return probe["probe"] + (f" on {shorten(data)}" if data else "") + (f" by {shorten(labels)}" if labels else "")


def _row(index: int, probe: dict[str, Any]) -> dict[str, Any]:
    features = str(probe.get("features", "trained"))
    return {
        "run": index,
        "features": features,
        "label": FEATURES.get(features, shorten(features)),
        **{key: probe.get(key) for key in ("accuracy", "low", "high", "n", "seed")},
        **{key: probe[key] if is_finite(probe.get(key)) else None for key in ("top5", "mean_per_class")},
        "over": probe.get("over") or "test images",
        "protocol": _protocol(probe),
    }


def _with_means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the mean over seeds, with its 95% interval (Student's t), before the rows of several seeds."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["run"], row["features"]), []).append(row)
    result = []
    for seeds in groups.values():
        if len({row["seed"] for row in seeds}) < 2:
            result += seeds
            continue
        values = [row["accuracy"] for row in seeds]
        mean, spread = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
        half = spread * STUDENT[min(len(values) - 1, len(STUDENT)) - 1]
        result.append(
            {**seeds[0], "label": f"{seeds[0]['label']}, mean of {len(values)} seeds", "over": "seeds", "seed": None,
             "accuracy": mean, "low": max(0.0, mean - half), "high": min(1.0, mean + half),
             **{key: _mean([row[key] for row in seeds]) for key in ("top5", "mean_per_class")}}
        )  # fmt: skip
        result += [{**row, "label": f"seed {row['seed']}", "single": True} for row in seeds]
    return result


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _protocol(probe: dict[str, Any]) -> str:
    protocol = probe.get("protocol")
    if not isinstance(protocol, dict):
        return "" if protocol is None else shorten(protocol)
    return shorten(", ".join(f"{k} {v if isinstance(v, str) else json.dumps(v)}" for k, v in protocol.items()))


def _count_classes(run: ReportedRun) -> int:
    """Return how many classes have images, which can be fewer than the largest label."""
    gallery = run.gallery or {}
    classes = gallery.get("classes")
    return gallery.get("classes_present", len(classes)) if classes else 0
