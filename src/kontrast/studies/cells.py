"""Runs the cells of a study (compare, audit or reproduce): one training and its measurements per cell.

A finished cell is read from its record, an interrupted one is resumed, and the others are trained. If a cell fails, its
error is recorded and the others continue; the study itself fails only if all of its cells did.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kontrast.config.overrides import flat
from kontrast.config.recipe import DataSettings, Recipe, to_toml, to_tree
from kontrast.data import ImageSet
from kontrast.errors import CheckpointError, DataError, KontrastError, NumbersError, Stopped, StorageFault, UsageError
from kontrast.files import read_json, write_atomic, write_json
from kontrast.probes import ProbeResult
from kontrast.runs.run import Run
from kontrast.training.device import choose_device
from kontrast.training.peak_memory import PeakMemory
from kontrast.training.pretrain import pretrain
from kontrast.training.resolve import as_chosen, with_defaults
from kontrast.training.run_folder import RunFolder
from kontrast.training.signals import Interrupted, StopSignals
from kontrast.training.splits import open_split

STOPPED = "stopped; finished runs are saved: run the same command again to resume"
TRAINED_ON = "trained"  # the key of the fingerprint of the images that the encoder was trained on
Record = dict[str, Any]
Say = Callable[[str], None]
Fingerprints = dict[str, str | None]


@dataclass(frozen=True)
class Cell:
    """One training of a study and where its files are."""

    name: str  # unique within the study
    recipe: Recipe
    folder: Path  # the run folder
    recipe_file: Path  # where the recipe is written before the training starts
    record_file: Path  # where the measurements are stored
    facts: Record = field(default_factory=dict)  # what identifies the cell in its record: seed, learner, swept values

    @property
    def seed(self) -> int:
        return self.recipe.seed


class CellRunner(ABC):
    """Runs the cells of one study one after another. A study overrides `measure` and `describe`.

    Args:
        device: auto, cpu or cuda.
        say: receives one line per event.
        option: the command-line option that names the study's folder, for error messages.
    """

    def __init__(self, device: str, say: Say, option: str = "--out"):
        self.device, self.say, self.option = device, say, option
        self.images: dict[str, Fingerprints] = {}  # the expected fingerprints by cell; empty: not compared
        self.errors: list[KontrastError] = []  # of the cells that failed

    @abstractmethod
    def measure(self, cell: Cell) -> Record:
        """Train the cell, or resume its training, and return its numbers; `fingerprints` are those of its images."""

    @abstractmethod
    def describe(self, record: Record) -> str:
        """Summarize a finished record in a few words."""

    def check(self, cells: Sequence[Cell], compare_images: bool = True) -> None:
        """Before the first cell trains, refuse cells that were run with other settings or on other images."""
        if compare_images:
            self.images = current_fingerprints(cells)
        for cell in cells:
            record, different = self.read(cell) or {}, []
            if RunFolder(cell.folder).holds_run:
                stored = Run(cell.folder).recipe
                wanted = as_chosen(cell.recipe, stored, sized=True, given=keys_given(cell.recipe))
                different = recipe_changes(with_defaults(stored), with_defaults(wanted))
            # Images that changed can change the settings derived from them, so they are reported first, unless the
            # user chose other data.
            if not any(text.startswith("data.") for text in different):
                self.refuse_other_images(cell, record.get("images"))
            settings = cell.facts.get("fingerprint")
            if different or record.get("fingerprint", settings) != settings:
                raise UsageError(
                    f"{cell.name} was run with other settings ({', '.join(different[:3]) or cell.record_file}): give "
                    f"the same settings to resume, or another {self.option}"
                )

    def refuse_other_images(self, cell: Cell, seen: Fingerprints | None) -> None:
        """Refuse a cell whose record, or whose run folder, has other fingerprints than the images have now.

        Fingerprints that an older version did not store are not compared.
        """
        before = dict(seen or {})
        if RunFolder(cell.folder).holds_run:
            before[TRAINED_ON] = RunFolder(cell.folder).info().get("data", {}).get("fingerprint")
        now = self.images.get(cell.name, {})
        other = [part for part in now if before.get(part) not in (None, now[part])]
        if other:
            part = "test" if other == ["test"] else "train"
            raise DataError(
                f"the {part} images changed since {cell.folder} was run, so new runs can't be compared with it: "
                f"restore the images, or give another {self.option} to run everything on the new ones"
            )

    def run(self, cells: Sequence[Cell], save: Callable[[list[Record]], object] = lambda records: None) -> list[Record]:
        """Run all cells that are not finished; `save` receives the records so far after each cell."""
        records: list[Record] = []
        with StopSignals(STOPPED):
            for number, cell in enumerate(cells, 1):
                records.append(self.run_cell(cell, f"[{number}/{len(cells)}] {cell.name}"))
                save(records)
        return records

    def run_cell(self, cell: Cell, title: str) -> Record:
        """Return the stored record of a cell, or measure it now. A failure is recorded and not raised, except
        for one of the disk."""
        record = self.read(cell)
        if record is not None:
            self.say(f"{title}: already {record['status']}")
            if record["status"] == "failed":
                self.errors.append(NumbersError(record["reason"]))
            return record
        self.say(f"{title}: {'resuming' if RunFolder(cell.folder).holds_run else 'training'}")
        try:
            numbers = self.measure(cell)
            self.refuse_other_images(cell, numbers.pop("fingerprints", None))  # changed during the training?
            record = self.record(cell, numbers)
            self.write(cell, record)
            self.say(f"{title}: {self.describe(record)}")
        except (Stopped, Interrupted) as error:
            raise type(error)(f"stopped in {cell.name}; run the same command again to resume") from None
        except StorageFault:  # the other cells would fail too; repeating the command resumes this one
            raise
        except KontrastError as error:
            self.say(f"{title}: failed: {error}")
            self.errors.append(error)
            failure = {"status": "failed", "reason": str(error), "exit_code": error.exit_code}
            record = self.record(cell, failure)
            if isinstance(error, NumbersError):  # it would fail again; other errors, such as out of memory, may not
                self.write(cell, record)
        return record

    def raise_if_all_failed(self, count: int) -> None:
        """Raise the first error, with its exit code, if none of this many cells finished."""
        if self.errors and len(self.errors) == count:
            first = self.errors[0]
            raise type(first)(f"all {count} runs failed; the first: {first}" if count > 1 else str(first))

    def record(self, cell: Cell, numbers: Record) -> Record:
        """What is stored about a cell: its numbers, or the reason of its failure."""
        return {**cell.facts, "images": self.images[cell.name], "status": "finished", **numbers}

    def read(self, cell: Cell) -> Record | None:
        """Read the record of a cell that finished or failed; None if there is none."""
        if not cell.record_file.is_file():
            return None
        record = read_json(cell.record_file)
        if not isinstance(record, dict) or record.get("status") not in ("finished", "failed"):
            raise CheckpointError(f"{cell.record_file} is damaged: delete it to measure the cell again")
        return record

    def write(self, cell: Cell, record: Record) -> None:
        write_json(cell.record_file, record)


def group_by(records: Sequence[Record], *keys: str) -> dict[Any, list[Record]]:
    """Group records by the value of one key, or the values of several, in order of appearance."""
    groups: dict[Any, list[Record]] = {}
    for record in records:
        value = record[keys[0]] if len(keys) == 1 else tuple(record[key] for key in keys)
        groups.setdefault(value, []).append(record)
    return groups


def finish_run(cell: Cell, device: str, say: Say) -> tuple[Run, int | None]:
    """Return the cell's finished run after training it or resuming its training, if necessary.

    The second value is the peak memory of the training in bytes; None if it had ended before or if the system doesn't
    provide the number.
    """
    folder = RunFolder(cell.folder)
    if folder.holds_run and folder.info().get("finished") and (cell.folder / "encoder.safetensors").is_file():
        return Run(cell.folder), None
    with PeakMemory(choose_device(device)) as memory:
        if folder.holds_run:
            pretrain(out=cell.folder, resume=True, device=device, say=say)
        else:
            write_atomic(cell.recipe_file, to_toml(cell.recipe, f"cell {cell.name} of a study"))
            pretrain(recipe=str(cell.recipe_file), out=cell.folder, device=device, say=say)
    return Run(cell.folder), memory.bytes


def keys_given(recipe: Recipe) -> set[str]:
    """The settings of a cell that its images don't choose."""
    depth = set() if recipe.data.depth == "auto" else {"data.depth"}
    return depth | {f"views.{key}" for key in recipe.views.arguments}


