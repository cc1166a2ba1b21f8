"""A paper's table, run cell by cell: train (or go on), probe, add the numbers to results/. Finished cells are read.

Several cells at once are several processes on one device (`table_processes`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kontrast.config.recipe import Recipe
from kontrast.data import ImageSet
from kontrast.errors import DataError, KontrastError, NumbersError, Stopped, UsageError
from kontrast.files import disk_faults, read_json_lines
from kontrast.objectives import objective
from kontrast.papers.gpu_sharing import shared_gpu
from kontrast.papers.measure import MEASURES, curves_of, mean_and_error, probe_run
from kontrast.papers.processes import Processes, at_once
from kontrast.papers.result_pages import add, find, has_seed, refuse_other_settings, stored
from kontrast.papers.table_images import data_words, locate
from kontrast.papers.tables import Table, TableCell, settings_of
from kontrast.registry import nearest
from kontrast.runs.probe import PROBES
from kontrast.studies.audit import audit
from kontrast.studies.cells import finished_run, refuse_other_recipe
from kontrast.training import checkpoints
from kontrast.training.build import precision
from kontrast.training.device import choose_device, describe_device
from kontrast.training.learner import check_options
from kontrast.training.pretrain import timestamp
from kontrast.training.signals import Interrupted, StopSignals
from kontrast.training.splits import open_split

Say = Callable[[str], None]
RUNS = Path("runs") / "reproduce"


@dataclass(frozen=True)
class Job:
    """One run of one cell."""

    cell: TableCell
    seed: int
    changed: dict[str, Any]
    recipe: Recipe  # as it will run here, its images found
    source: str  # the set's own name

    @property
    def folder(self) -> str:
        parts = [self.cell.name, *(f"{key.rpartition('.')[2]}{value}" for key, value in self.changed.items())]
        return "-".join(re.sub(r"[^\w.+-]+", "-", part) for part in [*parts, f"seed{self.seed}"])

    @property
    def title(self) -> str:
        return self.folder.replace("-seed", ", seed ")

    @property
    def settings(self) -> dict[str, Any]:
        return settings_of(self.recipe, self.cell.learner)


@dataclass(frozen=True)
class Reproduction:
    """What the user asked for: a table, overrides for every cell, and where things go."""

    table: Table
    overrides: Sequence[str] = ()
    data: str | None = None
    out: Path = Path("results")
    runs: Path = RUNS
    device: str = "auto"
    say: Say = print

    def job(self, cell: TableCell, seed: int) -> Job:
        source = self.table.recipe(cell, self.overrides).data.source
        local = [*self.overrides, f"seed={seed}", *locate(source, self.data)]
        return Job(cell, seed, self.table.changed(cell, self.overrides), self.table.recipe(cell, local), source)

    def possible(self, cell: TableCell, seed: int) -> Job:
        """The job, if it can be run: a mistake in the last cell is told before the first one trains."""
        try:
            job = self.job(cell, seed)
            check_recipe(job.recipe)
        except UsageError as error:
            raise UsageError(f"table {self.table.origin!r}, cell {cell.name!r}: {error}") from None
        return job

    def left(self, cells: Sequence[TableCell], seeds: Sequence[int]) -> list[Job]:
        """What is still to run, the first seed of every cell before the second of any; other settings, and what can't
        be run, are refused."""
        check_names(self.table)
        tree = stored(self.out, self.table)
        jobs = []
        for seed in seeds:
            for cell in cells:
                job = self.possible(cell, seed)
                entry = find(tree, cell, job.changed)
                if entry is not None:
                    refuse_other_settings(self.out / f"{self.table.name}.json", entry, job.settings)
                if has_seed(tree, cell, job.changed, seed):
                    self.say(f"{job.title}: in {self.out / self.table.name}.json already")
                else:
                    jobs.append(job)
        return jobs

    def run(self, cells: Sequence[TableCell], seeds: Sequence[int], together: int = 1) -> dict[str, Any]:
        """Run what is left and return all that is stored; a cell that fails does not keep the others from running."""
        jobs = self.left(cells, seeds)
        for job in {job.source: job for job in jobs}.values():
            for split in ("train", "test"):
                part = open_split(
                    job.recipe.data, split, seed=job.seed
                )  # packed once, before several processes want it
                if part.labels is None:
                    raise DataError(f"{job.source}: its {split} images have no labels, and a table's probes need them")
        with disk_faults(self.runs):
            (self.runs / self.table.name).mkdir(parents=True, exist_ok=True)
        if together > 1 and len(jobs) > 1:
            with shared_gpu(self.device, self.say) as variables:
                place = self.runs / self.table.name
                errors = Processes(self.command, place, together, self.say, variables).run(jobs)
        else:
            found = [self.one(job, f"[{number}/{len(jobs)}] {job.title}") for number, job in enumerate(jobs, 1)]
            errors = [error for error in found if error]
        if errors:
            text = f"{len(errors)} of {len(jobs)} runs failed; the first: {errors[0]}"
            raise type(errors[0])(text)
        return stored(self.out, self.table)

    def command(self, job: Job) -> list[str]:
        """The command that runs one job alone."""
        words = [self.table.origin, *self.overrides, "--cells", job.cell.name, "--seeds", f"{job.seed},"]
        words += ["--device", self.device, "--out", str(self.out), "--runs", str(self.runs)]
        return [*words, *(["--data", self.data] if self.data else [])]

    def one(self, job: Job, title: str) -> KontrastError | None:
        """Run one job here and add its numbers; its error where it failed. Numbers that failed would fail again, and
        are kept as a result."""
        self.say(title)
        try:
            with StopSignals():
                record = self.measured(job)
        except (Stopped, Interrupted) as error:
            raise type(error)(f"stopped in {job.title}; give the same command again to go on") from None
        except (DataError, UsageError):
            raise
        except KontrastError as error:
            self.say(f"{title}: failed: {error}")
            if isinstance(error, NumbersError):
                self.keep(job, {"seed": job.seed, "failed": str(error)})
            return error
        self.keep(job, record)
        found = ", ".join(f"{name} {100 * probe['accuracy']:.2f}" for name, probe in record["probes"].items())
        self.say(f"{title}: {found} in {record['seconds']:.0f} s")
        return None

    def keep(self, job: Job, record: dict[str, Any]) -> None:
        words = data_words(job.source, self.images(job))
        add(self.out, self.table, job.cell, job.changed, job.settings, words, record)

    def images(self, job: Job) -> ImageSet:
        return open_split(job.recipe.data, "train", seed=job.seed, pretraining=True)

    def measured(self, job: Job) -> dict[str, Any]:
        on = choose_device(self.device)
        facts = {"seed": job.seed, **checkpoints.versions(), "device": describe_device(on), "at_once": at_once()}
        facts["precision"] = str(precision(job.recipe.training.precision, on)).removeprefix("torch.")
        numbers = self.autoencoder(job) if job.cell.learner in audit.AUTOENCODERS else self.contrastive(job, on)
        return {**facts, "finished": timestamp(), **numbers}

    def contrastive(self, job: Job, device: torch.device) -> dict[str, Any]:
        """Train or go on, then probe and measure."""
        folder = self.runs / self.table.name / job.folder
        refuse_other_recipe(folder, job.recipe, "--runs")
        run = finished_run(job.recipe, folder, Path(f"{folder}.toml"), self.device, self.say)
        info, began = run.folder.info(), time.monotonic()
        curves: dict[str, Any] = curves_of(run)
        numbers: dict[str, float] = {}
        errors: dict[str, float] = {}
        probes = probe_run(run, self.table.probes, device)
        for name in self.table.measures:
            more, drawn = MEASURES[name](run, device, self.say)
            for number, values in more.items():
                numbers[number], errors[number] = mean_and_error(values)
            curves |= drawn
        if "best" in probes[self.table.probes[0]]:
            numbers["best_epoch"] = probes[self.table.probes[0]]["best"]
        if curves.get("knn"):
            numbers["knn_area"] = sum(value for _, value in curves["knn"]) / len(curves["knn"])
        took = {key: info[key] for key in ("device", "precision", "seconds", "steps")}
        took |= {"epochs": read_json_lines(run.path / "metrics.jsonl")[-1]["epoch"], "images": info["data"]["images"]}
        took["probe_seconds"] = time.monotonic() - began
        return {**took, "probes": probes, "numbers": numbers, "errors": errors, "curves": curves}

    def autoencoder(self, job: Job) -> dict[str, Any]:
        """The audit's autoencoder on the cell's images; it is not resumed inside, being short."""
        cell, began = (
            audit.AuditCell(job.cell.learner, "bits", job.recipe.data.random_bits, job.recipe),
            time.monotonic(),
        )
        kept = audit.train_and_probe(cell, self.runs / self.table.name, self.device)
        probe = {key: kept[key] for key in ("accuracy", "low", "high", "n")}
        took = {"seconds": time.monotonic() - began, "epochs": job.recipe.training.epochs, "precision": "float32"}
        return {**took, "probes": {"linear": probe}, "numbers": {}, "curves": {}}


def check_names(table: Table) -> None:
    """Refuse a table that asks for probes or measures that there are not."""
    for word, names, known in (("probe", table.probes, PROBES), ("measure", table.measures, MEASURES)):
        for name in names:
            if name not in known:
                raise UsageError(f"table {table.origin!r}: unknown {word} {name!r}: {nearest(name, known)}")


def check_recipe(recipe: Recipe) -> None:
    """Refuse a cell that could not be trained, or not be measured afterwards."""
    check_options(recipe, objective(recipe.objective.name, **recipe.objective.arguments))
    if recipe.training.epochs < 1:
        raise UsageError("training.epochs=0 trains nothing; give at least 1")
