"""One run of several (of a comparison, an audit, a table): its folder holds it finished, cut short, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kontrast.registry import UsageError
from kontrast.settings import Recipe, to_toml
from kontrast.studies.sweeps import changes
from kontrast.training.defaults import spelled_out
from kontrast.training.folder import RunFolder, write_atomic
from kontrast.training.run import Run
from kontrast.training.start import pretrain


def refuse_other_recipe(folder: Path, recipe: Recipe, option: str = "--out") -> None:
    """A folder that holds a run with other settings is not gone on with."""
    different = changes(spelled_out(Run(folder).recipe), spelled_out(recipe)) if RunFolder(folder).holds_run else []
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
