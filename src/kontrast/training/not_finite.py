"""A step whose loss or gradient is NaN or infinite, on any rank: noticed before the weights move, written down."""

from __future__ import annotations

from typing import Any

from kontrast.data import Feeder
from kontrast.registry import NumbersError, UsageError, nearest
from kontrast.training.checkpoints import checkpoints
from kontrast.training.folder import RunFolder, write_json

ON_NAN = ("stop", "skip")
SKIPS = 10
"""As many steps may be skipped in one run; a run that needs more is going wrong."""


def check_choice(name: str) -> str:
    if name not in ON_NAN:
        raise UsageError(f"unknown --on-nan {name!r}: {nearest(name, ON_NAN)}")
    return name


def write_down(folder: RunFolder, failures: list[dict[str, Any]]) -> None:
    """not-finite.json: each such step, its learning rate and terms, and the images of its batch on all ranks."""
    write_json(folder / "not-finite.json", {"version": 1, "steps": failures})


def failure(feeder: Feeder, step: int, lr: float, terms: dict[str, float]) -> dict[str, Any]:
    """What is known of step number `step`, counted from 0."""
    epoch, inside = divmod(step, feeder.steps_per_epoch)
    rows = feeder.order(epoch)[inside * feeder.batch : (inside + 1) * feeder.batch].tolist()
    images = [{"id": int(feeder.data.index[row]), "name": str(feeder.data.names[row])} for row in rows]  # type: ignore[index]
    return {"step": step + 1, "lr": lr, "terms": {k: f"{v:.4g}" for k, v in terms.items()}, "images": images}


def words(found: dict[str, Any]) -> str:
    facts = ", ".join([f"lr {found['lr']:.3g}", *(f"{k} {v}" for k, v in found["terms"].items())])
    return f"the loss or a gradient is not finite at step {found['step']} ({facts}), its images are in not-finite.json"


def stopped(found: dict[str, Any], folder: RunFolder) -> NumbersError:
    saved = checkpoints(folder / "checkpoints")
    kept = f"the last good checkpoint is {saved[-1]}" if saved else "there is no checkpoint before it"
    return NumbersError(f"{words(found)}; {kept}: lower training.lr or raise objective.temperature")
