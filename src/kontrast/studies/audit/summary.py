"""An audit's cells to what a person reads: one sentence with numbers, curves, and a table of what each learner kept."""

from __future__ import annotations

import statistics
from typing import Any

from kontrast.probes.intervals import over_seeds
from kontrast.studies.schema import ANY, MAYBE_NUMBER, NUMBER, TEXT, WHOLE

Cell = dict[str, Any]
BASELINES = ("supervised", "VAE", "untrained")
TARGETS = {"labels": "probe of the labels", "retrieval": "retrieval of the image"}
FEATURES = {"bits": "bits of shared noise", "digits": "unique digits laid over"}
OBJECTIVES = {"nt-xent": "NT-Xent", "swd": "SWD", "dcl": "DCL", "cacr": "CACR", "info-nce": "InfoNCE"}
SHARED = (
    "All learners have the same encoder, which starts from the same weights and sees the same views; the VAE in "
    "smaller batches, and to its likelihood a bit counts once."
)
SCORES = {"background": "accuracy", "hue": "accuracy", "position": "R²", "size": "R²"}
CELL_FACTS = {"learner": TEXT, "feature": TEXT, "amount": WHOLE, "seed": WHOLE, "fingerprint": TEXT}
CELL_NUMBERS: Cell = {"target": TEXT, "accuracy": NUMBER, "low": NUMBER, "high": NUMBER, "injected": MAYBE_NUMBER}
CELL_NUMBERS |= {"factors": {ANY: NUMBER}, "run?": TEXT}
"""What a cell's record must hold: every one, and a finished one."""


def findings(records: list[Cell], data: str, classes: int | None) -> dict[str, Any]:
    """`title`, `verdict`, `plots` and `tables`, in the form that the page reads."""
    features = list(dict.fromkeys(record["feature"] for record in records if record["status"] == "finished"))
    points = {feature: merged([r for r in records if r["feature"] == feature]) for feature in features}
    done = {feature: [p for p in found if p["status"] == "finished"] for feature, found in points.items()}
    tables = [accuracy_table(found) for found in points.values()]
    tables += [table for table in [kept_table([p for found in done.values() for p in found])] if table]
    return {
        "title": f"What suppresses what on {data}",
        "verdict": " ".join(sentence(found, data) for found in done.values()) or "Nothing yet.",
        "plots": [plot for found in done.values() for plot in curves(found, classes)],
        "tables": tables,
    }


def merged(records: list[Cell]) -> list[Cell]:
    """One point for the seeds of a cell: their mean, with the 95% interval of Student's t over them where there are
    several, else the one seed's own over test images. A cell all of whose seeds failed stays failed."""
    groups: dict[tuple[str, int], list[Cell]] = {}
    for record in records:
        groups.setdefault((record["learner"], record["amount"]), []).append(record)
    return [point([r for r in group if r["status"] == "finished"]) or group[0] for group in groups.values()]


def point(seeds: list[Cell]) -> Cell | None:
    if len(seeds) < 2:
        return {**seeds[0], "seeds": 1} if seeds else None
    values = [record["accuracy"] for record in seeds]
    low, high = over_seeds(values)  # type: ignore[misc]
    read = [record["injected"] for record in seeds if record["injected"] is not None]
    factors = {n: statistics.fmean(r["factors"][n] for r in seeds) for n in seeds[0]["factors"]}
    return {
        **seeds[0],
        "seeds": len(seeds),
        "accuracy": statistics.fmean(values),
        "low": max(0.0, low),
        "high": min(1.0, high),
        "injected": statistics.fmean(read) if read else None,
        "factors": factors,
    }


def by_learner(records: list[Cell]) -> dict[str, list[Cell]]:
    groups: dict[str, list[Cell]] = {}
    for record in sorted(records, key=lambda r: r["amount"]):
        groups.setdefault(record["learner"], []).append(record)
    order = list(dict.fromkeys(r["learner"] for r in records))
    return {name: groups[name] for name in order}


def interval_words(points: list[Cell]) -> str:
    seeds = {p.get("seeds", 1) for p in points}
    if seeds == {1}:
        return "the 95% interval over test images"
    return f"the 95% interval over {'seeds' if len(seeds) > 1 else f'{seeds.pop()} seeds'}"


def words(learner: str) -> str:
    """`nt-xent 0.1` as a person says it."""
    name, _, temperature = learner.partition(" ")
    said = OBJECTIVES.get(name, name)
    return f"{said} at temperature {temperature}" if temperature else said


def sentence(cells: list[Cell], data: str) -> str:
    """The learner that lost most, beside the baselines: where each began and where it ended."""
    groups = {name: group for name, group in by_learner(cells).items() if len(group) > 1}
    objectives = [group for name, group in groups.items() if name not in BASELINES]
    if not objectives:
        return "One amount of the injected feature shows no trend: give at least two."
    worst = max(objectives, key=fall)
    first, last = worst[0], worst[-1]
    what = "digit probe" if data == "digits" and first["target"] == "labels" else TARGETS[first["target"]]
    verb = "took" if last["accuracy"] < first["accuracy"] else "left"
    text = f"{words(first['learner'])}: {last['amount']} {FEATURES[last['feature']]} {verb} the {what} from "
    text += f"{first['accuracy']:.2f} to {last['accuracy']:.2f}"
    for name, article in (("VAE", "the VAE"), ("supervised", "supervised training")):
        if name in groups:
            text += f"; {article} went from {groups[name][0]['accuracy']:.2f} to {groups[name][-1]['accuracy']:.2f}"
    if last.get("seeds", 1) > 1:
        text += f" (means of {last['seeds']} seeds)"
    return f"{text}.{caution(fall(worst), groups.get('supervised'))}"


