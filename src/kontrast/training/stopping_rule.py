"""training.stop = "auto": end a run whose measures without labels have flattened.

The rule is a function of the measures of all evaluations so far, which every checkpoint contains, so that a resumed run
stops at the same step. RankMe and the conditional entropy are flat long before kNN accuracy is; LiDAR's signal, which
compares images with views of the same image, follows it (results/label-free.md). So it must be flat too if it is
measured, and it chooses the best checkpoint.
"""

from __future__ import annotations

from typing import Any

from kontrast.config.recipe import Recipe
from kontrast.errors import UsageError

FLAT = ("rankme", "conditional_entropy")
"""The measures that must have flattened."""
IF_MEASURED = ("lidar_signal",)
"""Those that must have flattened too if they are measured, which needs more images than the projections are wide."""
TITLES = {"rankme": "RankMe", "conditional_entropy": "the conditional entropy", "lidar_signal": "LiDAR's signal"}
BEST = ("lidar_signal", "rankme")
"""The measure by which the best checkpoint is chosen: the first of these that is measured."""
WINDOW, FEWEST, TOLERANCE = 0.1, 3, 0.02
"""Flat: within 2% over a tenth of the training, and over three evaluations or more."""
FALL = 0.2
"""A fall of RankMe by so much of its largest value is a sign of collapse."""


class StoppingRule:
    """The rule for one run.

    Args:
        recipe: the run's recipe.
        epochs: how many epochs are planned.

    Attributes:
        measures: the epoch and the measures of each evaluation.
    """

    def __init__(self, recipe: Recipe, epochs: float):
        self.automatic = recipe.training.stop == "auto"
        self.epochs, self.warmup = epochs, recipe.training.warmup
        self.measures: list[dict[str, float]] = []
        if self.automatic and not recipe.evaluation.every:
            raise UsageError("training.stop=auto looks at evaluations: set evaluation.every=1 or more epochs")

    def add(self, epoch: float, record: dict[str, Any]) -> str:
        """Take the measures of an evaluation, and return a warning if RankMe has just fallen by a fifth, else ""."""
        fell = self.fell
        known = {name: float(record[name]) for name in {*FLAT, *IF_MEASURED, *BEST} if name in record}
        self.measures.append({"epoch": float(epoch)} | dict(sorted(known.items())))
        if not self.automatic or not self.fell or fell:
            return ""
        top, now = max(one["rankme"] for one in self.measures), self.measures[-1]["rankme"]
        return f"RankMe fell from {top:.1f} to {now:.1f} at epoch {epoch:g}: the representation may be collapsing"

    @property
    def fell(self) -> bool:
        """Whether RankMe is a fifth below its largest value."""
        ranks = [one["rankme"] for one in self.measures if "rankme" in one]
        return bool(ranks) and ranks[-1] < (1 - FALL) * max(ranks)

    @property
    def flat(self) -> bool:
        """Whether the measures have been flat for a tenth of the training, and the warm-up was over by then."""
        if not self.automatic or not self.measures:
            return False
        before = self._before()
        if not before or before[-1]["epoch"] < self.warmup:
            return False
        recent = self._recent()
        if len(recent) < FEWEST or recent[0]["epoch"] < self.warmup:
            return False
        return all(_within(TOLERANCE, [one.get(name) for one in recent]) for name in _needed(recent))

    def _before(self) -> list[dict[str, float]]:
        """Return the evaluations that are a tenth of the training old."""
        start = self.measures[-1]["epoch"] - WINDOW * self.epochs
        return [one for one in self.measures if one["epoch"] <= start + 1e-9]

    def _recent(self) -> list[dict[str, float]]:
        """Return the evaluations that are compared."""
        return self.measures[-max(FEWEST, len(self.measures) - len(self._before()) + 1) :]

    def chosen_by(self, record: dict[str, Any]) -> str:
        """Return the measure by which the best checkpoint is chosen: kNN, or one without labels."""
        return next((name for name in BEST if name in record), BEST[0]) if self.automatic else "knn"

    def reason(self) -> str:
        """Return a line that says why the run was stopped."""
        names = _needed(self._recent())
        *titles, last = (TITLES[name] for name in names)
        line = f"stopped at epoch {self.measures[-1]['epoch']:g} of {self.epochs:g}: {', '.join(titles)} and {last}"
        line += f" stayed within {100 * TOLERANCE:g}% for a tenth of the training"
        if not set(IF_MEASURED) <= set(names):
            line += "; LiDAR was not measured, which needs more images than the projections are wide"
        return line

    def kept(self, best: dict[str, Any], per_epoch: int) -> str:
        """Return a line that says which epochs encoder.safetensors and the best checkpoint are of; "" without one."""
        by = next((name for name in best if name != "step"), "")
        if not by:
            return ""
        epoch = f"epoch {best['step'] / per_epoch:g}"
        last = f"encoder.safetensors has the last epoch, {self.measures[-1]['epoch']:g}"
        return f"best by {TITLES.get(by, by)}: {epoch}, kept as checkpoints/step-{best['step']:08d}; {last}"


def _needed(recent: list[dict[str, float]]) -> list[str]:
    """Return the measures that must be flat in these evaluations."""
    return [*FLAT, *(name for name in IF_MEASURED if any(name in one for one in recent))]


def _within(tolerance: float, values: list[float | None]) -> bool:
    """Whether all values were measured and differ by at most this share of the largest."""
    known = [value for value in values if value is not None]
    return len(known) == len(values) and max(known) - min(known) <= tolerance * max(map(abs, known))


def are_measures(tree: Any) -> bool:
    """Return whether this is the list of measures that a checkpoint contains. A checkpoint may come from others."""
    return isinstance(tree, list) and all(
        isinstance(one, dict) and "epoch" in one and all(type(value) is float for value in one.values()) for one in tree
    )
