"""probes.json to the result beside its controls, and one sentence that says what came out."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

from kontrast.reports.curves import number, percent, tenths
from kontrast.reports.run_files import ReportedRun, is_number, shorten

FEATURES = {"trained": "trained encoder", "untrained": "untrained encoder", "pixels": "raw pixels"}
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t for a 95% interval, of 1 to 10 degrees of freedom; more seeds take the last, which is a little wide."""
CONTROLS = {"untrained": "the same encoder untrained", "pixels": "raw pixels"}
WORDS = {"knn": "kNN", "linear": "linear probe", "logistic": "logistic probe", "finetune": "fine-tuned"}
HOW = {
    "knn": "by its nearest neighbours",
    "linear": "with a linear layer on top",
    "logistic": "with a linear layer on top",
}


def result_groups(runs: list[ReportedRun]) -> list[dict[str, Any]]:
    """One group a probe, kNN first; in it one row for each run and kind of features."""
    groups: dict[str, dict[str, Any]] = {}
    counts = {count for count in map(_classes, runs) if count}
    chance = 1 / counts.pop() if len(counts) == 1 else None
    for place, run in enumerate(runs):
        for key, probe in _labelled(run):
            title = WORDS.get(probe["probe"], probe["probe"]) + key.removeprefix(probe["probe"])
            group = groups.setdefault(key, {"probe": key, "title": title, "rows": []})
            group["rows"].append(_row(place, probe))
            group["chance"] = None if _elsewhere(probe) or len({_labels(p) for p in run.probes}) > 1 else chance
    for group in groups.values():
        order = list(FEATURES)
        group["rows"] = _with_means(group["rows"])
        group["rows"].sort(
            key=lambda row: (order.index(row["features"]) if row["features"] in order else 9, row["run"])
        )
    return sorted(groups.values(), key=lambda group: [*WORDS, group["probe"]].index(group["probe"]))


def references(run: ReportedRun) -> dict[str, list[dict[str, Any]]]:
    """Horizontal lines for the accuracy curves: what the controls reach."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for probe in run.probes:
        features = str(probe.get("features"))
        if not _elsewhere(probe) and not _labels(probe) and features in ("untrained", "pixels"):
            lines.setdefault(probe["probe"], []).append({"y": probe["accuracy"], "label": FEATURES[features]})
    return lines


def verdict(runs: list[ReportedRun]) -> str:
    """The page's first sentence."""
    if not runs:
        return ""
    return _one(runs[0]) if len(runs) == 1 else _several(runs)


def _one(run: ReportedRun) -> str:
    probe, found = _headline(run)
    unfinished = "" if run.finished or not run.info else "This run has not finished. "
    if not found or "trained" not in found:
        return unfinished + _without_labels(run)
    trained = found["trained"]
    tested = f"{int(trained['n']):,} test images" if trained.get("n") else "the test images"
    text = f"The trained encoder names {percent(trained['accuracy'])} of {tested} right {HOW.get(probe, f'({probe})')}"
    controls = [found[key] for key in ("pixels", "untrained") if key in found]
    if not controls:
        return f"{unfinished}{text}."
    against = " and ".join(f"{percent(c['accuracy'])} for {CONTROLS[c['features']]}" for c in controls)
    best = max(controls, key=lambda control: control["accuracy"])
    return f"{unfinished}{text}, against {against}. {_margin(trained, best)}"


def _margin(trained: dict[str, Any], control: dict[str, Any]) -> str:
    points = 100 * (trained["accuracy"] - control["accuracy"])
    if points > 0 and None not in (trained.get("low"), control.get("high")) and trained["low"] <= control["high"]:
        return f"That is {tenths(points)} points over the better control, but the intervals overlap: not settled."
    if points == 0:
        return "That is what the better control reaches: on this measure training did not help."
    if points < 0:
        return f"That is {tenths(abs(points))} points under the better control: on this measure training did not help."
    return f"Training is worth {tenths(points)} points over the better control."


def _without_labels(run: ReportedRun) -> str:
    losses = [line["loss"] for line in run.lines if is_number(line.get("loss"))]
    if not losses and run.lens and not run.recipe_text:  # of a file of embeddings
        return "What the lens found in these vectors; there is no run to them here."
    if not losses:
        return "No training step is recorded in this folder yet."
    epochs = max((line["epoch"] for line in run.lines if is_number(line.get("epoch"))), default=None)
    length = f"{number(epochs)} epoch{'s' * (epochs != 1)}" if epochs and epochs >= 1 else "the steps so far"
    first, last = number(losses[0]), number(losses[-1])
    text = f"Over {length} the loss went from {first} to {last}." if first != last else f"The loss stands at {last}."
    if run.gallery and not any(point.get("label") is not None for point in run.gallery["points"]):
        return f"{text} The images carry no labels, so there is no accuracy: judge by the map and the neighbours."
    return text if run.probes else f"{text} No probe has measured it yet."


