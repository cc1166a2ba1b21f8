"""Log what a run measures: metrics.jsonl, speed.jsonl and, if the recipe names any, trackers such as TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kontrast.config.recipe import Recipe
from kontrast.files import JsonLines
from kontrast.training.run_folder import RunFolder
from kontrast.training.trackers import RunTrackers
from kontrast.training.trackers.run_trackers import Say


class MetricsLog:
    """The log files and trackers of a run. Only the first rank opens it and writes.

    Args:
        folder: the run folder.
        trackers: the names of trackers.
        say: receives messages for people.
    """

    def __init__(self, folder: RunFolder, trackers: Sequence[str], say: Say):
        self.folder = folder
        self.metrics, self.speed = JsonLines(folder / "metrics.jsonl"), JsonLines(folder / "speed.jsonl")
        self.trackers = RunTrackers(folder, trackers, say)

    def open(self, recipe: Recipe, step: int, owed: bool = False) -> int:
        """Open the files to continue after `step`, and return how many damaged lines of metrics.jsonl were dropped.

        Args:
            recipe: what is trained, for the trackers.
            step: the step of the checkpoint; records of later steps are removed.
            owed: whether the evaluation of this step was interrupted; then its record is removed too.
        """
        damaged = self.metrics.open(keep_until_step=step, owed=owed)
        self.speed.open()
        self.trackers.start(recipe, step - owed)
        return damaged

    def write(self, **record: Any) -> None:
        """Log a record that depends on the recipe and the step alone; other records belong to `speed`."""
        self.metrics.write(**record)
        self.trackers.logged(record["step"])

    def sync(self) -> None:
        """Wait until the records are on the disk, before a checkpoint is."""
        self.metrics.sync()

    def commit(self, step: int, owed: bool) -> None:
        """A checkpoint of this step was written: the run can't go back to before it.

        Args:
            step: the step.
            owed: whether the step is still to be evaluated.
        """
        self.trackers.commit(step - owed)

    def close(self) -> None:
        self.metrics.close()
        self.speed.close()
