"""Plan the epochs of a run that is given minutes, and say how long a run takes and why."""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from kontrast.config.overrides import Overrides, override_keys
from kontrast.config.recipe import Recipe
from kontrast.data import ImageSet
from kontrast.errors import UsageError
from kontrast.float64 import float64_device
from kontrast.lens.map_2d import map_to_plane
from kontrast.operating_system import process_age
from kontrast.probes import extract_features, knn, logistic
from kontrast.training.build import evaluation_view
from kontrast.training.splits import Splits
from kontrast.training.step_schedule import Position
from kontrast.training.timing import Timing, rest_of

MARGIN = 0.03  # of the budget is left for what varies
EVALUATIONS = 0.05  # of the time at most goes to evaluations, unless the user says how often
WARMUP = 0.2  # of the epochs at most are warm-up
WHOLE = 20  # epochs from which on a plan has whole ones: a part of one is then less than a twentieth of the time
PROBES = 0.5  # of the time left at most goes to probes and report; otherwise the linear probe is left out
SAMPLE = 2048  # images that the probes are tried on
REPORT_SECONDS = 2.0  # to open the images again and to write the page
MAP_STEPS, MAP_ITERATIONS = 20, 500  # of the report's map, that are tried and that it takes


@dataclass(frozen=True)
class Budget:
    """A number of minutes that began at some time of the clock.

    Args:
        minutes: for everything, from the start of the command to its end.
        began: when the command started, by the clock of `Timing`.
    """

    minutes: float
    began: float

    def __post_init__(self) -> None:
        if not 0 < self.minutes < math.inf:
            raise UsageError(f"--minutes {self.minutes:g}: give a number of minutes above 0")

    def check(self, overrides: Overrides) -> None:
        """Raise if the user also says how long to train."""
        both = [key for key in override_keys(overrides) if key in ("training.epochs", "training.max_steps")]
        if both:
            raise UsageError(f"--minutes and {both[0]} both say how long to train: give one of them")

    def left(self, now: float) -> float:
        return self.began + 60 * self.minutes - now


def process_start() -> float:
    """Return when this process started, by the monotonic clock, or now if the system doesn't say."""
    return time.monotonic() - process_age()


@dataclass(frozen=True)
class Plan:
    """What a budget decides of a recipe."""

    epochs: int
    max_steps: int  # 0 if it ends with an epoch
    warmup: float
    milestones: tuple[float, ...]
    every: int  # epochs between two evaluations
    linear: bool  # whether the linear probe fits into the time too

    def apply(self, recipe: Recipe) -> Recipe:
        """Return the recipe with these epochs and a schedule to match."""
        training = replace(recipe.training, epochs=self.epochs, max_steps=self.max_steps, warmup=self.warmup)
        training = replace(training, milestones=self.milestones)
        evaluation = replace(recipe.evaluation, every=self.every, linear=self.linear)
        return replace(recipe, training=training, evaluation=evaluation)


def plan_epochs(recipe: Recipe, timing: Timing, per_epoch: int, seconds: float, fixed: bool) -> Plan:
    """Return the epochs that fit into these seconds, of which the last may be a part of one, and a schedule to match.

    Args:
        recipe: what would be trained without a budget.
        timing: the measured rate, evaluation and checkpoint, and the seconds after training.
        per_epoch: steps in an epoch.
        seconds: for training, evaluations, checkpoints and what comes after training.
        fixed: whether the user says how often to evaluate.
    """
    t, every = recipe.training, recipe.evaluation.every
    step = t.batch / timing.rate.expected
    if every and not fixed:
        every = max(every, math.ceil(timing.mean("evaluation") / (EVALUATIONS * per_epoch * step)))
    seen = replace(recipe, evaluation=replace(recipe.evaluation, every=every))

    most = max(1, int(seconds / step))
    fitting = bisect.bisect_right(
        range(1, most + 1), seconds, key=lambda steps: seconds_of(seen, timing, steps, per_epoch)
    )
    steps = max(1, fitting)
    if steps >= WHOLE * per_epoch:
        steps -= steps % per_epoch
    length, epochs = steps / per_epoch, math.ceil(steps / per_epoch)
    milestones = tuple(round(m * length / max(1, t.epochs), 6) for m in t.milestones)
    warmup = min(t.warmup, WARMUP * length)
    return Plan(epochs, steps if steps % per_epoch else 0, warmup, milestones, every, recipe.evaluation.linear)


def seconds_of(recipe: Recipe, timing: Timing, steps: int, per_epoch: int) -> float:
    """Return how long so many steps take, with their evaluations, checkpoints and what comes after training."""
    beside = timing.beside_steps(recipe, Position(0, steps, per_epoch))
    return steps * recipe.training.batch / timing.rate.expected + beside


