"""Log what a run measures: metrics.jsonl, speed.jsonl and, if the recipe asks for them, trackers such as TensorBoard.

To add a tracker, write a class with the methods of `Tracker`, and create it in `open_trackers`.
"""

from __future__ import annotations

from typing import Any, Protocol

from kontrast.config.recipe import TrainingSettings
from kontrast.errors import EnvironmentFault
from kontrast.files import JsonLines
from kontrast.training.run_folder import RunFolder


class Tracker(Protocol):
    """A receiver of every record that goes to metrics.jsonl."""

    def write(self, record: dict[str, Any]) -> None:
        """Log one record: `step`, `epoch` and numbers by name."""

    def close(self) -> None:
        """Finish: training has ended."""


def open_trackers(settings: TrainingSettings, folder: RunFolder, step: int) -> list[Tracker]:
    """Return the trackers that the recipe asks for. A run that is resumed at `step` replaces what came after it."""
    return [TensorBoard(folder, step)] if settings.tensorboard else []


class TensorBoard:
    """Scalars by step, in RUN/tensorboard."""

    def __init__(self, folder: RunFolder, step: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise EnvironmentFault("training.tensorboard=true needs TensorBoard: pip install tensorboard") from None
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def write(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if name not in ("step", "epoch") and isinstance(value, int | float):
                self.writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self.writer.close()


class MetricsLog:
    """The log files and trackers of a run. Only the first rank opens it and writes.

    Args:
        folder: the run folder.
        settings: the recipe's training section, which names the trackers.
    """

    def __init__(self, folder: RunFolder, settings: TrainingSettings):
        self.folder, self.settings = folder, settings
        self.metrics, self.speed = JsonLines(folder / "metrics.jsonl"), JsonLines(folder / "speed.jsonl")
        self.trackers: list[Tracker] = []

    def open(self, step: int, owed: bool = False) -> int:
        """Open the files to continue after `step`, and return how many damaged lines of metrics.jsonl were dropped.

        Args:
            step: the step of the checkpoint; records of later steps are removed.
            owed: whether the evaluation of this step was interrupted; then its record is removed too.
        """
        damaged = self.metrics.open(keep_until_step=step, owed=owed)
        self.speed.open()
        self.trackers = open_trackers(self.settings, self.folder, step)
        return damaged

    def write(self, **record: Any) -> None:
        """Log a record that depends on the recipe and the step alone; other records belong to `speed`."""
        self.metrics.write(**record)
        for tracker in self.trackers:
            tracker.write(record)

    def close(self) -> None:
        self.metrics.close()
        self.speed.close()
        for tracker in self.trackers:
            tracker.close()
