"""An audit's cells to what a person reads: one sentence with numbers, curves, and a table of what each learner kept."""

from __future__ import annotations

from typing import Any

Cell = dict[str, Any]
BASELINES = ("supervised", "VAE")
TARGETS = {"labels": "probe of the labels", "retrieval": "retrieval of the image"}
FEATURES = {"bits": "bits of shared noise", "digits": "unique digits laid over"}
OBJECTIVES = {"nt-xent": "NT-Xent", "swd": "SWD", "dcl": "DCL", "cacr": "CACR", "info-nce": "InfoNCE"}
OWN_ENCODER = "The VAE has an encoder of its own, which keeps each channel's mean apart; the others share the recipe's."
SCORES = {"background": "accuracy", "hue": "accuracy", "position": "R²", "size": "R²"}


def findings(records: list[Cell], data: str, classes: int | None) -> dict[str, Any]:
    """`title`, `verdict`, `plots` and `tables`, in the form that the page reads."""
    done = [record for record in records if record["status"] == "finished"]
    features = list(dict.fromkeys(record["feature"] for record in done))
    plots = [plot for feature in features for plot in curves([r for r in done if r["feature"] == feature], classes)]
    tables = [accuracy_table([r for r in records if r["feature"] == feature]) for feature in features]
    tables += [table for table in [kept_table(done)] if table]
    return {
        "title": f"What suppresses what on {data}",
        "verdict": " ".join(sentence([r for r in done if r["feature"] == f], data) for f in features) or "Nothing yet.",
        "plots": plots,
        "tables": tables,
    }


def by_learner(records: list[Cell]) -> dict[str, list[Cell]]:
    groups: dict[str, list[Cell]] = {}
    for record in sorted(records, key=lambda r: r["amount"]):
        groups.setdefault(record["learner"], []).append(record)
    order = list(dict.fromkeys(r["learner"] for r in records))
    return {name: groups[name] for name in order}


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
    drops = {name: fall(group) for name, group in groups.items()}
    most = max(drops, key=lambda name: drops[name])
    plots = [
        {
            "id": f"audit-{feature}",
            "title": f"{words(most)} loses most: {100 * drops[most]:.0f} points as {FEATURES[feature]} grow",
            "note": f"The {TARGETS[target]} on held-out images; the shade is the 95% interval over them. {OWN_ENCODER}",
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
    note = (
        "Accuracy, 95% interval over test images, and in brackets how well the injected feature is read. " + OWN_ENCODER
    )
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