def fall(group: list[Cell]) -> float:
    return group[0]["accuracy"] - group[-1]["accuracy"]


def caution(worst: float, supervised: list[Cell] | None) -> str:
    """Where labels don't save the same encoder either, the objective is not what suppresses."""
    if supervised is None or worst <= 0 or fall(supervised) < 0.5 * worst:
        return ""
    return (
        " Labels did not save the same encoder either: blame the encoder and the few steps before the objective, "
        "and give more --steps."
    )


def curves(cells: list[Cell], classes: int | None) -> list[dict[str, Any]]:
    """Accuracy on the true labels, and on the injected feature, against its amount."""
    groups = by_learner(cells)
    feature, target = cells[0]["feature"], cells[0]["target"]
    drops = {name: fall(group) for name, group in groups.items() if name != "untrained" or len(groups) == 1}
    most = max(drops, key=lambda name: drops[name])
    plots = [
        {
            "id": f"audit-{feature}",
            "title": curve_title(words(most), 100 * drops[most], feature, len(groups[most])),
            "note": f"The {TARGETS[target]} on held-out images; the shade is {interval_words(cells)}. {SHARED}",
            "kind": "line",
            "x": {"label": FEATURES[feature], "whole": True, "zero": feature == "bits"},
            "y": {"label": "accuracy", "format": "percent", "zero": True},
            "series": [line(name, group, "accuracy") for name, group in groups.items()],
            "references": [{"y": 1 / classes, "label": "chance"}] if classes and target == "labels" else [],
        }
    ]
    injected = {name: [c for c in group if c["injected"] is not None] for name, group in groups.items()}
    series = [line(name, group, "injected") for name, group in injected.items() if group]
    if series:
        read = "the bits, mean over them" if feature == "bits" else "the class of the overlaid digit"
        plots.append(
            {**plots[0], "id": f"audit-{feature}-injected", "title": f"How well a line reads {read}",
             "note": "Linear probes of the injected feature on the same features.", "series": series,
             "references": [{"y": 0.5, "label": "chance"}] if feature == "bits" else []}
        )  # fmt: skip
    return plots


def curve_title(most: str, points: float, feature: str, amounts: int) -> str:
    """Who loses most; of one amount there is no loss to speak of, and it may be that nobody loses."""
    if amounts < 2:
        return f"What each learner keeps beside {FEATURES[feature]}"
    if round(points) < 1:
        return f"No learner loses a point as {FEATURES[feature]} grow"
    return f"{most} loses most: {points:.0f} points as {FEATURES[feature]} grow"


def line(name: str, group: list[Cell], key: str) -> dict[str, Any]:
    made: dict[str, Any] = {"name": words(name), "x": [c["amount"] for c in group], "y": [c[key] for c in group]}
    if key == "accuracy":
        made |= {"low": [c["low"] for c in group], "high": [c["high"] for c in group]}
    return made


def accuracy_table(records: list[Cell]) -> dict[str, Any]:
    """Learners by amounts; a failed cell says so."""
    amounts = sorted({record["amount"] for record in records})
    rows = []
    for name, group in by_learner(records).items():
        found = {c["amount"]: c for c in group}
        rows.append([words(name), *(cell_text(found.get(amount)) for amount in amounts)])
    target = next((r["target"] for r in records if "target" in r), "labels")
    title = f"{TARGETS[target][:1].upper()}{TARGETS[target][1:]} by {FEATURES[records[0]['feature']]}"
    done = [r for r in records if r["status"] == "finished"]
    note = f"Accuracy, {interval_words(done)}, and in brackets how well the injected feature is read. {SHARED}"
    return {"title": title, "note": note, "columns": ["learner", *map(str, amounts)], "rows": rows}


def cell_text(cell: Cell | None) -> str:
    if cell is None:
        return "–"
    if cell["status"] == "failed":
        return "failed"
    injected = "" if cell["injected"] is None else f" ({cell['injected']:.2f})"
    return f"{cell['accuracy']:.3f}, {cell['low']:.3f} to {cell['high']:.3f}{injected}"


def kept_table(done: list[Cell]) -> dict[str, Any] | None:
    """What each learner kept of the known factors, from no injected feature to most of it."""
    with_factors = [cell for cell in done if cell.get("factors")]
    if not with_factors:
        return None
    names = [name for name in SCORES if name in with_factors[0]["factors"]]
    rows = []
    for cell in with_factors:
        title = f"{words(cell['learner'])}, {cell['amount']} {cell['feature']}"
        rows.append([title, f"{cell['accuracy']:.2f}", *(f"{cell['factors'][name]:.2f}" for name in names)])
    columns = ["learner", "digit (accuracy)", *(f"{name} ({SCORES[name]})" for name in names)]
    note = "Linear probes of every known factor of the embedded digits. Chance: digit 0.10, background 0.06, hue 0.12."
    return {"title": "What each learner kept", "note": note, "columns": columns, "rows": rows}
