"""One run of several (of a comparison, an audit, a table): its folder holds it finished, cut short, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kontrast.config.recipe import DataSettings, Recipe, to_toml
from kontrast.data import ImageSet
from kontrast.errors import CheckpointError, DataError, UsageError
from kontrast.files import read_json, write_atomic
from kontrast.runs.run import Run
from kontrast.studies.compare.sweep import changes
from kontrast.studies.schema import ANY, MAYBE_TEXT, TEXT, fault
from kontrast.training.pretrain import pretrain
from kontrast.training.resolve import with_defaults
from kontrast.training.run_folder import RunFolder
from kontrast.training.splits import open_split

FAILED = {"status": TEXT, "reason": TEXT}


def stored_cell(path: Path, facts: dict[str, Any], numbers: dict[str, Any]) -> dict[str, Any] | None:
    """The record of a cell that is done, whole; None where there is none. facts, numbers: the shapes of what every
    record holds, and of what a finished one holds too."""
    if not path.is_file():
        return None
    record = read_json(path)
    status = record.get("status") if isinstance(record, dict) else None
    shape = FAILED if status == "failed" else {"status": TEXT, **numbers}
    wrong = fault(record, {**facts, **shape, "images?": {ANY: MAYBE_TEXT}})
    if not wrong and status not in ("finished", "failed"):
        wrong = f"its status {status!r} is neither finished nor failed"
    if wrong:
        raise CheckpointError(f"{path} is damaged ({wrong}): remove it, and the cell is measured again")
    return record


def refuse_other_cell(folder: Path, recipe: Recipe, record: dict[str, Any] | None, now: Marks) -> None:
    """Refuse a cell with other settings or other images. Images that changed can change settings made from them, and
    are then told first; other data that was asked for is a setting."""
    if not any(text.startswith("data.") for text in other_settings(folder, recipe)):
        refuse_other_images(folder, record, now)
    refuse_other_recipe(folder, recipe)


def other_settings(folder: Path, recipe: Recipe) -> list[str]:
    """By what the run in this folder, if there is one, differs from the recipe."""
    return changes(with_defaults(Run(folder).recipe), with_defaults(recipe)) if RunFolder(folder).holds_run else []


def refuse_other_recipe(folder: Path, recipe: Recipe, option: str = "--out") -> None:
    """A folder that holds a run with other settings is not gone on with."""
    different = other_settings(folder, recipe)
    if different:
        raise UsageError(
            f"{folder} was run with other settings ({', '.join(different[:3])}): "
            f"give the same ones to go on, or another {option}"
        )


def finished_run(recipe: Recipe, folder: Path, file: Path, device: str, say: Callable[[str], None]) -> Run:
    """The run of this recipe in this folder, finished: read, gone on with, or trained; `file` keeps the recipe."""
    if not RunFolder(folder).holds_run:
        write_atomic(file, to_toml(recipe, f"one run of several: {folder.name}"))
        return Run(pretrain(recipe=str(file), out=folder, device=device, say=say))
    if RunFolder(folder).info().get("finished") and (folder / "encoder.safetensors").is_file():
        return Run(folder)
    return Run(pretrain(out=folder, resume=True, device=device, say=say))


Marks = dict[str, str | None]
TRAINED = "trained"


def marks_of(train: ImageSet, test: ImageSet | None) -> Marks:
    """The fingerprints that a cell's record keeps: of both parts that probes read."""
    return {"train": train.fingerprint, "test": None if test is None else test.fingerprint}


def images_at_hand(recipes: Sequence[Recipe]) -> list[Marks]:
    """For each recipe the fingerprints of its images as they are now, those it trains on among them."""
    known: dict[DataSettings, Marks] = {}
    made = []
    for recipe in recipes:
        data = replace(recipe.data, random_bits=0, overlay_digits=0)  # laid over the images, they are no other images
        if data not in known:
            known[data] = read_marks(data)
        made.append(known[data])
    return made


def read_marks(data: DataSettings) -> Marks:
    train = open_split(data, "train")
    test = open_split(data, "test", other_bad=train.bad) if train.has_test else None
    plain = data.split == "train" and data.imbalance == "none"
    trained = train if plain else open_split(data, "train", pretraining=True)
    return {**marks_of(train, test), TRAINED: trained.fingerprint}


def refuse_other_images(folder: Path, record: dict[str, Any] | None, now: Marks) -> None:
    """Refuse a cell that saw other images than there are now: by its record, and by its run's own note. What an older
    version left without fingerprints is taken as it is."""
    before: Marks = dict((record or {}).get("images") or {})
    noted = RunFolder(folder).info().get("data") if RunFolder(folder).holds_run else None
    if isinstance(noted, dict):
        before[TRAINED] = noted.get("fingerprint")
    other = [part for part in now if before.get(part) not in (None, now[part])]
    if other:
        part = "test" if other == ["test"] else "train"
        raise DataError(
            f"{folder} was run on other {part} images than there are now, so it can't be compared with new runs: put "
            "the images back as they were, or give another --out to run all on the new ones"
        )
