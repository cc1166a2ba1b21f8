"""Summarizes the cells of a comparison: means over seeds with intervals, paired differences, time and memory."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kontrast.probes.intervals import over_images, over_seeds, unpack_bits, within_one
from kontrast.studies.cells import Record, group_by

PROBE_NAMES = {"knn": "kNN", "linear": "linear probe"}
COLUMNS = ("recipe", "accuracy", "over seeds", "over images", "difference", "over seeds", "over images")


def summarize(out: Path, names: list[str], grid: dict[str, list[Any]], records: list[Record]) -> dict[str, Any]:
    """The content of comparison.json for these cells."""
    groups = group_by(records, "configuration")
    rows = [summarize_row(cells, find_reference(cells[0], names, groups)) for cells in groups.values()]
    seeds = sorted({record["seed"] for record in records})
    tree = {"names": names, "sweeps": grid, "seeds": seeds, "verdict": verdict(rows, groups), "rows": rows}
    tree |= {"tables": make_tables(rows), "plots": plot_sweeps(rows, grid)}
    runs = [str(record["run"]) for record in records if (out / record["run"] / "recipe.toml").is_file()]
    return {**tree, "runs": runs, "cells": records}


def find_reference(cell: Record, names: list[str], groups: dict[str, Any]) -> list[Record]:
    """The cells that a configuration is compared with: the first recipe at the same swept values.

    The first recipe itself is compared with its first swept value, which has no reference.
    """
    firsts = [cells for cells in groups.values() if cells[0]["recipe"] == names[0]]
    if cell["recipe"] == names[0]:
        return [] if not firsts or firsts[0][0] is cell else firsts[0]
    return next((cells for cells in firsts if cells[0]["sweep"] == cell["sweep"]), [])


def summarize_row(cells: list[Record], against: list[Record]) -> Record:
    done = [cell for cell in cells if cell["status"] == "finished"]
    probes = {name: None for cell in done for name in cell["probes"]}
    memory = [cell["peak_memory_bytes"] for cell in done if cell["peak_memory_bytes"]]
    return {
        **{key: cells[0][key] for key in ("configuration", "recipe", "sweep")},
        "finished": len(done),
        "failed": [{"seed": c["seed"], "reason": c["reason"]} for c in cells if c["status"] == "failed"],
        "seconds": statistics.fmean(cell["seconds"] for cell in done) if done else None,
        "peak_memory_bytes": max(memory) if memory else None,
        "probes": {name: mean_accuracy(done, name) for name in probes},
        "against": against[0]["configuration"] if against else None,
        "differences": {name: difference(done, against, name) for name in probes} if against else {},
    }


def mean_accuracy(done: list[Record], probe: str) -> Record:
    values = [cell["probes"][probe]["accuracy"] for cell in done if probe in cell["probes"]]
    by_image = torch.stack([correct_images(cell, probe) for cell in done]).double().mean(0)
    return mean_and_intervals(values, by_image)


def mean_and_intervals(values: list[float], by_image: Tensor, least: float = 0.0) -> Record:
    """The mean of one value per seed with its 95% intervals; by_image [T]: means over the seeds."""
    intervals = {"over_seeds": within_one(over_seeds(values), least), "over_images": over_images(by_image)}
    return {"mean": statistics.fmean(values), "by_seed": values, **intervals}


def difference(done: list[Record], against: list[Record], probe: str) -> Record | None:
    """The accuracy minus the reference's, paired by seed and by image.

    None if no seed finished in both on the same test images (a sweep may change the data).
    """
    others = {cell["seed"]: cell for cell in against if cell["status"] == "finished"}
    pairs = [(cell, others[cell["seed"]]) for cell in done if cell["seed"] in others]
    pairs = [(a, b) for a, b in pairs if same_test_images(a, b, probe)]
    if not pairs:
        return None
    by_image = torch.stack([correct_images(a, probe).double() - correct_images(b, probe).double() for a, b in pairs])
    return mean_and_intervals(by_image.mean(1).tolist(), by_image.mean(0), least=-1.0)


def same_test_images(a: Record, b: Record, probe: str) -> bool:
    """Tell whether two cells were probed on the same images; older versions stored only the number of images."""
    if probe not in a["probes"] or probe not in b["probes"]:
        return False
    fingerprints = [cell.get("images", {}).get("test") for cell in (a, b)]
    return a["probes"][probe]["n"] == b["probes"][probe]["n"] and (None in fingerprints or len(set(fingerprints)) == 1)


def correct_images(cell: Record, probe: str) -> Tensor:
    """Which test images [T] the probe classified correctly."""
    entry = cell["probes"][probe]
    return unpack_bits(entry["correct"], entry["n"])


def verdict(rows: list[Record], groups: dict[str, list[Record]]) -> str:
    """One sentence: which recipe is best, by how much, and whether the difference is significant."""
    failed = sum(len(row["failed"]) for row in rows)
    tail = f" {failed} run{'s' * (failed > 1)} failed." if failed else ""
    probe = next((name for name in ("linear", "knn") if any(name in row["probes"] for row in rows)), "")
    scored = sorted((row for row in rows if probe in row["probes"]), key=lambda row: -row["probes"][probe]["mean"])
    if not scored:
        return "The data have no labels, so there are no accuracies: compare the curves." + tail
    (first, best), *others = [(row["configuration"], f"{row['probes'][probe]['mean']:.3f}") for row in scored]
    if not others:
        return f"{first} has a {PROBE_NAMES[probe]} accuracy of {best}.{tail}"
    second, next_best = others[0]
    equal = [name for name, mean in others if mean == best]
    text = f"{first} has the highest {PROBE_NAMES[probe]} accuracy, {best}, followed by {second} with {next_best}"
    if equal:
        names = f"{', '.join([first, *equal[:-1]])} and {equal[-1]}"
        text = f"{names} have the same {PROBE_NAMES[probe]} accuracy, {best}"
    return f"{text}; {describe_gap(groups[first], groups[second], probe)}.{tail}"


def describe_gap(best: list[Record], second: list[Record], probe: str) -> str:
    """The interval of the difference between the first two, and whether it is significant.

    It is significant only if the intervals over seeds and over test images both exclude zero: on a few images all seeds
    may have the same difference by chance.
    """
    gap = difference([cell for cell in best if cell["status"] == "finished"], second, probe)
    if gap is None:
        return "no seed finished in both on the same test images"
    kind, name = ("over_seeds", "seeds") if gap["over_seeds"] else ("over_images", "test images")
    text = f"the 95% interval of the paired difference is {span(gap[kind], '+')} over {name}"
    if gap[kind][0] > 0 and gap["over_images"][0] <= 0:
        text += f" but {span(gap['over_images'], '+')} over test images"
    significant = min(gap[kind][0], gap["over_images"][0]) > 0
    return text if significant else f"{text}, so the difference is not significant"


def make_tables(rows: list[Record]) -> list[Record]:
    """One table of accuracies per probe, and one of time and memory."""
    note = (
        "Accuracies are means over seeds, with 95% intervals over seeds and over test images. Differences are "
        "paired by seed and by image. The reference is the first recipe at the same swept values; for the first "
        "recipe itself it is its first swept value."
    )
    tables = [
        {"title": f"Accuracy, {name}: same data, views, seeds and budget", "columns": list(COLUMNS),
         "rows": [accuracy_line(row, probe) for row in rows], "note": note}
        for probe, name in PROBE_NAMES.items()
        if any(probe in row["probes"] for row in rows)
    ]  # fmt: skip
    cost: Record = {"title": "Time and memory", "columns": ["recipe", "time", "peak memory", "runs"]}
    cost |= {"rows": list(map(cost_line, rows)), "note": "Time is the mean of the runs, memory their maximum."}
    return [*tables, cost]


def accuracy_line(row: Record, probe: str) -> list[str]:
    found, gap = row["probes"].get(probe), row["differences"].get(probe)
    line = [f"{found['mean']:.3f}", span(found["over_seeds"]), span(found["over_images"])] if found else ["–"] * 3
    apart = [f"{gap['mean']:+.3f}", span(gap["over_seeds"], "+"), span(gap["over_images"], "+")] if gap else ["–"] * 3
    return [row["configuration"], *line, *apart]


def cost_line(row: Record) -> list[str]:
    seconds, memory = row["seconds"], row["peak_memory_bytes"]
    failed = f", {len(row['failed'])} failed" if row["failed"] else ""
    time, peak = "–" if seconds is None else f"{seconds:.1f} s", f"{memory / 2**20:,.0f} MiB" if memory else "–"
    return [row["configuration"], time, peak, f"{row['finished']}{failed}"]


def span(interval: Any, sign: str = "") -> str:
    return "–" if interval is None else f"{interval[0]:{sign}.3f} to {interval[1]:{sign}.3f}"


def plot_sweeps(rows: list[Record], grid: dict[str, list[Any]]) -> list[Record]:
    """Accuracy against each swept number, with one line per recipe and value of the other sweeps."""
    plots = []
    for key, values in grid.items():
        if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values) or len(values) < 2:
            continue
        for probe in PROBE_NAMES:
            lines: dict[str, list[tuple[float, Record]]] = {}
            for row in rows:
                others = [f"{k.rpartition('.')[2]} {v}" for k, v in row["sweep"].items() if k != key]
                if probe in row["probes"]:
                    line = lines.setdefault(", ".join([row["recipe"], *others]), [])
                    line.append((float(row["sweep"][key]), row["probes"][probe]))
            if lines:
                plots.append(sweep_plot(key, probe, lines))
    return plots


def sweep_plot(key: str, probe: str, lines: dict[str, list[tuple[float, Record]]]) -> Record:
    series = []
    for name, points in lines.items():
        points.sort(key=lambda point: point[0])
        spans = [found["over_seeds"] or found["over_images"] for _, found in points]
        series.append(
            {"name": name, "x": [x for x, _ in points], "y": [found["mean"] for _, found in points],
             "low": [max(0.0, low) for low, _ in spans], "high": [min(1.0, high) for _, high in spans]}
        )  # fmt: skip
    name, x, best = max(((n, x, f["mean"]) for n, pts in lines.items() for x, f in pts), key=lambda found: found[2])
    title = f"Highest {PROBE_NAMES[probe]} accuracy: {best:.3f} at {key.rpartition('.')[2]} {x:g} ({name})"
    note = "Means over seeds; the shaded band is the 95% interval."
    axes = {"x": {"label": key}, "y": {"label": "accuracy", "format": "percent"}}
    return {"id": f"sweep-{key}-{probe}", "title": title, "note": note, "kind": "line", **axes, "series": series}
