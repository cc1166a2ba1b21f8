"""Measure what parts of a run take, and estimate the time that is left.

Steps, evaluations, checkpoints and the probes after training are measured separately, because they alternate: a rate
over everything would be wrong before the first evaluation and after it. Compilation counts for nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kontrast.config.recipe import Recipe
from kontrast.training.step_schedule import Position

RATE_SECONDS = 10.0  # over which the current rate is measured
LEAST_SECONDS = 30.0  # over which the rate is measured that decides how long the rest takes, or half of the work so far
FINEST = 0.02  # samples are at least this share of the work apart
LAST = 3  # of evaluations and checkpoints, whose mean is expected for the next ones
GPU_SAVE_SECONDS = 30.0  # on a GPU at least so long between two checkpoints


class Rate:
    """Units of work per second of working time, over the last seconds.

    Args:
        clock: returns seconds of work; pauses must not count.

    Example:
        >>> times = iter([0.0, 8.0, 9.0])
        >>> rate = Rate(lambda: next(times))
        >>> rate.add(0), rate.add(100), rate.add(120)
        (None, None, None)
        >>> rate.over(1), rate.over(10)
        (20.0, 13.333333333333334)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.samples: list[tuple[float, float]] = []
        self.last: tuple[float, float] | None = None

    def restart(self, done: float) -> None:
        """Forget what was measured, for example because it included compilation."""
        self.samples = []
        self.add(done)

    def add(self, done: float) -> None:
        """Note how much is done now."""
        now = self.clock()
        if not self.samples or now - self.samples[-1][0] >= FINEST * (now - self.samples[0][0]):
            self.samples.append((now, done))
        self.last = (now, done)

    @property
    def seconds(self) -> float:
        """The length of the measurement."""
        return self.last[0] - self.samples[0][0] if self.last is not None else 0.0

    def over(self, seconds: float) -> float:
        """Return the rate over the last seconds, or over all of the measurement if it is shorter; 0 if unknown."""
        if self.last is None:
            return 0.0
        now, done = self.last
        begin = next((s for s in reversed(self.samples) if now - s[0] >= seconds), self.samples[0])
        return (done - begin[1]) / (now - begin[0]) if now > begin[0] else 0.0

    @property
    def current(self) -> float:
        """The rate over the last ten seconds."""
        return self.over(RATE_SECONDS)

    @property
    def expected(self) -> float:
        """The rate over a longer time, by which the time left is estimated."""
        return self.over(max(LEAST_SECONDS, self.seconds / 2))


@dataclass(frozen=True)
class Rest:
    """What remains of a run besides its steps: evaluations and checkpoints."""

    evaluations: int
    saves: int


def rest_of(recipe: Recipe, position: Position) -> Rest:
    """Count the evaluations and checkpoints after this position."""

    def before_the_end(every: int) -> int:
        return (position.total - 1) // every - position.step // every if every else 0

    if position.finished:
        return Rest(0, 0)
    evaluated = recipe.evaluation.every * position.per_epoch
    saved = max(1, round(recipe.checkpoints.every * position.per_epoch)) if recipe.checkpoints.every else 0
    return Rest(before_the_end(evaluated) + 1, before_the_end(saved) + 1)  # both happen at the end too


class Timing:
    """How long the parts of a run took, and how long its rest will take.

    Args:
        clock: returns seconds; a simulated one in tests.
        gpu: whether checkpoints are at least half a minute apart.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, gpu: bool = False):
        self.clock, self.gpu = clock, gpu
        self.away = 0.0  # seconds spent on other things than steps
        self.spent: dict[str, list[float]] = {"evaluation": [], "checkpoint": []}
        self.expected = {"evaluation": 0.0, "checkpoint": 0.0}  # of those that were not measured yet
        self.after = 0.0  # seconds that the probes and the report will take after training
        self.linear = 0.0  # those of them that the linear probe will take
        self.rate = Rate(self.working)

    def working(self) -> float:
        """Return the time without evaluations and checkpoints."""
        return self.clock() - self.away

    @contextlib.contextmanager
    def measure(self, part: str = "") -> Iterator[None]:
        """Measure an evaluation or a checkpoint, or something else, which all do not count as steps."""
        begin, before = self.clock(), self.away
        try:
            yield
        finally:
            own = self.clock() - begin
            self.away = before + own  # of two that are nested, the outer one counts
            if part:
                self.spent[part].append(own)

    def mean(self, part: str) -> float:
        """Return the seconds of an evaluation or a checkpoint, as far as is known."""
        last = self.spent[part][-LAST:]
        return sum(last) / len(last) if last else self.expected[part]

    def beside_steps(self, recipe: Recipe, position: Position) -> float:
        """Return the seconds that the evaluations, checkpoints and probes after this position will take."""
        rest = rest_of(recipe, position)
        evaluations, saves, each = rest.evaluations * self.mean("evaluation"), rest.saves, self.mean("checkpoint")
        if self.gpu and self.rate.expected:
            steps = (position.total - position.step) * recipe.training.batch / self.rate.expected
            saves = min(saves, 1 + int((steps + evaluations) / GPU_SAVE_SECONDS))
        return evaluations + saves * each + self.after

    def left(self, recipe: Recipe, position: Position) -> float | None:
        """Return the seconds from here to the end, or None if no rate was measured yet."""
        rate = self.rate.expected
        if not rate:
            return None
        steps = (position.total - position.step) * recipe.training.batch / rate
        return steps + self.beside_steps(recipe, position)
