"""Summarizes the cells of an audit: one sentence with numbers, curves, and tables of what each learner retained."""

from __future__ import annotations

import statistics

from kontrast.probes.intervals import over_seeds, within_one
from kontrast.studies.audit.baselines import BASELINES
from kontrast.studies.cells import Record, group_by

TARGETS = {"labels": "linear probe accuracy", "retrieval": "retrieval accuracy"}
FEATURES = {"bits": "random bits", "digits": "overlaid digits"}
OBJECTIVES = {"nt-xent": "NT-Xent", "swd": "SWD", "dcl": "DCL", "cacr": "CACR", "info-nce": "InfoNCE"}
SHARED = (
    "All learners use the same encoder with the same initial weights and see the same views. The VAE uses smaller "
    "batches, and its likelihood counts a random bit once."
)
NOT_THE_OBJECTIVE = (
    "Supervised training lost at least half as much, so the cause may be the encoder or too few steps rather than the "
    "objective: try more --steps"
)
SCORES = {"background": "accuracy", "hue": "accuracy", "position": "R²", "size": "R²"}


def summarize(records: list[Record], data: str, classes: int | None) -> Record:
    """`title`, `verdict`, `plots` and `tables` of audit.json, in the form that the report reads."""
    features = list(dict.fromkeys(record["feature"] for record in records if record["status"] == "finished"))
    points = {feature: average_seeds([r for r in records if r["feature"] == feature]) for feature in features}
    done = {feature: [p for p in group if p["status"] == "finished"] for feature, group in points.items()}
    tables = [accuracy_table(group) for group in points.values()]
    tables += factor_table([p for group in done.values() for p in group])
    failed = sum(record["status"] == "failed" for record in records)
    failure = [f"{failed} training{'s' * (failed > 1)} failed."] if failed else []
    return {
        "title": f"Which features are suppressed on {data}",
        "verdict": " ".join([*map(verdict, done.values()), *failure]) or "No training has finished yet.",
        "plots": [plot for group in done.values() for plot in curves(group, classes)],
        "tables": tables,
    }


def average_seeds(records: list[Record]) -> list[Record]:
    """One record per learner and amount: the mean over its finished seeds, or a failed record if all seeds failed.

    The 95% interval is Student's over several seeds, and over the test images for a single one.
    """
    groups = group_by(records, "learner", "amount").values()
    return [average([r for r in group if r["status"] == "finished"]) or group[0] for group in groups]


def average(seeds: list[Record]) -> Record | None:
    if len(seeds) < 2:
        return {**seeds[0], "seeds": 1} if seeds else None
    values = [record["accuracy"] for record in seeds]
    low, high = within_one(over_seeds(values))  # type: ignore[misc]
    added = [record["injected"] for record in seeds if record["injected"] is not None]
    factors = {name: statistics.fmean(r["factors"][name] for r in seeds) for name in seeds[0]["factors"]}
    mean = {"accuracy": statistics.fmean(values), "low": low, "high": high, "factors": factors}
    return {**seeds[0], "seeds": len(seeds), **mean, "injected": statistics.fmean(added) if added else None}


def by_learner(records: list[Record]) -> dict[str, list[Record]]:
    return {name: sorted(group, key=lambda r: r["amount"]) for name, group in group_by(records, "learner").items()}


def describe_interval(points: list[Record]) -> str:
    seeds = {p.get("seeds", 1) for p in points}
    over = "test images" if seeds == {1} else "seeds" if len(seeds) > 1 else f"{seeds.pop()} seeds"
    return f"the 95% interval over {over}"


def display_name(learner: str) -> str:
    """`nt-xent 0.1` as "NT-Xent at temperature 0.1"."""
    name, _, temperature = learner.partition(" ")
    shown = OBJECTIVES.get(name, name)
    return f"{shown} at temperature {temperature}" if temperature else shown


def verdict(cells: list[Record]) -> str:
    """One sentence about the objective that lost most accuracy, with the baselines for comparison."""
    groups = {name: group for name, group in by_learner(cells).items() if len(group) > 1}
    objectives = [group for name, group in groups.items() if name not in BASELINES]
    if not objectives:
        return "A single amount of the added feature shows no trend: give at least two."
    worst = max(objectives, key=loss_of_accuracy)
    first, last = worst[0], worst[-1]
    what = f"the {TARGETS[first['target']]} of {display_name(first['learner'])}"
    verb = "lowered" if last["accuracy"] < first["accuracy"] else "did not lower"
    change = " from" if last["accuracy"] < first["accuracy"] else ", which went from"
    text = f"{last['amount']} {FEATURES[last['feature']]} {verb} {what}{change} {change_of_accuracy(worst)}"
    for name, shown in (("VAE", "the VAE"), ("supervised", "supervised training")):
        if name in groups:
            text += f"; {shown} went from {change_of_accuracy(groups[name])}"
    if last.get("seeds", 1) > 1:
        text += f" (means of {last['seeds']} seeds)"
    loss = loss_of_accuracy(worst)
    if loss > 0 and "supervised" in groups and loss_of_accuracy(groups["supervised"]) >= 0.5 * loss:
        text += f". {NOT_THE_OBJECTIVE}"
    return f"{text}."


