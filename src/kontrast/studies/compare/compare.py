"""Several recipes on the same data, seeds and budget: cells that resume one by one, then a table with intervals.

A comparison's folder: recipes/<cell>.toml, runs/<cell>/ (a run folder with cell.json), comparison.json, report.html.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kontrast.data import ImageSet
from kontrast.errors import DataError, KontrastError, NumbersError, Stopped
from kontrast.files import disk_faults, read_json_lines, write_json
from kontrast.probes import ProbeResult, knn, logistic
from kontrast.probes.intervals import pack_bits
from kontrast.runs.probe import features_of
from kontrast.runs.run import Run
from kontrast.studies.cells import (
    Marks,
    finished_run,
    images_at_hand,
    marks_of,
    refuse_other_cell,
    refuse_other_images,
    stored_cell,
)
from kontrast.studies.compare.comparison_table import CELL_FACTS, CELL_NUMBERS, summarize
from kontrast.studies.compare.sweep import Cell, parse_sweeps, plan
from kontrast.training.device import choose_device
from kontrast.training.peak_memory import PeakMemory
from kontrast.training.run_folder import RunFolder
from kontrast.training.signals import Interrupted

Say = Callable[[str], None]
VERSION = 1


def compare(
    names: Sequence[str],
    data: str | None = None,
    *,
    out: Path,
    seeds: int = 3,
    sweeps: Sequence[str] = (),
    overrides: Sequence[str] = (),
    device: str = "auto",
    say: Say = print,
) -> dict[str, Any]:
    """Run every cell that is not done, write comparison.json, and return what is in it."""
    out, on = Path(out), choose_device(device)
    grid = parse_sweeps(sweeps)
    cells = plan(names, data, seeds=seeds, grid=grid, overrides=overrides, device=on, say=say)
    with disk_faults(out):
        (out / "recipes").mkdir(parents=True, exist_ok=True)
    images = images_at_hand([cell.recipe for cell in cells])
    for cell, now in zip(cells, images):
        refuse_other_cell(out / "runs" / cell.folder, cell.recipe, done_cell(cell, out), now)
    records, errors = [], []
    for number, (cell, now) in enumerate(zip(cells, images), 1):
        record, error = run_cell(cell, now, out, device, say, f"[{number}/{len(cells)}] {cell.folder}")
        records.append(record)
        errors += [error] if error else []
        write_comparison(out, names, grid, records, whole=number == len(cells))
    if errors and len(errors) == len(cells):
        raise type(errors[0])(f"every run failed; the first, {cells[0].folder}: {errors[0]}")
    return write_comparison(out, names, grid, records, whole=True)


def write_comparison(out: Path, names: Sequence[str], grid: Any, records: list[Any], whole: bool) -> dict[str, Any]:
    summary = summarize(out, list(names), grid, records)
    tree = {"version": VERSION, "kind": "comparison", "finished": whole, **summary}
    write_json(out / "comparison.json", tree)
    return tree


def done_cell(cell: Cell, out: Path) -> dict[str, Any] | None:
    return stored_cell(out / "runs" / cell.folder / "cell.json", CELL_FACTS, CELL_NUMBERS)


def run_cell(
    cell: Cell, images: Marks, out: Path, device: str, say: Say, title: str
) -> tuple[dict[str, Any], KontrastError | None]:
    """One cell's record, and its error where it failed; a finished cell, or one whose numbers failed, is only read.
    images: fingerprints of the images that it is to see."""
    folder = out / "runs" / cell.folder
    record = done_cell(cell, out)
    if record is not None:
        say(f"{title}: {record['status']} already")
        return record, NumbersError(record["reason"]) if record["status"] == "failed" else None
    say(f"{title}: {'going on' if RunFolder(folder).holds_run else 'training'}")
    facts = {"recipe": cell.name, "configuration": cell.configuration, "sweep": cell.sweep, "seed": cell.seed}
    facts |= {"run": f"runs/{cell.folder}", "images": images}
    try:
        record = {**facts, "status": "finished", **train_and_probe(cell, images, out, device, say)}
    except (Stopped, Interrupted) as error:
        raise type(error)(f"stopped and saved in {cell.folder}; give the same command again to go on") from None
    except (DataError, KeyboardInterrupt):
        raise
    except KontrastError as error:
        say(f"{title}: failed: {error}")
        record = {**facts, "status": "failed", "reason": str(error), "exit_code": error.exit_code}
        if isinstance(error, NumbersError):  # the same numbers would come again; a full disk need not
            write_json(folder / "cell.json", record)
        return record, error
    write_json(folder / "cell.json", record)
    return record, None


def train_and_probe(cell: Cell, images: Marks, out: Path, device: str, say: Say) -> dict[str, Any]:
    folder, recipe = out / "runs" / cell.folder, out / "recipes" / f"{cell.folder}.toml"
    with PeakMemory(choose_device(device)) as memory:
        run = finished_run(cell.recipe, folder, recipe, device, say)
    train = run.data("train")
    test = run.data("test") if train.has_test else None
    refuse_other_images(folder, {"images": marks_of(train, test)}, images)  # they may have changed as it trained
    results = probe_trained(run, train, test, choose_device(device))
    if results:
        write_json(run.path / "probes.json", {"version": 1, "probes": [r.to_dict() for r in results.values()]})
    info = run.folder.info()
    last = [line for line in read_json_lines(run.path / "metrics.jsonl") if "loss" in line]
    return {
        "seconds": info.get("seconds"),
        "steps": info.get("steps"),
        "device": info.get("device"),
        "peak_memory_bytes": memory.bytes,
        "loss": last[-1]["loss"] if last else None,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "probes": {
            name: {"accuracy": r.accuracy, "low": r.low, "high": r.high, "n": r.n, "correct": pack_bits(r.correct)}
            for name, r in results.items()
        },
    }


def probe_trained(run: Run, train: ImageSet, test: ImageSet | None, device: torch.device) -> dict[str, ProbeResult]:
    """kNN and the linear probe of the trained encoder; nothing without labels. Controls are left out: `kontrast probe`
    adds them, and its seed, the run's, gives these very numbers."""
    if test is None or train.labels is None or test.labels is None:
        return {}
    encoder, transform, settings = run.encoder(device), run.transform(), run.recipe.evaluation
    fit, held = (features_of(encoder, part, transform, device) for part in (train, test))
    parts, seed = (fit, train.labels, held, test.labels), run.recipe.seed
    results = {
        "knn": knn(*parts, k=settings.k, temperature=settings.temperature, seed=seed),
        "linear": logistic(*parts, seed=seed),
    }
    return {name: dataclasses.replace(r, probe=name, features="trained") for name, r in results.items()}
