"""Trains several recipes on the same data, with the same seeds and budget, and compares their accuracies.

A comparison's folder: recipes/<cell>.toml, runs/<cell>/ (a run folder with cell.json), comparison.json, report.html.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from kontrast.data import ImageSet
from kontrast.files import disk_faults, read_json_lines, write_json
from kontrast.probes import ProbeResult, extract_features, knn, logistic
from kontrast.probes.intervals import pack_bits
from kontrast.runs.probe import with_names
from kontrast.runs.run import Run
from kontrast.studies.cells import Cell, CellRunner, Record, Say, finish_run, probe_fingerprints, probe_numbers
from kontrast.studies.compare.comparison_plan import parse_sweeps, plan
from kontrast.studies.compare.comparison_summary import PROBE_NAMES, summarize
from kontrast.studies.study_result import Comparison
from kontrast.training.device import choose_device


def compare(
    names: Sequence[str],
    data: str | None = None,
    *,
    seeds: int = 3,
    sweeps: Sequence[str] = (),
    overrides: Sequence[str] = (),
    out: str | os.PathLike[str] | None = None,
    device: str = "auto",
    say: Say = print,
) -> Comparison:
    """Train several recipes on the same data, views, seeds and budget, and compare their accuracies.

    The first name decides the data, the views and the budget of all. Call it again with the same arguments to resume:
    finished runs are read, not trained again. A run that fails is reported in the result, and the others continue.

    Args:
        names: recipes, recipe files or objectives. An objective runs in the data's default recipe.
        data: a folder, a file or a named set; default: the data of the first recipe.
        seeds: the number of runs of each, with consecutive seeds; default 3.
        sweeps: values to try, each as "key.path=value,value"; several make a grid.
        overrides: settings for all runs, each as "key.path=value".
        out: the folder of the comparison; default: runs/compare-NAMES.
        device: auto, cpu or cuda.
        say: receives progress lines; default: print.

    Returns:
        The comparison. `print(comparison)` shows its tables and verdict, and `comparison.rows` has the numbers.

    Example:
        >>> import kontrast
        >>> result = kontrast.compare(["nt-xent", "dcl"], "digits", seeds=2)  # doctest: +SKIP
        >>> print(result.verdict)  # doctest: +SKIP
    """
    folder = Path(out) if out is not None else default_folder(names)
    grid, on = parse_sweeps(sweeps), choose_device(device)
    cells = plan(names, data, out=folder, seeds=seeds, grid=grid, overrides=overrides, device=on, say=say)
    with disk_faults(folder):
        (folder / "recipes").mkdir(parents=True, exist_ok=True)

    def save(records: list[Record]) -> Comparison:
        tree = {"version": 1, "kind": "comparison", "finished": len(records) == len(cells)}
        return Comparison.save(folder / "comparison.json", tree | summarize(folder, list(names), grid, records))

    runner = ComparisonRunner(device, say)
    runner.check(cells)
    records = runner.run(cells, save)
    runner.raise_if_all_failed(len(cells))
    return save(records)


def default_folder(names: Sequence[str]) -> Path:
    return Path("runs") / "-".join(["compare", *(name.replace("/", "-").removesuffix(".toml") for name in names)])


class ComparisonRunner(CellRunner):
    """Trains a cell and probes its encoder with kNN and a linear probe."""

    def measure(self, cell: Cell) -> Record:
        device = choose_device(self.device)
        run, memory = finish_run(cell, self.device, self.say)
        train = run.data("train")
        test = run.data("test") if train.has_test else None
        results = probe_trained(run, train, test, device)
        if results:
            write_json(run.path / "probes.json", {"version": 1, "probes": [r.to_dict() for r in results.values()]})
        info = run.folder.info()
        logged = [line for line in read_json_lines(run.path / "metrics.jsonl") if "loss" in line]
        return {
            "fingerprints": probe_fingerprints(train, test),
            **{key: info.get(key) for key in ("seconds", "steps", "device")},
            "peak_memory_bytes": memory,
            "loss": logged[-1]["loss"] if logged else None,
            "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "probes": {n: {**probe_numbers(r), "correct": pack_bits(r.correct)} for n, r in results.items()},
        }

    def describe(self, record: Record) -> str:
        found = [f"{PROBE_NAMES[name]} {probe['accuracy']:.3f}" for name, probe in record["probes"].items()]
        return ", ".join(found) or "finished"


def probe_trained(run: Run, train: ImageSet, test: ImageSet | None, device: torch.device) -> dict[str, ProbeResult]:
    """Accuracy of kNN and of the linear probe on the trained encoder; empty without labels.

    Untrained encoders and raw pixels are left to `kontrast probe`, which uses the run's seed as well and therefore
    gives the same numbers.
    """
    if test is None or train.labels is None or test.labels is None:
        return {}
    encoder, transform, settings = run.encoder(device), run.transform(), run.recipe.evaluation
    fit, held = (extract_features(encoder, part, transform, device=device) for part in (train, test))
    parts, seed = (fit, train.labels, held, test.labels), run.recipe.seed
    results = {
        "knn": knn(*parts, k=settings.k, temperature=settings.temperature, seed=seed),
        "linear": logistic(*parts, seed=seed),
    }
    return {name: with_names(result, name, "trained", train) for name, result in results.items()}
