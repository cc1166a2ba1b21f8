"""Runs a paper's table cell by cell, probes each cell as the paper does, and stores the numbers in results/.

Finished cells are read from results/TABLE.json. With several jobs, each cell is a process of its own.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kontrast.config.recipe import Recipe
from kontrast.errors import DataError, UsageError
from kontrast.files import disk_faults, read_json_lines
from kontrast.notebook import Printed
from kontrast.papers.measure import MEASURES, TABLE_PROBES, logged_curves, mean_and_error, probe_run
from kontrast.papers.parallel_runs import ParallelRuns, runs_at_once
from kontrast.papers.result_pages import NUMBERS, main_text
from kontrast.papers.results_file import find_entry, finished_runs, read_results, refuse_other_settings, results_path
from kontrast.papers.save_results import add_runs
from kontrast.papers.table_data import describe_data, find_data
from kontrast.papers.tables import Table, TableCell, load_table, relevant_settings
from kontrast.registry import nearest
from kontrast.runs.text_probes import RETRIEVAL, TEXT_RESULTS
from kontrast.studies.audit.audit import train_and_probe
from kontrast.studies.audit.baselines import BASELINES, UNTRAINED
from kontrast.studies.cells import Cell, CellRunner, Record, Say, finish_run
from kontrast.studies.text_tables import aligned, terminal_width
from kontrast.training import checkpoints
from kontrast.training.build import precision
from kontrast.training.device import choose_device, describe_device
from kontrast.training.gpu_sharing import shared_gpu
from kontrast.training.learner import build_objective, build_student
from kontrast.training.option_checks import check_options
from kontrast.training.run_folder import timestamp
from kontrast.training.splits import open_split


@dataclass(frozen=True)
class Reproduction(Printed):
    """The result of `kontrast.reproduce`. `print(result)` shows the paper's numbers and ours.

    Args:
        table: the table.
        file: results/TABLE.json, with the numbers of every run.
        page: results/TABLE.md, the table for readers.
        cells: the stored cells, each with one record per seed.
    """

    table: Table
    file: Path
    page: Path
    cells: list[Record]

    def __str__(self) -> str:
        return self.printed(terminal_width())

    def printed(self, width: int | None = None) -> str:
        rows = [["cell", "paper", self.table.main, "seeds"]]
        for cell in self.table.cells:
            runs = finished_runs(find_entry({"cells": self.cells}, cell, {}))
            paper = "" if cell.paper is None else f"{cell.paper:g}"
            ours = main_text(self.table, runs) or "not run"
            rows.append([cell.name, paper, ours, " ".join(str(run["seed"]) for run in runs)])
        return "\n".join([*aligned(rows, width), str(self.file), str(self.page)])

    def to_dict(self) -> Record:
        return {"results": str(self.file), "table": str(self.page), "cells": self.cells}


def reproduce(
    table: str,
    *,
    cells: Sequence[str] = (),
    seeds: int | Sequence[int] = 1,
    overrides: Sequence[str] = (),
    jobs: int = 1,
    data: str | None = None,
    out: str | os.PathLike[str] = "results",
    runs: str | os.PathLike[str] = "runs/reproduce",
    device: str = "auto",
    say: Say = print,
) -> Reproduction:
    """Run the recipes behind a paper's table and put our numbers beside the paper's.

    Call it again with the same arguments to resume: finished cells are read, not trained again. A cell that fails is
    reported, and the others continue.

    Args:
        table: the name of a table (see `kontrast reproduce --list`), or the path of your own .toml file.
        cells: names of cells or groups to run; default: all.
        seeds: how many seeds to run, counted from 0, or a list of seeds; default 1.
        overrides: settings for all cells, each as "key.path=value". Such runs are stored apart.
        jobs: how many cells to run at once, each in its own process; default 1.
        data: the folder with the images; default: KONTRAST_DATA (or ./data), then ../shared/data.
        out: the folder for TABLE.json and TABLE.md; default: results.
        runs: the folder for run folders; default: runs/reproduce.
        device: auto, cpu or cuda.
        say: receives progress lines; default: print.

    Returns:
        The table with all stored numbers.

    Example:
        >>> import kontrast
        >>> result = kontrast.reproduce("gcl-mnist", cells=["vae"], seeds=2)  # doctest: +SKIP
        >>> print(result)  # doctest: +SKIP
    """
    runner = TableRunner(load_table(table), overrides, data, Path(out), Path(runs), device, say)
    rows, numbers = runner.table.select(cells), range(seeds) if isinstance(seeds, int) else seeds
    planned = [runner.plan(row, seed) for seed in numbers for row in rows]  # the first seed of every cell comes first
    remaining = [cell for cell in planned if runner.read(cell) is None]
    runner.check(remaining, compare_images=False)
    runner.check_data(remaining)
    with disk_faults(runner.folder):
        runner.folder.mkdir(parents=True, exist_ok=True)
    parallel = jobs > 1 and len(remaining) > 1
    runner.run([cell for cell in planned if cell not in remaining] if parallel else planned)
    if parallel:
        with shared_gpu(device, say) as variables:
            runner.errors += ParallelRuns(runner.command, runner.folder, jobs, say, variables).run(remaining)
    runner.raise_if_all_failed(len(planned))
    if runner.errors:
        say(f"{len(runner.errors)} of {len(planned)} runs failed; the first: {runner.errors[0]}")
    tree = read_results(runner.out, runner.table)
    return Reproduction(runner.table, runner.file, runner.file.with_suffix(".md"), tree["cells"])


@dataclass(frozen=True, kw_only=True)
class TableRun(Cell):
    """One run of a table's cell."""

    row: TableCell
    changed: Record  # settings that the user's overrides changed
    source: str  # the name of the data in the table's recipe

    @property
    def settings(self) -> Record:
        return relevant_settings(self.recipe, self.row.learner)


