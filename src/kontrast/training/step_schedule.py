"""The scheduled numbers of a step: learning rates, weight decay, the teacher's momentum, what is frozen or stored."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from kontrast.config.recipe import Recipe
from kontrast.optim.schedules import learning_rate, ramp, scaled_learning_rate, teacher_momentum, weight_decay


@dataclass
class Position:
    """How far a run has come: steps taken, steps in all, steps per epoch, and whether it was ended before all steps."""

    step: int
    total: int
    per_epoch: int
    stopped: bool = False

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
        return self.stopped or self.step >= self.total


@dataclass(frozen=True)
class Schedule:
    """The scheduled numbers of one step."""

    lr: float
    part_lr: dict[str, float] = field(default_factory=dict)  # of parts with their own rate, by prefix of their names
    momentum: float = 1.0  # of the teacher
    decay_share: float | None = None  # multiplies the weight decay; None if it is constant
    frozen: bool = False  # the prototypes are not trained in this step
    storing: bool = True  # the bank stores the keys of this step


def schedule_of(recipe: Recipe, position: Position) -> Schedule:
    """Return the scheduled numbers of the next step."""
    t, step, epochs = recipe.training, position.step, position.step / position.per_epoch
    lr, momentum, frozen, decay = learning_rate_of(recipe, position, step), 1.0, False, None
    if teacher := recipe.teacher:
        m, schedule = teacher.momentum, teacher.schedule
        momentum = teacher_momentum(step, total=position.total, momentum=m, schedule=schedule)
    if prototypes := recipe.prototypes:
        frozen = epochs < prototypes.frozen_epochs or step < prototypes.frozen_steps
    if t.final_weight_decay is not None:
        now = weight_decay(step, total=position.total, start=t.weight_decay, final=t.final_weight_decay)
        decay = now / (largest_weight_decay(recipe) or 1.0)
    storing = recipe.bank is None or epochs >= recipe.bank.start
    return Schedule(lr, part_rates(recipe, lr), momentum, decay, frozen, storing)


def largest_weight_decay(recipe: Recipe) -> float:
    """Return the weight decay that the optimizer is built with; a schedule multiplies it by at most 1."""
    return max(recipe.training.weight_decay, recipe.training.final_weight_decay or 0.0)


def peak_learning_rate(recipe: Recipe) -> float:
    t = recipe.training
    return scaled_learning_rate(t.lr, t.batch, t.lr_scaling)


def learning_rate_of(recipe: Recipe, position: Position, step: int) -> float:
    """Return the learning rate of a step, counted from 0."""
    t = recipe.training
    final = scaled_learning_rate(t.final_lr, t.batch, t.lr_scaling)
    rate = partial(learning_rate, schedule=t.schedule, warmup=t.warmup, milestones=t.milestones, factor=t.gamma)
    rate = partial(rate, lr=peak_learning_rate(recipe), final=final, per_epoch=t.lr_per_epoch)
    return rate(step, epochs=position.epochs, steps_per_epoch=position.per_epoch)


def part_rates(recipe: Recipe, lr: float) -> dict[str, float]:
    """Return the learning rates of the parts of the learner that have their own, by the prefix of their names."""
    networks = {"student.encoder.": recipe.encoder, "student.head.": recipe.head, "predictor.": recipe.predictor}
    rates = {}
    for part, settings in networks.items():
        if settings is not None and (settings.lr_factor != 1 or settings.constant_lr):
            rates[part] = settings.lr_factor * (peak_learning_rate(recipe) if settings.constant_lr else lr)
    if recipe.text is not None and recipe.text.lr_factor != 1:
        rates["student.text."] = recipe.text.lr_factor * lr
    if recipe.prototypes is not None and recipe.prototypes.lr_factor != 1:
        rates["prototypes."] = recipe.prototypes.lr_factor * lr
    return rates


def ramp_of(recipe: Recipe, position: Position, end: float) -> float:
    """Return the value of the argument that the recipe's objective ramps, in the epoch of the next step."""
    settings, every = recipe.objective, max(1, -(-position.total // position.per_epoch))
    return ramp(position.epoch, epochs=settings.ramp_epochs or every, end=end, start=settings.ramp_from)
