"""The run's numbers for TensorBoard, beside metrics.jsonl, which stays the record: RUN/tensorboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kontrast.registry import EnvironmentFault


class Board:
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
