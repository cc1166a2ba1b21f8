"""The rate and the time left, on a simulated clock; the epochs that a number of minutes allows."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kontrast.config.recipe import read_recipe
from kontrast.errors import UsageError
from kontrast.training.progress import time_left
from kontrast.training.step_schedule import Position
from kontrast.training.time_budget import Budget, minutes_text, plan_epochs
from kontrast.training.timing import Rate, Timing, rest_of


class Clock:
    """A clock that only work moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def recipe(every=5, **training):
    return read_recipe({"training": {"batch": 10, **training}, "evaluation": {"every": every}})


def simulate(
    of, epochs, per_epoch, *, step, compilation=0.0, evaluation=0.0, save=0.0, after=0.0, noise=0.0, gpu=False
):
    """Go through a run and return its real time left and the estimated one at 25, 50 and 75% of its steps."""
    clock, draw = Clock(), random.Random(0)
    timing, position = Timing(clock, gpu), Position(0, epochs * per_epoch, per_epoch)
    timing.after, timing.expected["evaluation"] = after, evaluation * 1.2
    estimates, last_save = {}, clock.now
    timing.rate.restart(0)
    while not position.finished:
        clock.now += step * (1 + noise * draw.uniform(-1, 1)) + (compilation if position.step == 0 else 0)
        position.step += 1
        if position.step == 1:
            timing.rate.restart(of.training.batch)
        timing.rate.add(position.step * of.training.batch)
        every = of.evaluation.every * per_epoch
        if position.finished or (every and position.step % every == 0):
            with timing.measure("evaluation"):
                clock.now += evaluation
        if position.step % per_epoch == 0 and (not gpu or clock.now - last_save > 30 or position.finished):
            with timing.measure("checkpoint"):
                clock.now += save
            last_save = clock.now
        if position.step * 4 % position.total == 0:
            estimates[position.step * 4 // position.total] = (clock.now, timing.left(of, position))
    end = clock.now + after
    return [(end - now, left) for quarter, (now, left) in sorted(estimates.items()) if quarter < 4], timing


@pytest.mark.parametrize(
    "run",
    [
        {"epochs": 40, "per_epoch": 10, "step": 0.1},
        {"epochs": 40, "per_epoch": 10, "step": 0.01, "compilation": 60.0},
        {"epochs": 20, "per_epoch": 24, "step": 0.5, "evaluation": 30.0, "save": 2.0, "after": 100.0},
        {"epochs": 200, "per_epoch": 4, "step": 0.02, "evaluation": 3.0, "save": 1.0, "after": 5.0, "gpu": True},
        {
            "epochs": 8,
            "per_epoch": 100,
            "step": 0.3,
            "evaluation": 20.0,
            "after": 60.0,
            "noise": 0.9,
            "compilation": 20.0,
        },
        {"epochs": 4, "per_epoch": 8, "step": 3.0, "evaluation": 20.0, "after": 10.0},
    ],
)
def test_time_left_is_within_15_percent(run):
    """Compilation, evaluations, checkpoints and probes don't spoil the estimate at 25, 50 and 75% of a run."""
    pairs, _ = simulate(recipe(), **run)
    assert len(pairs) == 3
    for real, left in pairs:
        assert left == pytest.approx(real, rel=0.15)


def test_rate_is_that_of_the_last_seconds():
    """After a change of speed the current rate follows in ten seconds of work."""
    clock = Clock()
    rate = Rate(clock)
    rate.add(0)
    for done in range(1, 1001):
        clock.now += 0.1
        rate.add(done)
    assert rate.current == pytest.approx(10, rel=0.05)
    for done in range(1001, 1501):
        clock.now += 0.02
        rate.add(done)
    assert rate.current == pytest.approx(50, rel=0.25) and rate.expected < 20
    assert len(rate.samples) < 400


def test_pauses_do_not_count():
    """An evaluation, and a checkpoint inside of it, do not lower the rate; the outer one is counted once."""
    clock = Clock()
    timing = Timing(clock)
    for done in range(0, 100, 10):
        timing.rate.add(done)
        clock.now += 1
        with timing.measure("evaluation"):
            clock.now += 2
            with timing.measure("checkpoint"):
                clock.now += 3
    assert timing.rate.current == pytest.approx(10)
    assert (timing.mean("evaluation"), timing.mean("checkpoint")) == (5, 3)


@pytest.mark.parametrize(
    ("step", "total", "every", "evaluations", "saves"),
    [
        (0, 100, 5, 2, 10),
        (50, 100, 5, 1, 5),
        (49, 100, 5, 2, 6),
        (0, 95, 0, 1, 10),
        (99, 100, 5, 1, 1),
        (100, 100, 5, 0, 0),
    ],
)
def test_rest_counts_what_the_loop_does(step, total, every, evaluations, saves):
    """Ten steps per epoch: evaluations every five epochs and at the end, a checkpoint per epoch."""
    rest = rest_of(recipe(every), Position(step, total, 10))
    assert (rest.evaluations, rest.saves) == (evaluations, saves)


def measured(step, evaluation=0.0, after=0.0):
    clock = Clock()
    timing = Timing(clock)
    timing.rate.add(0)
    clock.now += 100 * step
    timing.rate.add(1000)
    timing.expected["evaluation"], timing.after = evaluation, after
    return timing


@pytest.mark.parametrize("seconds", [12.05, 60, 61.7, 600, 7200])
@pytest.mark.parametrize("fixed", [True, False])
def test_plan_fills_the_budget(seconds, fixed):
    """The planned steps fit into the seconds, and another would not, or another epoch if there are many; few
    evaluations unless the user wants more."""
    timing, of = measured(0.1, evaluation=2.0, after=5.0), recipe(every=1)
    plan = plan_epochs(of, timing, 10, seconds, fixed)
    chosen = plan.apply(of)

    def needed(steps):
        return steps * 0.1 + timing.beside_steps(chosen, Position(0, steps, 10))

    steps = plan.max_steps or 10 * plan.epochs
    assert needed(steps) <= seconds < needed(steps + (10 if plan.epochs > 20 else 1))
    assert plan.every == (1 if fixed else 40) and plan.epochs == -(-steps // 10)
    assert (plan.max_steps == 0) == (steps % 10 == 0) and (steps < 200 or plan.max_steps == 0)


def test_plan_of_few_epochs_ends_within_one():
    """An epoch that does not fit is trained in part, at least for a step, and the schedule ends where it does."""
    of = recipe(every=0, epochs=10, warmup=0.0, schedule="steps", milestones=[5])
    plan = plan_epochs(of, measured(1.0), 100, 250.0, False)
    assert (plan.epochs, plan.max_steps, plan.milestones) == (3, 250, (1.25,))
    assert plan_epochs(of, measured(1.0), 100, 200.0, False).max_steps == 0
    of = recipe(every=0, warmup=1.0)
    plan = plan_epochs(of, measured(1.0), 100, 30.0, False)
    assert (plan.epochs, plan.max_steps, plan.warmup) == (1, 30, pytest.approx(0.06))
    assert plan_epochs(of, measured(1.0, after=50.0), 100, 30.0, False).max_steps == 1


def test_schedule_follows_the_plan():
    """Milestones keep their shares, and a warm-up never fills the run."""
    of = recipe(every=0, epochs=100, warmup=10.0, schedule="steps", milestones=[50, 80])
    plan = plan_epochs(of, measured(0.1), 10, 20.5, False)
    assert (plan.epochs, plan.milestones, plan.warmup) == (20, (10.0, 16.0), 4.0)
    assert replace(plan.apply(of).training, epochs=100, warmup=10.0, milestones=(50.0, 80.0)) == of.training


def test_minutes_that_are_no_budget():
    with pytest.raises(UsageError, match="above 0"):
        Budget(0, 0.0)
    with pytest.raises(UsageError, match=r"training\.epochs both say"):
        Budget(1, 0.0).check(["training.epochs=3"])


@pytest.mark.parametrize(
    ("seconds", "left", "text"),
    [(45, "45 s", "45 s"), (125, "2:05 min", "2.1 minutes"), (7260, "2:01 h", "121 minutes"), (-1, "0 s", "-1 s")],
)
def test_times_in_words(seconds, left, text):
    assert (time_left(seconds), minutes_text(seconds)) == (left, text)
