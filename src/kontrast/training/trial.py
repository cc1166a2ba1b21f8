"""Try steps before a run begins, to measure its speed after compilation, and undo them to the bit."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Generator
from dataclasses import asdict, replace

import torch

from kontrast import distributed
from kontrast.data import Batch
from kontrast.errors import UsageError
from kontrast.sharding import local
from kontrast.training.loop import Loop
from kontrast.training.time_budget import (
    MARGIN,
    PROBES,
    AfterTraining,
    Budget,
    Plan,
    epochs_text,
    minutes_text,
    plan_epochs,
    seconds_of,
)

LEAST_STEPS, MOST_STEPS = 3, 200
SHARE = 0.02  # of the budget that is spent on trial steps
SHORTEST, LONGEST = 1.0, 20.0  # seconds of trial steps


def plan_run(loop: Loop, budget: Budget, after: AfterTraining | None, fixed: bool) -> Plan:
    """Measure the speed and return the plan of the first rank, which has the clock of all.

    Args:
        loop: the run before its first step; it is the same afterwards.
        budget: the minutes.
        after: estimates what follows the training; only the first rank has it.
        fixed: whether the user says how often to evaluate.
    """
    timing = loop.timing
    try_steps(loop, min(LONGEST, max(SHORTEST, SHARE * 60 * budget.minutes)))
    text = problem = ""
    if after is not None:
        loop.estimate(after)
        seconds, recipe, later = (1 - MARGIN) * budget.left(timing.clock()), loop.recipe, ""
        if timing.linear and timing.after > PROBES * seconds:
            timing.after -= timing.linear
            recipe = replace(recipe, evaluation=replace(recipe.evaluation, linear=False))
            later = f" by kNN (a linear probe takes {minutes_text(timing.linear)}: `kontrast probe RUN linear`)"
        plan = plan_epochs(recipe, timing, loop.position.per_epoch, seconds, fixed)
        spent = timing.clock() - budget.began
        gone = f"{minutes_text(spent)} gone, {minutes_text(timing.after)} for the probes{later}"
        rate, batch, per_epoch = timing.rate.expected, loop.recipe.training.batch, loop.position.per_epoch
        length = plan.max_steps / per_epoch or plan.epochs
        images = f"{per_epoch * batch:,} images at {rate:,.0f} images/s"
        one = seconds_of(plan.apply(recipe), timing, per_epoch, per_epoch) / (1 - MARGIN)
        least = f"an epoch needs about --minutes {math.ceil((spent + one) / 6) / 10:g}"
        if seconds <= 0:
            problem = f"--minutes {budget.minutes:g} was over before training began: {least}"
        else:
            loop.say(f"plan: {budget.minutes:g} minutes, {gone} -> {epochs_text(length)} of {images}")
            if length < 1:
                loop.say(f"plan: the budget is too short, the encoder will hardly be trained: {least}")
        text = json.dumps([problem, asdict(plan)])
    problem, tree = json.loads(distributed.broadcast(text))
    if problem:
        raise UsageError(problem)
    return Plan(**{**tree, "milestones": tuple(tree["milestones"])})


def try_steps(loop: Loop, seconds: float) -> None:
    """Take steps for some seconds after those that compile, measure their rate, and undo them all."""
    learner, optimizer, step, rate = loop.learner, loop.optimizer, loop.step, loop.timing.rate
    before = [(t, t.clone()) for t in map(local, itertools.chain(learner.parameters(), learner.buffers()))]
    slots = {(slot, n): t.clone() for slot, tensors in optimizer.state.items() for n, t in tensors.items()}
    mode, done, enough = learner.training, 0, False
    learner.train()
    batches = endless(loop)
    while not enough:
        loop.take_step(next(batches))
        done += 1
        if loop.position.finished:
            loop.position.step = 0
        if done == loop.slow_steps:
            loop.synchronize()
            rate.restart(0)
        elif done > loop.slow_steps and (done - loop.slow_steps) % LEAST_STEPS == 0:
            loop.synchronize()
            rate.add((done - loop.slow_steps) * loop.recipe.training.batch)
            own = rate.seconds >= seconds or done >= MOST_STEPS * LEAST_STEPS
            enough = distributed.any_rank(own and distributed.is_main())
    batches.close()
    with torch.no_grad():
        for tensor, value in before:
            tensor.copy_(value)
        for (slot, name), value in slots.items():
            local(optimizer.state[slot][name]).copy_(value)
    learner.train(mode)
    step.undo()
    loop.position.step, loop.tried = 0, True


def endless(loop: Loop) -> Generator[Batch, None, None]:
    for epoch in itertools.count():
        yield from loop.feeder.batches(epoch)
