"""What a run writes down as it trains: metrics.jsonl, speed.jsonl and, where asked for, TensorBoard's events."""

from __future__ import annotations

from typing import Any

from kontrast.training.folder import Lines, RunFolder
from kontrast.training.tensorboard import Board


class Records:
    """Of a run's ranks only the first opens them, and so writes."""

    def __init__(self, folder: RunFolder, tensorboard: bool):
        self.folder, self.tensorboard = folder, tensorboard
        self.metrics, self.speed = Lines(folder / "metrics.jsonl"), Lines(folder / "speed.jsonl")
        self.board: Board | None = None

    def open(self, step: int, owed: bool = False) -> int:
        """From this step on, or from its evaluation on where that is owed; how many lines of metrics.jsonl were damaged
        and are left out."""
        damaged = self.metrics.open(keep_until_step=step, owed=owed)
        self.speed.open()
        self.board = Board(self.folder.path, step) if self.tensorboard else None
        return damaged

    def write(self, **record: Any) -> None:
        """A function of the recipe and the step alone; what differs from run to run goes into `speed`."""
        self.metrics.write(**record)
        if self.board is not None:
            self.board.write(record)

    def close(self) -> None:
        self.metrics.close()
        self.speed.close()
        if self.board is not None:
            self.board.close()
