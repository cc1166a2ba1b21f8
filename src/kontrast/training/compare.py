"""Several recipes on the same data, seeds and budget: cells that resume one by one, then a table with intervals.

A comparison's folder: recipes/<cell>.toml, runs/<cell>/ (a run folder with cell.json), comparison.json, report.html.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kontrast.probes.neighbours import nearest_rows, votes
from kontrast.probes.regression import fit_logistic, standardise
from kontrast.registry import DataError, KontrastError, NumbersError, Stopped, UsageError
from kontrast.settings import to_toml
from kontrast.training.comparison import summarise
from kontrast.training.evaluation import evaluate, features_of
from kontrast.training.folder import RunFolder, disk_faults, read_json, read_lines, write_atomic, write_json
from kontrast.training.intervals import pack_bits
from kontrast.training.memory import PeakMemory
from kontrast.training.run import Run, choose_device
from kontrast.training.start import pretrain
from kontrast.training.stopping import Interrupted
from kontrast.training.sweeps import Cell, changes, parse_sweeps, plan

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
    for cell in cells:
        refuse_other_recipe(cell, out)
    records, errors = [], []
    for number, cell in enumerate(cells, 1):
        record, error = run_cell(cell, out, device, say, f"[{number}/{len(cells)}] {cell.folder}")
        records.append(record)
        errors += [error] if error else []
        write_comparison(out, names, grid, records, whole=number == len(cells))
    if errors and len(errors) == len(cells):
        raise type(errors[0])(f"every run failed; the first, {cells[0].folder}: {errors[0]}")
    return write_comparison(out, names, grid, records, whole=True)


def write_comparison(out: Path, names: Sequence[str], grid: Any, records: list[Any], whole: bool) -> dict[str, Any]:
    summary = summarise(out, list(names), grid, records)
    tree = {"version": VERSION, "kind": "comparison", "finished": whole, **summary}
    write_json(out / "comparison.json", tree)
    return tree


def refuse_other_recipe(cell: Cell, out: Path) -> None:
    """A folder that holds the same cell of another comparison is not gone on with."""
    run = out / "runs" / cell.folder
    if not (run / "recipe.toml").is_file():
        return
    different = changes(Run(run).recipe, cell.recipe)
    if different:
        raise UsageError(
            f"{run} was run with other settings ({', '.join(different[:3])}): give the same ones to go on, or another --out"
        )


def run_cell(cell: Cell, out: Path, device: str, say: Say, title: str) -> tuple[dict[str, Any], KontrastError | None]:
    """One cell's record, and its error where it failed; a finished cell, or one whose numbers failed, is only read."""
    folder = out / "runs" / cell.folder
    done = folder / "cell.json"
    if done.is_file():
        record = read_json(done)
        say(f"{title}: {record['status']} already")
        return record, NumbersError(record["reason"]) if record["status"] == "failed" else None
    say(f"{title}: {'going on' if RunFolder(folder).holds_run else 'training'}")
    facts = {"recipe": cell.name, "configuration": cell.configuration, "sweep": cell.sweep, "seed": cell.seed}
    facts["run"] = f"runs/{cell.folder}"
    try:
        record = {**facts, "status": "finished", **train_and_probe(cell, out, device, say)}
    except (Stopped, Interrupted) as error:
        raise type(error)(f"stopped and saved in {cell.folder}; give the same command again to go on") from None
    except (DataError, KeyboardInterrupt):
        raise
    except KontrastError as error:
        say(f"{title}: failed: {error}")
        record = {**facts, "status": "failed", "reason": str(error), "exit_code": error.exit_code}
        if isinstance(error, NumbersError):  # the same numbers would come again; a full disk need not
            write_json(done, record)
        return record, error
    write_json(done, record)
    return record, None


def train_and_probe(cell: Cell, out: Path, device: str, say: Say) -> dict[str, Any]:
    folder = out / "runs" / cell.folder
    resume = (folder / "recipe.toml").is_file()
    with PeakMemory(choose_device(device)) as memory:
        if resume and (folder / "encoder.safetensors").is_file() and RunFolder(folder).info().get("finished"):
            run = Run(folder)
        elif resume:
            run = pretrain(out=folder, resume=True, device=device, say=say)
        else:
            recipe = out / "recipes" / f"{cell.folder}.toml"
            write_atomic(recipe, to_toml(cell.recipe, f"one run of a comparison: {cell.folder}"))
            run = pretrain(recipe=str(recipe), out=folder, device=device, say=say)
    quiet: Say = lambda _: None  # noqa: E731
    results = evaluate(run, device=device, say=quiet)
    trained = {r.probe: r for r in results if r.features == "trained"}
    rows = correct_rows(run, trained, choose_device(device)) if trained else {}
    info = run.folder.info()
    last = [line for line in read_lines(run.path / "metrics.jsonl") if "loss" in line]
    return {
        "seconds": info.get("seconds"),
        "steps": info.get("steps"),
        "device": info.get("device"),
        "peak_memory_bytes": memory.bytes,
        "loss": last[-1]["loss"] if last else None,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "probes": {
            name: {"accuracy": r.accuracy, "low": r.low, "high": r.high, "n": r.n, "correct": pack_bits(rows[name])}
            for name, r in trained.items()
        },
    }


@torch.inference_mode()
def correct_rows(run: Run, results: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Which test images each probe names right: booleans [T], so that runs can be compared image by image."""
    train, test = run.data("train"), run.data("test")
    encoder, transform = run.encoder(device), run.transform()
    fit, held = (features_of(encoder, part, transform, device) for part in (train, test))
    classes, rows = int(train.labels.max()) + 1, {}
    if "knn" in results:
        protocol = results["knn"].protocol
        unit, asked = (torch.nn.functional.normalize(x, dim=1) for x in (fit, held))
        found = [nearest_rows(q, unit, protocol["k"]) for q in asked.split(1024)]
        votes_of = [votes(s, train.labels[j], protocol["temperature"], classes).argmax(1) for s, j in found]
        rows["knn"] = torch.cat(votes_of) == test.labels
    if "linear" in results:
        x, y = standardise(fit, held)
        rows["linear"] = (
            fit_logistic(x, train.labels, classes, results["linear"].protocol["C"]).predict(y) == test.labels
        )
    return rows