def _several(runs: list[ReportedRun]) -> str:
    headlines = [(run, *_headline(run)) for run in runs]
    scored = [(run, probe, found["trained"]) for run, probe, found in headlines if "trained" in found]
    probes = {probe for _, probe, _ in scored}
    if len(scored) < 2 or len(probes) > 1:
        return f"{len(runs)} runs side by side."
    scored.sort(key=lambda entry: -entry[2]["accuracy"])
    (best, probe, first), (other, _, second) = scored[:2]
    points = 100 * (first["accuracy"] - second["accuracy"])
    if points == 0:
        equal = f"“{shorten(best.name)}” and “{shorten(other.name)}” are highest"
        return f"Of {len(runs)} runs {equal}, equally: {percent(first['accuracy'])} by {WORDS.get(probe, probe)}."
    text = f"Of {len(runs)} runs “{shorten(best.name)}” is ahead: {percent(first['accuracy'])} by "
    text += f"{WORDS.get(probe, probe)}, {tenths(points)} points over “{shorten(other.name)}”"
    overlap = None not in (first.get("low"), second.get("high")) and first["low"] <= second["high"]
    return text + ("; their intervals overlap, so the order is not settled." if overlap else ".")


def _headline(run: ReportedRun) -> tuple[str, dict[str, dict[str, Any]]]:
    """The probe that the sentence speaks of, with its entry for each kind of features."""
    own = [probe for probe in run.probes if not _elsewhere(probe)]
    own = [probe for probe in own if _labels(probe) == _labels(own[-1])]
    names = [probe["probe"] for probe in own if probe.get("features") == "trained"]
    probe = next((name for name in WORDS if name in names), names[0] if names else "")
    rows = _with_means([_row(0, p) for p in own if p["probe"] == probe])
    return probe, {row["features"]: row for row in rows if "single" not in row}


def _elsewhere(probe: dict[str, Any]) -> str:
    """The data that a probe was made on, where it is not the run's own."""
    protocol = probe.get("protocol")
    return str(protocol.get("data") or "") if isinstance(protocol, dict) else ""


def _labels(probe: dict[str, Any]) -> str:
    """The file of labels that a probe went by, where they are not the images' own."""
    protocol = probe.get("protocol")
    return str(protocol.get("labels") or "") if isinstance(protocol, dict) else ""


def _labelled(run: ReportedRun) -> list[tuple[str, dict[str, Any]]]:
    """Probes under their name, and those of data and labels where they are not the run's own, so that a result and its
    controls stand together; where one name stands for several protocols, the protocol is part of it."""
    named = [(_name(probe), probe) for probe in run.probes]
    seen: dict[tuple[str, str, Any], set[str]] = {}
    for name, probe in named:
        seen.setdefault((name, str(probe.get("features")), probe.get("seed")), set()).add(_protocol(probe))
    several = {name for (name, _, _), protocols in seen.items() if len(protocols) > 1}
    return [(f"{name}, {_protocol(p)}" if name in several else name, p) for name, p in named]


def _name(probe: dict[str, Any]) -> str:
    on = f" on {shorten(_elsewhere(probe))}" if _elsewhere(probe) else ""
    return f"{probe['probe']}{on}" + (f" by {shorten(_labels(probe))}" if _labels(probe) else "")


def _row(place: int, probe: dict[str, Any]) -> dict[str, Any]:
    features = str(probe.get("features", "trained"))
    return {
        "run": place,
        "features": features,
        "label": FEATURES.get(features, shorten(features)),
        **{key: probe.get(key) for key in ("accuracy", "low", "high", "n", "seed")},
        "over": probe.get("over") or "test images",
        "protocol": _protocol(probe),
    }


def _with_means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several seeds of one probe of one run, led by their mean and its 95% interval over seeds (Student's t)."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["run"], row["features"]), []).append(row)
    found = []
    for seeds in groups.values():
        if len({row["seed"] for row in seeds}) < 2:
            found += seeds
            continue
        values = [row["accuracy"] for row in seeds]
        mean, spread = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
        half = spread * STUDENT[min(len(values) - 1, len(STUDENT)) - 1]
        found.append(
            {**seeds[0], "label": f"{seeds[0]['label']}, mean of {len(values)} seeds", "over": "seeds", "seed": None,
             "accuracy": mean, "low": max(0.0, mean - half), "high": min(1.0, mean + half)}
        )  # fmt: skip
        found += [{**row, "label": f"seed {row['seed']}", "single": True} for row in seeds]
    return found


def _protocol(probe: dict[str, Any]) -> str:
    protocol = probe.get("protocol")
    if not isinstance(protocol, dict):
        return "" if protocol is None else shorten(protocol)
    parts = [f"{key} {value if isinstance(value, str) else json.dumps(value)}" for key, value in protocol.items()]
    return shorten(", ".join(parts))


def _classes(run: ReportedRun) -> int:
    """How many classes have images: labels may be numbers between which others are missing."""
    gallery = run.gallery or {}
    present, classes = gallery.get("classes_present"), gallery.get("classes")
    if not isinstance(classes, list):
        return 0
    return present if isinstance(present, int) and 0 < present <= len(classes) else len(classes)