def loss_of_accuracy(group: list[Record]) -> float:
    return group[0]["accuracy"] - group[-1]["accuracy"]


def change_of_accuracy(group: list[Record]) -> str:
    return f"{group[0]['accuracy']:.2f} to {group[-1]['accuracy']:.2f}"


def curves(cells: list[Record], classes: int | None) -> list[Record]:
    """Accuracy of the labels, and of the added feature, against its amount."""
    groups = by_learner(cells)
    feature, target = cells[0]["feature"], cells[0]["target"]
    drops = {name: loss_of_accuracy(group) for name, group in groups.items() if name != "untrained" or len(groups) == 1}
    most = max(drops, key=lambda name: drops[name])
    plots = [
        {"id": f"audit-{feature}", "kind": "line",
         "title": curve_title(display_name(most), 100 * drops[most], feature, len(groups[most])),
         "note": f"The {TARGETS[target]} on held-out images; the band is {describe_interval(cells)}. {SHARED}",
         "x": {"label": FEATURES[feature], "whole": True, "zero": feature == "bits"},
         "y": {"label": "accuracy", "format": "percent", "zero": True},
         "series": [line(name, group, "accuracy") for name, group in groups.items()],
         "references": [{"y": 1 / classes, "label": "chance"}] if classes and target == "labels" else []}
    ]  # fmt: skip
    injected = {name: [c for c in group if c["injected"] is not None] for name, group in groups.items()}
    series = [line(name, group, "injected") for name, group in injected.items() if group]
    if series:
        what = "random bits (mean)" if feature == "bits" else "overlaid digit"
        plots.append(
            {**plots[0], "id": f"audit-{feature}-injected", "title": f"Linear probe accuracy of the {what}",
             "note": "Linear probes of the added feature on the same representations.", "series": series,
             "references": [{"y": 0.5, "label": "chance"}] if feature == "bits" else []}
        )  # fmt: skip
    return plots


def curve_title(most: str, points: float, feature: str, amounts: int) -> str:
    """Name the learner that lost most accuracy, if there are several amounts and any learner lost a point."""
    if amounts < 2:
        return f"What each learner retains with {FEATURES[feature]}"
    if round(points) < 1:
        return f"No learner loses accuracy as {FEATURES[feature]} are added"
    return f"{most} loses most accuracy, {points:.0f} points, as {FEATURES[feature]} are added"


def line(name: str, group: list[Record], key: str) -> Record:
    made: Record = {"name": display_name(name), "x": [c["amount"] for c in group], "y": [c[key] for c in group]}
    if key == "accuracy":
        made |= {"low": [c["low"] for c in group], "high": [c["high"] for c in group]}
    return made


def accuracy_table(records: list[Record]) -> Record:
    """Accuracy of each learner by the amount of the added feature."""
    amounts = sorted({record["amount"] for record in records})
    rows = []
    for name, group in by_learner(records).items():
        found = {c["amount"]: c for c in group}
        rows.append([display_name(name), *(cell_text(found.get(amount)) for amount in amounts)])
    target = next((r["target"] for r in records if "target" in r), "labels")
    title = f"{TARGETS[target][:1].upper()}{TARGETS[target][1:]} by number of {FEATURES[records[0]['feature']]}"
    done = [r for r in records if r["status"] == "finished"]
    note = (
        f"Accuracy, {describe_interval(done)}, and in parentheses the accuracy of linear probes of the added feature."
    )
    return {"title": title, "note": f"{note} {SHARED}", "columns": ["learner", *map(str, amounts)], "rows": rows}


def cell_text(cell: Record | None) -> str:
    if cell is None or cell["status"] == "failed":
        return "failed" if cell else "–"
    injected = "" if cell["injected"] is None else f" ({cell['injected']:.2f})"
    return f"{cell['accuracy']:.3f}, {cell['low']:.3f} to {cell['high']:.3f}{injected}"


def factor_table(done: list[Record]) -> list[Record]:
    """A table of how well linear probes read the known factors from each learner; none if there are no factors."""
    with_factors = [cell for cell in done if cell.get("factors")]
    if not with_factors:
        return []
    names = [name for name in SCORES if name in with_factors[0]["factors"]]
    rows = []
    for cell in with_factors:
        title = f"{display_name(cell['learner'])}, {cell['amount']} {cell['feature']}"
        rows.append([title, f"{cell['accuracy']:.2f}", *(f"{cell['factors'][name]:.2f}" for name in names)])
    columns = ["learner", "digit (accuracy)", *(f"{name} ({SCORES[name]})" for name in names)]
    note = "Linear probes of the known factors of the embedded digits. Chance: digit 0.10, background 0.06, hue 0.12."
    return [{"title": "What each learner retained", "note": note, "columns": columns, "rows": rows}]
