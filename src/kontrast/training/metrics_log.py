"""What a run writes down as it trains: metrics.jsonl, speed.jsonl and, where asked for, TensorBoard's events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kontrast.errors import EnvironmentFault
from kontrast.files import JsonLines
from kontrast.training.run_folder import RunFolder


class MetricsLog:
    """Of a run's ranks only the first opens them, and so writes."""

    def __init__(self, folder: RunFolder, tensorboard: bool):
        self.folder, self.tensorboard = folder, tensorboard
        self.metrics, self.speed = JsonLines(folder / "metrics.jsonl"), JsonLines(folder / "speed.jsonl")
        self.board: TensorBoardLog | None = None

    def open(self, step: int, owed: bool = False) -> int:
        """From this step on, or from its evaluation on where that is owed; how many lines of metrics.jsonl were damaged
        and are left out."""
        damaged = self.metrics.open(keep_until_step=step, owed=owed)
        self.speed.open()
        self.board = TensorBoardLog(self.folder.path, step) if self.tensorboard else None
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


class TensorBoardLog:
    """Scalars by step; a resumed run hides what came after its checkpoint."""

    def __init__(self, run: Path, step: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise EnvironmentFault(
                "training.tensorboard = true needs TensorBoard: pip install tensorboard, or leave it out"
            ) from None
        self.writer = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1 if step else None)

    def write(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if name not in ("step", "epoch") and isinstance(value, int | float):
                self.writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self.writer.close()
