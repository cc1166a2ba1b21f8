"""The training loop: steps, logging, evaluation and checkpoints, resumable to the same bits.

A step is a pure function of the weights, the recipe and the step's number: the order of images, the draws of the views,
the learning rate and the shuffles all come from counters, so a checkpoint needs no state of a random generator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from kontrast import distributed
from kontrast.config.recipe import Recipe, fingerprint
from kontrast.counters import GOLDEN
from kontrast.data import Batch, ImageSet
from kontrast.errors import CheckpointError, DataError, EnvironmentFault
from kontrast.files import write_json
from kontrast.sharding import load_whole, whole_state
from kontrast.training import checkpoints
from kontrast.training.build import (
    build_feeder,
    build_learner,
    build_views,
    facts_of,
    optimizer_of,
    precision,
    whole_student,
)
from kontrast.training.caption_batches import CaptionBatches, tokenizer_of
from kontrast.training.compiled_blocks import keep_compiled_code
from kontrast.training.device import generator_of, synchronize
from kontrast.training.failures import SKIPS, describe_failure, failure_text, not_finite
from kontrast.training.metrics_log import MetricsLog
from kontrast.training.progress import Progress
from kontrast.training.run_folder import RunFolder
from kontrast.training.signals import Cut, StopSignals
from kontrast.training.splits import sync_bad_images
from kontrast.training.starting_weights import load_start
from kontrast.training.step import EAGER_STEPS, Step
from kontrast.training.step_schedule import Position, learning_rate_of, ramp_of, schedule_of
from kontrast.training.stopping_rule import StoppingRule, are_measures
from kontrast.training.time_budget import AfterTraining, Plan, describe_time
from kontrast.training.timing import Timing
from kontrast.views import keys

Say = Callable[[str], None]
Evaluate = Callable[[nn.Module], dict[str, float]]
SAVE_SECONDS = 30.0
STEADY_SECONDS = 3.0  # of steps, after which the time of the whole run can be told
BYTES_PER_SECOND = 200e6  # at which checkpoints are written, until one was measured
COLLAPSED = 1.5
"""Below this effective rank the representation has practically collapsed to one direction."""


class Loop:
    """The state of a run during training.

    Args:
        recipe: what to train.
        folder: where logs and checkpoints are written.
        train: the training images.
        device: where to train.
        say: receives messages for people.
        on_nan: "stop" or "skip", if a loss or gradient is not finite.
    """

    def __init__(
        self, recipe: Recipe, folder: RunFolder, train: ImageSet, device: torch.device, say: Say, on_nan: str = "stop"
    ):
        self.folder, self.device, self.main = folder, device, distributed.is_main()
        self.fingerprint: str | None = fingerprint(recipe)
        self.say = say
        self.feeder = build_feeder(recipe, train, device)
        if self.feeder.batch != recipe.training.batch:
            self.say(f"batch {recipe.training.batch} -> {self.feeder.batch}: there are only {len(train)} images")
        self.recipe = recipe = replace(recipe, training=replace(recipe.training, batch=self.feeder.batch))
        t = recipe.training
        self.precision = precision(t.precision, device)
        torch.manual_seed(recipe.seed)
        self.channels = train.channels
        self.tokenizer = None if recipe.text is None else tokenizer_of(recipe.text, folder, train.captions)
        self.captions = None
        if self.tokenizer is not None:
            self.captions = CaptionBatches(train, self.tokenizer, recipe.seed, device, say)
        self.learner = build_learner(recipe, device=device, **facts_of(train))
        self.optimizer = optimizer_of(recipe, self.learner)
        per_epoch = self.feeder.steps_per_epoch
        steps = t.epochs * per_epoch
        self.position = Position(0, min(steps, t.max_steps) if t.max_steps else steps, per_epoch)
        self.first = 0  # the step at which this process started
        self.best: dict[str, float] = {}
        self.restored = False  # whether the state is that of a checkpoint
        self.stopping = StoppingRule(recipe, self.position.epochs)
        self.owed = False  # whether a signal interrupted the evaluation of this step
        self.failures: list[dict[str, Any]] = []
        self.log = MetricsLog(folder, t.track, say)
        self.timing = Timing(gpu=device.type == "cuda")
        self.slow_steps = EAGER_STEPS + 1 if device.type == "cuda" else 1  # those that compile and capture
        self.tried, self.steady, self.estimated = False, False, False
        self.saved, self.has_saved = time.monotonic(), False
        views, skipping = build_views(recipe, self.precision), on_nan == "skip"
        automatic = "whole" if device.type == "cuda" else ""
        compiled = {"auto": automatic, "yes": "whole", "no": "", "blocks": "blocks"}[t.compile]
        if compiled:
            keep_compiled_code()
        step = partial(Step, device=device, precision=self.precision, accumulate=t.accumulate, compile=compiled)
        self.step = step(
            self.learner, self.optimizer, views, clip=t.clip, clip_each=t.clip_each, skipping=skipping, say=say
        )

    def start(self) -> None:
        """Load the run's starting weights, which are evaluated before the first step."""
        load_start(self.folder, self.learner)
        self.owed = bool(self.recipe.evaluation.every)

    def restore(self) -> None:
        """Load the newest valid checkpoint, if there is one, and warn if the continuation won't be bit-exact."""
        info = self.folder.info()
        self.fingerprint = info.get("fingerprint")
        newest = checkpoints.newest(self.folder / "checkpoints", self.say, self.fingerprint)
        self.has_saved = "first_checkpoint" in info
        if newest is None and self.has_saved:
            gone = f"the checkpoints of {self.folder.path} are gone, though it saved step {info['first_checkpoint']}"
            raise CheckpointError(f"{gone}: restore checkpoints/, or start a new run in another --out")
        if newest is None:
            self.say(f"no checkpoint yet in {self.folder.path}: starting from step 0")
            return
        tensors, state, manifest = newest
        if not is_state(state):
            raise CheckpointError(f"the checkpoint in {self.folder.path} is damaged: its state.json has wrong entries")
        for key, value in self.facts().items():
            if key not in ("kontrast", "python", "recipe") and manifest.get(key) not in (None, value):
                self.say(f"not bit-exact: {key} was {manifest[key]} and is {value}")
        try:
            load_whole(self.learner, checkpoints.under("learner", tensors))
            self.optimizer.load_state_dict(checkpoints.under("optimizer", tensors))
            self.position.step = self.first = state["step"]
            self.step.names, self.step.count, self.best = state["names"], state["count"], state["best"]
            self.step.sums = tensors["window"].to(self.device)
            self.owed, self.failures = state.get("owed", False), state.get("failures", [])
            self.stopping.measures, self.position.stopped = state.get("measures", []), state.get("stopped", False)
            if self.step.sums.shape != (len(self.step.names),) or not self.step.sums.is_floating_point():
                raise KeyError("window")
            self.restored = True
        except (RuntimeError, KeyError):
            raise CheckpointError(f"the checkpoint in {self.folder.path} does not fit its recipe") from None
        done = self.position.stopped or self.position.step > self.position.total
        note = ": there is nothing left to train" if done else ""
        self.say(f"resuming from step {self.position.step} of {self.position.total}{note}")

    def adopt(self, plan: Plan, fingerprint: str) -> None:
        """Train for as long as a plan says."""
        self.recipe, self.fingerprint = plan.apply(self.recipe), fingerprint
        self.position.total = plan.max_steps or plan.epochs * self.position.per_epoch
        self.stopping = StoppingRule(self.recipe, self.position.epochs)

    def estimate(self, after: AfterTraining) -> None:
        """Estimate how long evaluations, checkpoints and what follows the training will take."""
        size = sum(t.numel() * t.element_size() for t in (*self.learner.parameters(), *self.learner.buffers()))
        self.timing.expected["checkpoint"] = 2 * size / BYTES_PER_SECOND
        self.estimated = True
        if not self.step.sharded:
            with self.timing.measure():
                seconds = after(self.learner.result, self.timing.clock)
                self.timing.after, self.timing.linear, self.timing.expected["evaluation"] = seconds

    def synchronize(self) -> None:
        """Wait for the device."""
        synchronize(self.device)

    def save(self) -> None:
        """Write a checkpoint of this step. The first rank writes it, with the shards of all ranks."""
        with self.timing.measure("checkpoint"):
            self.write_checkpoint()

    def write_checkpoint(self) -> None:
        self.check_numbers()
        tensors = {f"learner.{name}": tensor for name, tensor in whole_state(self.learner).items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state_dict().items()}
        if not self.main:
            return
        self.log.sync()
        tensors["window"] = self.step.sums
        state = {"step": self.position.step, "names": self.step.names, "count": self.step.count, "best": self.best}
        state |= {"owed": self.owed, "failures": self.failures}
        state |= {"measures": self.stopping.measures, "stopped": self.position.stopped}
        self.saved = time.monotonic()
        place = self.folder / "checkpoints"
        checkpoints.save(place, self.position.step, tensors, state, self.facts())
        if not self.has_saved:  # recorded once, so that lost checkpoints are noticed
            self.folder.update_info(first_checkpoint=self.position.step)
            self.has_saved = True
        self.log.commit(self.position.step, self.owed)
        best = int(self.best["step"]) if self.best else None
        checkpoints.prune(place, self.recipe.checkpoints.keep, best, self.position.step)

    def facts(self) -> dict[str, Any]:
        """Return what the bits depend on: the recipe, as it was when the run began, and the machine."""
        machine = {**checkpoints.versions(), "world": distributed.world(), "device": self.device.type}
        return machine | ({"recipe": self.fingerprint} if self.fingerprint else {})

    def run(
        self, evaluate: Evaluate | None, stop: StopSignals, resume_command: str, after: AfterTraining | None = None
    ) -> None:
        """Train to the end, or until a signal arrives.

        Args:
            evaluate: measures the encoder; only the first rank has it.
            stop: the signals.
            resume_command: the command to print if training is stopped.
            after: estimates how long what follows the training takes; only the first rank has it.
        """
        position, batch = self.position, self.recipe.training.batch
        self.learner.train()
        if self.main and (damaged := self.log.open(self.recipe, position.step, self.owed)):
            self.say(f"metrics.jsonl: dropped {damaged} damaged line{'s' if damaged > 1 else ''}")
        if self.owed:
            self.evaluate(evaluate, stop)
            if self.owed:  # interrupted again: a further step would make it too late for this evaluation
                raise stop.error(f"step {position.step} of {position.total}", resume_command)
            self.save()
        left = partial(self.timing.left, self.recipe, position)
        bar_of = partial(Progress, "train", done=position.step * batch, rate=self.timing.rate, left=left)
        with bar_of(position.total * batch, silent=not self.main) as bar:
            while not position.finished:
                for images in self.batches():
                    self.take_step(images)
                    if position.step == self.first + 1:  # the first step, with compilation, is the slowest
                        distributed.wait_at_most(distributed.training_seconds())
                    self.report(bar)
                    self.tell_time(after)
                    improved = self.evaluate(evaluate, stop)
                    stopping = self.must_stop(stop)
                    if stopping or improved or self.save_due():
                        self.save()
                    if stopping and (not position.finished or self.owed):
                        raise stop.error(f"step {position.step} of {position.total}", resume_command)
                    if position.finished or position.step % position.per_epoch == 0:
                        break
        self.save()
        sync_bad_images(self.feeder.data)
        self.log.close()

    def finish_trackers(self) -> None:
        """Give the trackers what the run ended with. This may wait for them, so no rank may wait for this one."""
        results = {f"best_{name}": float(value) for name, value in self.best.items()}
        self.log.trackers.finish(self.position.step, results)

    def batches(self) -> Iterator[Batch]:
        """Yield the remaining batches of the epoch. If reading images fails, save a checkpoint first."""
        try:
            sync_bad_images(self.feeder.data)
            yield from self.feeder.batches(self.position.epoch, start=self.position.step % self.position.per_epoch)
        except (EnvironmentFault, DataError):
            if self.position.step and not self.step.sharded:
                self.save()
                self.say(f"saved step {self.position.step} of {self.position.total}")
            raise

    def save_due(self) -> bool:
        """Return whether it is time for a checkpoint."""
        every, position = self.recipe.checkpoints.every, self.position
        if not every or position.finished or position.step % max(1, round(every * position.per_epoch)):
            return False
        # On a GPU an epoch may take a second, and a checkpoint as long. If sharded, all ranks must save together.
        return self.device.type == "cpu" or self.step.sharded or time.monotonic() - self.saved > SAVE_SECONDS

    def must_stop(self, stop: StopSignals) -> bool:
        """Return whether any rank received a signal. On several GPUs, where this waits, it is checked less often."""
        often = distributed.world() == 1 or self.device.type == "cpu"
        if not often and self.position.step % self.recipe.training.log_every and not self.position.finished:
            return False
        return distributed.any_rank(stop.signal is not None)

    def take_step(self, batch: Any) -> None:
        """Train on one batch."""
        recipe, position = self.recipe, self.position
        if recipe.objective.ramp:
            value = ramp_of(recipe, position, end=self.learner.ramp_end)
            setattr(self.learner.ramped, recipe.objective.ramp, value)
        self.seed_dropout()
        view_keys = keys(recipe.seed, position.epoch, batch.indices)
        of_images = {"sizes": batch.sizes, "labels": batch.labels if recipe.training.labels else None}
        if self.learner.objective.needs_indices:
            of_images["indices"] = batch.indices
        if self.captions is not None:
            drawn = self.captions(position.epoch, batch.indices)
            of_images["tokens"] = drawn.tokens
            of_images["labels"] = drawn.ids if self.learner.objective.takes_labels else None
        self.step(batch.images, view_keys, schedule_of(recipe, position), **of_images)
        position.step += 1

    def seed_dropout(self) -> None:
        """Let encoders with dropout draw numbers that depend only on the seed, the step and the rank.

        This holds for a captured graph too: it reads the seed of the device's generator whenever it is replayed.
        """
        draw = self.position.step * distributed.world() + distributed.rank()
        generator_of(self.device).manual_seed((self.recipe.seed * GOLDEN + draw) % 2**63)

    def report(self, bar: Progress) -> None:
        """Show progress, and log every `log_every` steps, which waits for the device."""
        t, position = self.recipe.training, self.position
        waited = self.device.type == "cpu" or self.step.skipping
        if waited:
            self.check_numbers()
        if (position.step % t.log_every and not position.finished) or not self.step.count:
            self.advance(bar, waited)
            return
        self.check_numbers()
        terms = self.step.flush()
        if line := self.feeder.bottleneck():
            self.say(line)
        loss = sum(terms.values())
        self.advance(bar, True, epoch=position.epoch, loss=loss, **terms)
        if self.main:
            lr, epoch = learning_rate_of(self.recipe, position, position.step - 1), position.epochs_done
            record = {"step": position.step, "epoch": epoch, "loss": loss, **terms, "lr": lr}
            self.log.write(**record | self.learner.objective.learned_numbers() | record)
            self.log.speed.write(step=position.step, epoch=epoch, images_per_second=bar.rate, time=time.time())

    def advance(self, bar: Progress, measured: bool, **facts: Any) -> None:
        """Show the step. Its time is known only if the device was waited for; steps that compile don't count."""
        if measured and not self.steady and (self.tried or self.position.step - self.first >= self.slow_steps):
            self.timing.rate.restart(bar.done + self.recipe.training.batch)
            self.steady = True
        bar.advance(self.recipe.training.batch, measured, **facts)

    def tell_time(self, after: AfterTraining | None) -> None:
        """Say once how long the training will take and why, when its speed is known, unless it is short."""
        if after is None or self.estimated or not self.steady or self.timing.rate.seconds < STEADY_SECONDS:
            return
        self.estimate(after)
        if not self.position.finished:
            self.say(describe_time(self.recipe, self.timing, self.position))

    def evaluate(self, evaluate: Evaluate | None, stop: StopSignals) -> bool:
        """Every few epochs and at the end, measure and log; return whether this is the best so far.

        With training.stop="auto" it may end the training.

        All ranks must call this, since the first one, which measures, may need their shards.
        """
        position, every = self.position, self.recipe.evaluation.every
        due = every and position.step % (every * position.per_epoch) == 0
        if not (due or position.finished):
            return False
        with self.timing.measure("evaluation"):
            return self.evaluate_now(evaluate, stop)

    def evaluate_now(self, evaluate: Evaluate | None, stop: StopSignals) -> bool:
        """Measure and log; return whether this is the best by kNN so far."""
        self.check_numbers()
        student = whole_student(self.learner, self.recipe, self.channels, self.device)
        distributed.wait_at_most(distributed.ALONE_SECONDS)
        improved = distributed.any_rank(evaluate is not None and self.measure(evaluate, student, stop))
        self.owed = distributed.any_rank(self.owed and self.main)  # other ranks only know what the checkpoint said
        distributed.wait_at_most(distributed.training_seconds())
        if self.stopping.automatic and not self.position.finished:  # the first rank alone has measured
            self.position.stopped = distributed.any_rank(self.main and self.stopping.flat)
        return improved

    def measure(self, evaluate: Evaluate, student: nn.Module, stop: StopSignals) -> bool:
        """Evaluate and log; return whether this is the best so far, by kNN or, with training.stop="auto", by LiDAR.

        If a signal interrupts the evaluation, the resumed run starts with it.
        """
        position = self.position
        try:
            with stop.cutting():
                record = evaluate(student)
        except Cut:
            self.owed = True
            return False
        self.owed = False
        self.log.write(step=position.step, epoch=position.epochs_done, **record)
        if record["effective_rank"] < COLLAPSED:
            rank = f"effective rank {record['effective_rank']:.1f} at epoch {position.epochs_done:g}"
            self.say(f"collapsed: {rank} (a warm-up, training.warmup, or a smaller training.lr may prevent it)")
        if warning := self.stopping.add(position.epochs_done, record):
            self.say(warning)
        by = self.stopping.chosen_by(record)
        if by not in record or record[by] <= self.best.get(by, -1.0):
            return False
        self.best = {"step": position.step, by: record[by]}
        return True

    def check_numbers(self) -> None:
        """If the loss or a gradient became NaN or infinite, skip the step or stop. The weights are still good."""
        good = self.step.check()
        if good is None:
            return
        bad = self.position.step - 1 if self.step.skipping else self.first + good
        terms = {} if self.step.skipping else self.step.flush()
        self.failures.append(
            describe_failure(self.feeder, bad, learning_rate_of(self.recipe, self.position, bad), terms)
        )
        if self.main:
            write_json(self.folder / "not-finite.json", {"version": 1, "steps": self.failures})
        if not self.step.skipping or len(self.failures) > SKIPS:
            raise not_finite(self.failures[-1], self.folder)
        self.step.forget()
        self.say(f"skipped a step, {len(self.failures)} of {SKIPS} allowed: {failure_text(self.failures[-1])}")


def is_state(state: Any) -> bool:
    """Return whether the content of state.json is what `save` writes. A checkpoint may come from others."""
    kinds = {"step": int, "names": list, "count": int, "best": dict, "owed": bool, "failures": list, "stopped": bool}
    known = (
        {"owed": False, "failures": [], "measures": [], "stopped": False, **state} if isinstance(state, dict) else {}
    )
    if not all(type(known.get(key)) is kind for key, kind in kinds.items()):
        return False
    best = known["best"]
    return (
        0 <= known["step"] < 2**63
        and 0 <= known["count"] < 2**63
        and all(isinstance(name, str) for name in known["names"])
        and all(isinstance(failure, dict) for failure in known["failures"])
        and are_measures(known["measures"])
        and (not best or (type(best.get("step")) is int and [*map(type, best.values())].count(float) == len(best) - 1))
    )