class TableRunner(CellRunner):
    """Runs the cells of a table and stores their numbers in results/TABLE.json."""

    def __init__(
        self, table: Table, overrides: Sequence[str], data: str | None, out: Path, runs: Path, device: str, say: Say
    ):
        super().__init__(device, say, "--runs")
        self.table, self.overrides, self.data, self.out, self.runs = table, overrides, data, out, runs
        self.file, self.folder = results_path(out, table), runs / table.name
        self.built: set[str] = set()  # networks that were built to check them
        for kind, names, known in (("probe", table.probes, TABLE_PROBES), ("measure", table.measures, tuple(MEASURES))):
            for name in names:
                if name not in known:
                    raise UsageError(f"table {table.origin!r}: unknown {kind} {name!r}: {nearest(name, known)}")
        if not table.probes and table.main not in NUMBERS:
            raise UsageError(
                f"table {table.origin!r} has no probes, and {table.main!r} is not one number: give a probe"
            )

    def plan(self, row: TableCell, seed: int) -> TableRun:
        """Prepare and check one run before the first one trains."""
        try:
            asked = self.table.recipe(row, self.overrides).data
            source, place = asked.source, find_data(asked.source, self.data, digits=bool(asked.overlay_digits))
            recipe = self.table.recipe(row, [*self.overrides, f"seed={seed}", *place])
            changed = self.table.changed_settings(row, self.overrides)
            check_options(recipe, build_objective(recipe))
            self.check_networks(recipe)
            if recipe.training.epochs < 1:
                raise UsageError("training.epochs=0 trains nothing; give at least 1")
        except UsageError as error:
            raise UsageError(f"table {self.table.origin!r}, cell {row.name!r}: {error}") from None
        parts = [row.name, *(f"{key.rpartition('.')[2]}{value}" for key, value in changed.items()), f"seed{seed}"]
        name = "-".join(re.sub(r"[^\w.+-]+", "-", part) for part in parts)
        folder = self.folder / name
        run = TableRun(name, recipe, folder, Path(f"{folder}.toml"), self.file, row=row, changed=changed, source=source)
        entry = find_entry(read_results(self.out, self.table), row, changed)
        if entry is not None:
            refuse_other_settings(self.file, entry, run.settings)
        return run

    def check_networks(self, recipe: Recipe) -> None:
        """Build the encoder and the head, once for all cells that share them."""
        networks = repr((recipe.encoder, recipe.head, recipe.text))
        if networks not in self.built:
            build_student(recipe, channels=3)
            self.built.add(networks)

    def check_data(self, cells: Sequence[TableRun]) -> None:
        """Check that all images are labeled; this also packs them before several processes need them."""
        captioned = set(self.table.probes) <= set(TEXT_RESULTS[RETRIEVAL])
        for cell in {cell.source: cell for cell in cells}.values():
            for split in ("train", "test") if self.table.probes else ("train",):
                if open_split(cell.recipe.data, split, seed=cell.seed).labels is None and not captioned:
                    raise DataError(f"the {split} images of {cell.source} have no labels, which the probes need")

    def command(self, cell: TableRun) -> list[str]:
        """The arguments of `kontrast reproduce` that run one cell."""
        words = [self.table.origin, *self.overrides, "--cells", cell.row.name, "--seeds", f"{cell.seed},"]
        words += ["--device", self.device, "--out", str(self.out), "--runs", str(self.runs)]
        return [*words, *(["--data", self.data] if self.data else [])]

    def read(self, cell: TableRun) -> Record | None:  # type: ignore[override]
        entry = find_entry(read_results(self.out, self.table), cell.row, cell.changed) or {"runs": []}
        run = next((run for run in entry["runs"] if run["seed"] == cell.seed), None)
        failure = {"status": "failed", "reason": run["failed"]} if run and "failed" in run else {"status": "finished"}
        return None if run is None else {**failure, "seed": cell.seed}

    def write(self, cell: TableRun, record: Record) -> None:  # type: ignore[override]
        images = open_split(cell.recipe.data, "train", seed=cell.seed, pretraining=True)
        facts = {"changed": cell.changed, "settings": cell.settings, "data": describe_data(cell.source, images)}
        add_runs(self.out, self.table, [(cell.row, facts, record)])

    def record(self, cell: Cell, numbers: Record) -> Record:
        return {"seed": cell.seed, "failed": numbers["reason"]} if "reason" in numbers else numbers

    def describe(self, record: Record) -> str:
        found = [f"{name} {100 * probe['accuracy']:.2f}" for name, probe in record["probes"].items()]
        found = found or [f"{name} {value:.4g}" for name, value in record["numbers"].items()]
        return f"{', '.join(found)} in {record['seconds']:.0f} s"

    def measure(self, cell: TableRun) -> Record:  # type: ignore[override]
        on = choose_device(self.device)
        facts = {"seed": cell.seed, **checkpoints.versions(), "device": describe_device(on), "at_once": runs_at_once()}
        facts["precision"] = str(precision(cell.recipe.training.precision, on)).removeprefix("torch.")
        measured = self.measure_baseline(cell) if cell.row.learner in BASELINES else self.measure_run(cell, on)
        return {**facts, "finished": timestamp(), **measured}

    def measure_run(self, cell: TableRun, device: torch.device) -> Record:
        """Train the cell or resume its training, then probe and measure it."""
        run, memory = finish_run(cell, self.device, self.say)
        info, start = run.folder.info(), time.monotonic()
        curves: Record = dict(logged_curves(run))
        numbers: Record = {}
        errors: Record = {}
        probes = probe_run(run, self.table.probes, device)
        for name in self.table.measures:
            measured, more_curves = MEASURES[name](run, device, self.say)
            for number, values in measured.items():
                numbers[number], error = mean_and_error(values)
                errors |= {} if error is None else {number: error}
            curves |= more_curves
        first = probes.get(self.table.main, {})
        numbers |= {number: first[key] for number, key in (("top5", "top5"), ("best_epoch", "best")) if key in first}
        for name in ("knn", "linear"):
            if curves.get(name):
                numbers[f"{name}_area"] = sum(value for _, value in curves[name]) / len(curves[name])
        facts = {key: info[key] for key in ("device", "precision", "seconds", "steps")}
        facts |= {"epochs": read_json_lines(run.path / "metrics.jsonl")[-1]["epoch"], "images": info["data"]["images"]}
        facts |= {"probe_seconds": time.monotonic() - start, "peak_memory_bytes": memory}
        return {**facts, "probes": probes, "numbers": numbers, "errors": errors, "curves": curves}

    def measure_baseline(self, cell: TableRun) -> Record:
        """Train one of the audit's baselines on the cell's images. It is short and therefore not resumed."""
        start = time.monotonic()
        found = train_and_probe(cell, cell.row.learner, self.device, neighbors="knn" in self.table.probes)
        probes = {"linear": {key: found[key] for key in ("accuracy", "low", "high", "n")}}
        probes |= {"knn": found["knn"]} if "knn" in found else {}
        epochs = 0 if cell.row.learner == UNTRAINED else cell.recipe.training.epochs
        facts = {"seconds": time.monotonic() - start, "epochs": epochs, "precision": "float32"}
        numbers = {} if found["injected"] is None else {"added_feature": found["injected"]}
        return {**facts, "probes": probes, "numbers": numbers, "curves": {}}
