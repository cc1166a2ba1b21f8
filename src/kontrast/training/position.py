"""Where a run stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Position:
    """Where a run stands: steps taken, of how many, and how many make an epoch."""

    step: int
    total: int
    per_epoch: int

    @property
    def epoch(self) -> int:
        return self.step // self.per_epoch

    @property
    def epochs_done(self) -> float:
        return self.epoch if self.step % self.per_epoch == 0 else self.step / self.per_epoch

    @property
    def epochs(self) -> float:
        return self.total / self.per_epoch

    @property
    def finished(self) -> bool:
        return self.step >= self.total
