"""Cells to rows: the mean over seeds with its intervals, paired differences, time and memory; as a table and as plots.

S seeds, T test images.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kontrast.probes.intervals import over_images, over_seeds, unpack_bits, within_one
from kontrast.studies.schema import ANY, BYTES, COUNT, MAYBE_NUMBER, NUMBER, SHARE, TEXT, WHOLE

WORDS = {"knn": "kNN", "linear": "linear probe"}
COLUMNS = ("recipe", "accuracy", "over seeds", "over images", "difference", "over seeds", "over images")
CELL_FACTS = {"recipe": TEXT, "configuration": TEXT, "sweep": {}, "seed": WHOLE, "run": TEXT}
PROBE = {"accuracy": SHARE, "n": COUNT, "correct": BYTES}
CELL_NUMBERS = {"seconds": NUMBER, "peak_memory_bytes": MAYBE_NUMBER, "probes": {ANY: PROBE}}
"""What cell.json must hold: of every cell, and of a finished one."""
Record = dict[str, Any]


def summarize(out: Path, names: list[str], grid: dict[str, list[Any]], records: list[Record]) -> dict[str, Any]:
    """Everything comparison.json holds of these cells."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record["configuration"], []).append(record)
    rows = [row_of(cells, reference_of(cells[0], names, groups)) for cells in groups.values()]
    return {
        "names": names,
        "sweeps": grid,
        "seeds": sorted({record["seed"] for record in records}),
        "verdict": verdict(rows, groups),
        "rows": rows,
        "tables": tables(rows),
        "plots": sweep_plots(rows, grid),
        "runs": [str(record["run"]) for record in records if (out / record["run"] / "recipe.toml").is_file()],
        "cells": records,
    }


def reference_of(cell: Record, names: list[str], groups: dict[str, Any]) -> list[Record]:
    """What a configuration is measured against: the first recipe at the same swept values; for the first recipe itself
    its first swept values; nothing for the very first."""
    firsts = [cells for cells in groups.values() if cells[0]["recipe"] == names[0]]
    if cell["recipe"] == names[0]:
        return [] if not firsts or firsts[0][0] is cell else firsts[0]
    return next((cells for cells in firsts if cells[0]["sweep"] == cell["sweep"]), [])


def row_of(cells: list[Record], against: list[Record]) -> Record:
    done = [cell for cell in cells if cell["status"] == "finished"]
    probes = {name: None for cell in done for name in cell["probes"]}
    memory = [cell["peak_memory_bytes"] for cell in done if cell["peak_memory_bytes"]]
    return {
        "configuration": cells[0]["configuration"],
        "recipe": cells[0]["recipe"],
        "sweep": cells[0]["sweep"],
        "finished": len(done),
        "failed": [{"seed": c["seed"], "reason": c["reason"]} for c in cells if c["status"] == "failed"],
        "seconds": statistics.fmean(cell["seconds"] for cell in done) if done else None,
        "peak_memory_bytes": max(memory) if memory else None,
        "probes": {name: accuracy(done, name) for name in probes},
        "against": against[0]["configuration"] if against else None,
        "differences": {name: difference(done, against, name) for name in probes} if against else {},
    }


def accuracy(done: list[Record], probe: str) -> Record:
    values = [cell["probes"][probe]["accuracy"] for cell in done if probe in cell["probes"]]
    return {
        "mean": statistics.fmean(values),
        "by_seed": values,
        "over_seeds": within_one(over_seeds(values)),
        "over_images": over_images(torch.stack([correct(cell, probe) for cell in done]).double().mean(0)),
    }


def difference(done: list[Record], against: list[Record], probe: str) -> Record | None:
    """This minus the reference, seed by seed and image by image; None where no seed finished in both on the same test
    images (a sweep may be over the data)."""
    others = {cell["seed"]: cell for cell in against if cell["status"] == "finished"}
    pairs = [(cell, others[cell["seed"]]) for cell in done if cell["seed"] in others]
    pairs = [(a, b) for a, b in pairs if same_test(a, b, probe)]
    if not pairs:
        return None
    by_image = torch.stack([correct(a, probe).double() - correct(b, probe).double() for a, b in pairs])
    values = by_image.mean(1).tolist()
    return {
        "mean": statistics.fmean(values),
        "by_seed": values,
        "over_seeds": within_one(over_seeds(values), least=-1.0),
        "over_images": over_images(by_image.mean(0)),
    }


def same_test(a: Record, b: Record, probe: str) -> bool:
    """Whether two cells were probed on the same images; cells of older versions know only how many they were."""
    if probe not in a["probes"] or probe not in b["probes"]:
        return False
    marks = [cell.get("images", {}).get("test") for cell in (a, b)]
    return a["probes"][probe]["n"] == b["probes"][probe]["n"] and (None in marks or marks[0] == marks[1])