def describe_time(recipe: Recipe, timing: Timing, position: Position) -> str:
    """Return a line on how long the rest takes and why."""
    left, rest = timing.left(recipe, position) or 0.0, rest_of(recipe, position)
    rate, per_epoch = timing.rate.expected, position.per_epoch
    epochs = (position.total - position.step) / per_epoch
    parts = [f"{epochs_text(epochs)} of {per_epoch * recipe.training.batch:,} images at {rate:,.0f} images/s"]
    if rest.evaluations and timing.mean("evaluation") >= 0.5:
        parts.append(f"{rest.evaluations} evaluations of {timing.mean('evaluation'):.1f} s")
    if timing.after:
        parts.append(f"probes and report of {minutes_text(timing.after)}")
    return (
        f"time: about {minutes_text(left)} from here: {', '.join(parts)}; set training.epochs or --minutes for another"
    )


def epochs_text(epochs: float) -> str:
    """Return a number of epochs, with decimals below a hundred: "1.5 epochs", "1 epoch" or "1,000 epochs"."""
    number = f"{epochs:,.0f}" if epochs >= 100 else f"{epochs:.3g}"
    return f"{number} epoch{'' if number == '1' else 's'}"


def minutes_text(seconds: float) -> str:
    """Return a duration in minutes, with a decimal below ten; in seconds if it is short."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} minutes" if seconds < 600 else f"{seconds / 60:,.0f} minutes"


class AfterTraining:
    """Estimate how long the probes and the report will take, by trying them on a part of the images.

    Args:
        recipe: the run's recipe.
        splits: its images.
        device: where features are computed.
        probed: whether probes and a report follow the training at all.
    """

    def __init__(self, recipe: Recipe, splits: Splits, device: torch.device, probed: bool):
        self.recipe, self.device, self.probed = recipe, device, probed
        train, test = splits.train, splits.test
        self.counts = len(train), len(test) if test is not None else 0
        self.labeled = test is not None and train.labels is not None and test.labels is not None
        self.train = train.first(min(len(train), max(256, min(SAMPLE, len(train) // 4))))

    def __call__(self, network: nn.Module, clock: Callable[[], float] = time.monotonic) -> tuple[float, float, float]:
        """Return the seconds after training, those of them for the linear probe, and the seconds of one evaluation."""
        encoder, labeled, train = getattr(network, "encoder", network), self.labeled, self.train
        view = evaluation_view(self.recipe)
        extract_features(encoder, train.first(64), view, device=self.device)  # the first call is slower
        begin = clock()
        features = extract_features(encoder, train, view, device=self.device)
        per_image = (clock() - begin) / len(train)
        images, settings = sum(self.counts), self.recipe.evaluation
        evaluation = per_image * 1.2 * (min(images, 60_000) if settings.every else 512)
        if not self.probed:
            return 0.0, 0.0, evaluation
        networks = 2 + (self.recipe.start is not None) if labeled else 1
        seconds = REPORT_SECONDS + per_image * images * networks
        if settings.gallery:
            seconds += self._map_seconds(features, clock)
        linear = 0.0
        if labeled:
            begin = clock()
            pixels = extract_features(nn.Flatten(), train, view, device=self.device)
            seconds += (clock() - begin) / len(train) * images
            for rows, times in ((features, networks), (pixels, 1)):
                seconds += times * self._nearest_seconds(rows, train, clock)
                if settings.linear:
                    linear += times * self._linear_seconds(rows, train, clock)
        return seconds + linear, linear, evaluation

    def _map_seconds(self, features: torch.Tensor, clock: Callable[[], float]) -> float:
        """Return how long the report's map takes: its time grows with the square of its points."""
        points = min(self.recipe.evaluation.gallery, self.counts[1] or self.counts[0])
        shown, took = features[:points], []
        for iterations in (0, MAP_STEPS):
            begin = clock()
            map_to_plane(shown, iterations=iterations)
            took.append(clock() - begin)
        whole = took[0] + max(0.0, took[1] - took[0]) * MAP_ITERATIONS / MAP_STEPS
        return whole * (points / max(1, len(shown))) ** 2

    def _nearest_seconds(self, features: torch.Tensor, train: ImageSet, clock: Callable[[], float]) -> float:
        """Return how long kNN takes on all images."""
        x, labels = features.to(float64_device(self.device)), train.labels
        assert labels is not None
        begin = clock()
        knn(x, labels, x, labels)
        return (clock() - begin) * self.counts[0] * self.counts[1] / len(x) ** 2

    def _linear_seconds(self, features: torch.Tensor, train: ImageSet, clock: Callable[[], float]) -> float:
        """Return how long the linear probe takes on all images."""
        x, labels = features.to(float64_device(self.device)), train.labels
        assert labels is not None
        begin = clock()
        logistic(x, labels, x, labels)
        width = features.shape[1]
        growth = fit_work(self.counts[0], width) / fit_work(len(features), width)
        # A GPU waits for each of the many small operations rather than for their numbers.
        return (clock() - begin) * (growth if self.device.type == "cpu" else growth**0.5)


def fit_work(images: int, width: int) -> float:
    """Return the work of a linear probe, in a unit of its own.

    Part of it grows with images times dimensions, and part with the square of the dimensions, whatever the images. The
    probe works in no more dimensions than the images span.
    """
    dimensions = width if 2 * images > width else images
    return dimensions * (images + 3 * dimensions)
