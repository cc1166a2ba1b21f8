"""Learner, loop, optimizers, schedules, checkpoints, run folder."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kontrast.training.evaluation import evaluate
    from kontrast.training.found import result_table
    from kontrast.training.run import Run, load
    from kontrast.training.start import pretrain

_HOMES = {"Run": "run", "evaluate": "evaluation", "load": "run", "pretrain": "start", "result_table": "found"}
__all__ = ["Run", "evaluate", "load", "pretrain", "result_table"]


def __getattr__(name: str) -> Any:
    # A program of its own that takes one part (an optimizer, the learner) does not pay for the others' imports.
    if name not in _HOMES:
        raise AttributeError(f"module 'kontrast.training' has no attribute {name!r}")
    return getattr(import_module(f"kontrast.training.{_HOMES[name]}"), name)
