"""One run of several (of a comparison, an audit, a table): its folder holds it finished, cut short, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kontrast.registry import CheckpointError, UsageError
from kontrast.settings import Recipe, to_toml
from kontrast.studies.cell_images import Marks, refuse_other_images
from kontrast.studies.shapes import ANY, MAYBE_TEXT, TEXT, fault
from kontrast.studies.sweeps import changes
from kontrast.training.defaults import spelled_out
from kontrast.training.folder import RunFolder, read_json, write_atomic
from kontrast.training.run import Run
from kontrast.training.start import pretrain

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
    return changes(spelled_out(Run(folder).recipe), spelled_out(recipe)) if RunFolder(folder).holds_run else []


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
        return pretrain(recipe=str(file), out=folder, device=device, say=say)
    if RunFolder(folder).info().get("finished") and (folder / "encoder.safetensors").is_file():
        return Run(folder)
    return pretrain(out=folder, resume=True, device=device, say=say)