def recipe_changes(before: Recipe, after: Recipe) -> list[str]:
    """The settings that differ, each as `training.lr 0.1 -> 0.2`."""
    old, new = flat(to_tree(before)), flat(to_tree(after))
    return [f"{key} {old.get(key)} -> {new.get(key)}" for key in sorted(old | new) if old.get(key) != new.get(key)]


def probe_fingerprints(train: ImageSet, test: ImageSet | None) -> Fingerprints:
    """Fingerprints of the two splits that probes read."""
    return {"train": train.fingerprint, "test": None if test is None else test.fingerprint}


def probe_numbers(result: ProbeResult) -> Record:
    """The numbers of a probe that a record stores."""
    numbers = {key: getattr(result, key) for key in ("accuracy", "low", "high", "n", "top5", "mean_per_class")}
    return {key: value for key, value in numbers.items() if value is not None}


def current_fingerprints(cells: Sequence[Cell]) -> dict[str, Fingerprints]:
    """Fingerprints of each cell's images as they are now; cells with the same data open them once."""
    known: dict[DataSettings, Fingerprints] = {}
    by_cell = {}
    for cell in cells:
        data = replace(cell.recipe.data, random_bits=0, overlay_digits=0)  # these don't change the fingerprints
        if data not in known:
            train = open_split(data, "train")
            test = open_split(data, "test", other_bad=train.bad) if train.has_test else None
            same = data.split == "train" and data.imbalance == "none"
            trained = train if same else open_split(data, "train", pretraining=True)
            known[data] = {**probe_fingerprints(train, test), TRAINED_ON: trained.fingerprint}
        by_cell[cell.name] = known[data]
    return by_cell


def seeds_from(first: int, count: int) -> range:
    """Consecutive seeds, one per run of a learner or recipe."""
    if count < 1:
        raise UsageError(f"--seeds {count}: give at least 1")
    return range(first, first + count)