def correct(cell: Record, probe: str) -> Tensor:
    entry = cell["probes"][probe]
    return unpack_bits(entry["correct"], entry["n"])


def headline(rows: list[Record]) -> str:
    """The probe that the sentence speaks of."""
    return next((name for name in ("linear", "knn") if any(name in row["probes"] for row in rows)), "")


def verdict(rows: list[Record], groups: dict[str, list[Record]]) -> str:
    """One sentence: who is ahead, by how much, and whether that is settled."""
    failed = sum(len(row["failed"]) for row in rows)
    tail = f" {failed} run{'s' * (failed > 1)} failed." if failed else ""
    probe = headline(rows)
    scored = sorted((row for row in rows if probe in row["probes"]), key=lambda row: -row["probes"][probe]["mean"])
    if not scored:
        return "No labels, so no accuracy: judge by the curves." + tail
    (first, best), *others = [(row["configuration"], f"{row['probes'][probe]['mean']:.3f}") for row in scored]
    if not others:
        return f"{first} is highest by {WORDS[probe]}: {best}.{tail}"
    second, next_best = others[0]
    equal = [name for name, mean in others if mean == best]
    text = f"{first} is highest by {WORDS[probe]}: {best}, before {second} at {next_best}"
    if equal:
        names = f"{', '.join([first, *equal[:-1]])} and {equal[-1]}"
        text = f"{names} are equal by {WORDS[probe]}, {best} to three digits"
    return f"{text}; {settled(groups[first], groups[second], probe)}.{tail}"


def settled(best: list[Record], second: list[Record], probe: str) -> str:
    """Whether the first two are apart: by paired seeds, where there are several, and by paired test images too, since a
    few images may give every seed the same difference."""
    gap = difference([cell for cell in best if cell["status"] == "finished"], second, probe)
    if gap is None:
        return "no seed finished in both on the same test images"
    kind, word = ("over_seeds", "seeds") if gap["over_seeds"] else ("over_images", "test images")
    text = f"the paired difference over {word} is {span(gap[kind], '+')}"
    if gap[kind][0] > 0 and gap["over_images"][0] <= 0:
        text += f", but over test images {span(gap['over_images'], '+')}"
    return text if min(gap[kind][0], gap["over_images"][0]) > 0 else f"{text}, so the order is not settled"


def tables(rows: list[Record]) -> list[Record]:
    """The rows as text, for terminals and pages: one table a probe, then what it cost."""
    probes = [name for name in WORDS if any(name in row["probes"] for row in rows)]
    note = (
        "Mean over seeds; intervals are 95%. A difference is taken seed by seed and image by image, against the first "
    )
    note += "recipe at the same swept values; for the first itself, against its first values."
    made = [
        {"title": f"Accuracy, {WORDS[probe]}: the same data, views, seeds and budget", "columns": list(COLUMNS),
         "rows": [accuracy_line(row, probe) for row in rows], "note": note}
        for probe in probes
    ]  # fmt: skip
    cost = {"title": "Time and memory", "columns": ["recipe", "time", "peak memory", "runs"]}
    return [
        *made,
        {**cost, "rows": list(map(cost_line, rows)), "note": "Time is a run's mean, memory the most of any."},
    ]


def accuracy_line(row: Record, probe: str) -> list[str]:
    found, gap = row["probes"].get(probe), row["differences"].get(probe)
    line = [f"{found['mean']:.3f}", span(found["over_seeds"]), span(found["over_images"])] if found else ["–"] * 3
    apart = [f"{gap['mean']:+.3f}", span(gap["over_seeds"], "+"), span(gap["over_images"], "+")] if gap else ["–"] * 3
    return [row["configuration"], *line, *apart]


def cost_line(row: Record) -> list[str]:
    seconds, memory = row["seconds"], row["peak_memory_bytes"]
    failed = f", {len(row['failed'])} failed" if row["failed"] else ""
    return [
        row["configuration"],
        f"{seconds:.1f} s" if seconds is not None else "–",
        f"{memory / 2**20:,.0f} MiB" if memory else "–",
        f"{row['finished']}{failed}",
    ]


def span(interval: Any, sign: str = "") -> str:
    return "–" if interval is None else f"{interval[0]:{sign}.3f} to {interval[1]:{sign}.3f}"


def sweep_plots(rows: list[Record], grid: dict[str, list[Any]]) -> list[Record]:
    """Accuracy against each swept number; one line for each recipe and each value of the other sweeps."""
    plots = []
    for key, values in grid.items():
        if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values) or len(values) < 2:
            continue
        for probe in WORDS:
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
    return {
        "id": f"sweep-{key}-{probe}",
        "title": f"The {WORDS[probe]} is highest at {key.rpartition('.')[2]} {x:g}: {best:.3f}, {name}",
        "note": "Mean over seeds; the shade is the 95% interval.",
        "kind": "line",
        "x": {"label": key},
        "y": {"label": "accuracy", "format": "percent"},
        "series": series,
    }
