"""Pretraining from a recipe to a run folder, resumable to the same bits.

What a step does is a pure function of the recipe and the step's number: the order of images, the draws of the views,
the learning rate and the shuffles all come from counters, so a checkpoint needs no generator's state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from kontrast import distributed
from kontrast.config.recipe import Recipe, fingerprint
from kontrast.counters import GOLDEN
from kontrast.data import Batch, ImageSet
from kontrast.errors import CheckpointError, DataError, EnvironmentFault
from kontrast.optim.schedules import joint_weight, learning_rate, scaled_learning_rate, teacher_momentum
from kontrast.sharding import load_whole, whole_state
from kontrast.training import checkpoints
from kontrast.training.build import build_feeder, build_learner, build_views, optimizer_of, precision, whole_student
from kontrast.training.failures import SKIPS, failure, stopped, words, write_down
from kontrast.training.metrics_log import MetricsLog
from kontrast.training.progress import Progress
from kontrast.training.run_folder import RunFolder
from kontrast.training.signals import Cut, StopSignals
from kontrast.training.splits import sync_bad_images
from kontrast.training.step import Step
from kontrast.views import keys

Say = Callable[[str], None]
Evaluate = Callable[[nn.Module], dict[str, float]]
SAVE_SECONDS = 30.0
COLLAPSED = 1.5
"""Below this effective rank the representation is all but one direction."""
REMEDY = "a warm-up (training.warmup={}) or a smaller training.lr may prevent the collapse"


class Loop:
    """Everything one run holds while it trains."""

    def __init__(
        self, recipe: Recipe, folder: RunFolder, train: ImageSet, device: torch.device, say: Say, on_nan: str = "stop"
    ):
        self.folder, self.device, self.main = folder, device, distributed.is_main()
        self.fingerprint: str | None = fingerprint(recipe)
        self.say = say if self.main else lambda _: None
        self.feeder = build_feeder(recipe, train, device)
        if self.feeder.batch != recipe.training.batch:
            self.say(f"batch {recipe.training.batch} -> {self.feeder.batch}: there are {len(train)} images")
        self.recipe = recipe = replace(recipe, training=replace(recipe.training, batch=self.feeder.batch))
        t = recipe.training
        self.precision = precision(t.precision, device)
        torch.manual_seed(recipe.seed)
        self.channels = train.channels
        self.learner = build_learner(recipe, train.channels, device)
        self.optimizer = optimizer_of(recipe, self.learner)
        self.peak = scaled_learning_rate(t.lr, t.batch, t.lr_scaling)
        per_epoch = self.feeder.steps_per_epoch
        steps = t.epochs * per_epoch
        self.at = Position(0, min(steps, t.max_steps) if t.max_steps else steps, per_epoch)
        self.first = 0  # the step at which this process began
        self.best: dict[str, float] = {}
        self.owed = False  # an evaluation of this very step was cut by a signal
        self.remedy = REMEDY.format(min(10, max(1, t.epochs // 2)))  # told once
        self.failures: list[dict[str, Any]] = []
        self.records = MetricsLog(folder, t.tensorboard)
        self.saved, self.has_saved = time.monotonic(), False
        self.step = Step(
            self.learner,
            self.optimizer,
            build_views(recipe, self.precision),
            device=device,
            precision=self.precision,
            compile=t.compile == "yes" or (t.compile == "auto" and device.type == "cuda"),
            accumulate=t.accumulate,
            skipping=on_nan == "skip",
            say=self.say,
        )

    def restore(self) -> None:
        """Go to the newest valid checkpoint, if there is one, and say what makes the rest differ from one run."""
        info = self.folder.info()
        self.fingerprint = info.get("fingerprint")
        found = checkpoints.newest(self.folder / "checkpoints", self.say if self.main else None, self.fingerprint)
        self.has_saved = "first_checkpoint" in info
        if found is None and self.has_saved:
            raise CheckpointError(
                f"the checkpoints of {self.folder.path} are gone, though it saved step {info['first_checkpoint']}: "
                "put checkpoints/ back, or start a new run in another --out"
            )
        if found is None:
            self.say(f"no checkpoint yet in {self.folder.path}: starting from step 0")
            return
        tensors, state, manifest = found
        for key, value in self.facts().items():
            if key not in ("kontrast", "python", "recipe") and manifest.get(key) not in (None, value):
                self.say(f"not bit-exact: {key} was {manifest[key]} and is {value}")
        try:
            load_whole(self.learner, checkpoints.under("learner", tensors))
            self.optimizer.load_state_dict(checkpoints.under("optimizer", tensors))
            self.at.step = self.first = state["step"]
            self.step.names, self.step.count, self.best = state["names"], state["count"], state["best"]
            self.step.sums = tensors["window"].to(self.device)
            self.owed, self.failures = state.get("owed", False), state.get("failures", [])
        except (RuntimeError, KeyError):
            raise CheckpointError(f"the checkpoint in {self.folder.path} does not fit its recipe") from None
        past = ": there is nothing left to train" if self.at.step > self.at.total else ""
        self.say(f"going on from step {self.at.step} of {self.at.total}{past}")

    def save(self) -> None:
        """Write a checkpoint of this very step; only the first rank does, with the shards of all."""
        self.check_numbers()
        tensors = checkpoints.flatten("learner", whole_state(self.learner))
        tensors |= checkpoints.flatten("optimizer", self.optimizer.state_dict())
        if not self.main:
            return
        self.records.metrics.sync()
        tensors["window"] = self.step.sums
        state = {"step": self.at.step, "names": self.step.names, "count": self.step.count, "best": self.best}
        state |= {"owed": self.owed, "failures": self.failures}
        self.saved = time.monotonic()
        place = self.folder / "checkpoints"
        checkpoints.save(place, self.at.step, tensors, state, self.facts())
        if not self.has_saved:  # noted once, so that lost ones are missed
            self.folder.update_info(first_checkpoint=self.at.step)
            self.has_saved = True
        best = int(self.best["step"]) if self.best else None
        checkpoints.prune(place, self.recipe.checkpoints.keep, best, self.at.step)

    def facts(self) -> dict[str, Any]:
        """What the bits depend on: the recipe, as it was when the run began, and the machine."""
        machine = {**checkpoints.versions(), "world": distributed.world(), "device": self.device.type}
        return machine | ({"recipe": self.fingerprint} if self.fingerprint else {})

    def run(self, evaluate: Evaluate | None, stop: StopSignals, resume_command: str) -> None:
        """Train to the end, or until asked to stop. `evaluate` measures the encoder; only the first rank has it."""
        at, batch = self.at, self.recipe.training.batch
        self.learner.train()
        if self.main:
            damaged = self.records.open(at.step, self.owed)
            if damaged:
                self.say(f"metrics.jsonl: left out {damaged} damaged line{'s' if damaged > 1 else ''}")
        if self.owed:
            self.evaluate(evaluate, stop)
        with Progress("train", at.total * batch, done=at.step * batch, silent=not self.main) as bar:
            while not at.finished:
                for images in self.batches():
                    self.take(images)
                    if at.step == self.first + 1:  # what is slow the first time is done
                        distributed.wait_at_most(distributed.training_seconds())
                    self.report(bar)
                    improved = self.evaluate(evaluate, stop)
                    asked = self.asked(stop)
                    if asked or improved or self.save_due():
                        self.save()
                    if asked and (not at.finished or self.owed):
                        raise stop.error(f"step {at.step} of {at.total}", resume_command)
                    if at.finished or at.step % at.per_epoch == 0:
                        break
        self.save()
        sync_bad_images(self.feeder.data)
        self.records.close()

    def batches(self) -> Iterator[Batch]:
        """The rest of the epoch; where the images fail, what was learned till then is saved first."""
        try:
            sync_bad_images(self.feeder.data)
            yield from self.feeder.batches(self.at.epoch, start=self.at.step % self.at.per_epoch)
        except (EnvironmentFault, DataError):
            if self.at.step and not self.step.sharded:
                self.save()
                self.say(f"saved step {self.at.step} of {self.at.total}")
            raise

    def save_due(self) -> bool:
        every, at = self.recipe.checkpoints.every, self.at
        if not every or at.finished or at.step % max(1, round(every * at.per_epoch)):
            return False
        # On a GPU an epoch may take a second and a checkpoint as long. With shards all ranks save, or none.
        return self.device.type == "cpu" or self.step.sharded or time.monotonic() - self.saved > SAVE_SECONDS

    def asked(self, stop: StopSignals) -> bool:
        """Whether any rank was asked to stop; ranks on GPUs, where asking waits for the device, ask now and then."""
        often = distributed.world() == 1 or self.device.type == "cpu"
        if not often and self.at.step % self.recipe.training.log_every and not self.at.finished:
            return False
        return distributed.any_rank(stop.asked is not None)

    def take(self, batch: Any) -> None:
        recipe, at = self.recipe, self.at
        momentum = 1.0
        if recipe.teacher:
            t = recipe.teacher
            momentum = teacher_momentum(at.step, total=at.total, momentum=t.momentum, schedule=t.schedule)
        if recipe.objective.ramp:
            epochs = max(1, -(-at.total // at.per_epoch))
            value = joint_weight(at.epoch, epochs=epochs, weight=self.learner.ramp_end, ramp=True)
            setattr(self.learner.objective, recipe.objective.ramp, value)
        if self.device.type == "cpu":  # for encoders with dropout; torch.manual_seed itself takes 200 times as long
            draw = at.step * distributed.world() + distributed.rank()
            torch.default_generator.manual_seed((recipe.seed * GOLDEN + draw) % 2**63)
        view_keys = keys(recipe.seed, at.epoch, batch.indices)
        self.step(batch.images, view_keys, batch.sizes, self.learning_rate(at.step), momentum)
        at.step += 1

    def learning_rate(self, step: int) -> float:
        t = self.recipe.training
        return learning_rate(
            step,
            lr=self.peak,
            epochs=self.at.epochs,
            steps_per_epoch=self.at.per_epoch,
            schedule=t.schedule,
            warmup=t.warmup,
            milestones=t.milestones,
            factor=t.gamma,
            per_epoch=t.lr_per_epoch,
        )

    def report(self, bar: Progress) -> None:
        """Show and log; the device is waited for once in `log_every` steps, on the CPU's own step every time."""
        t, at = self.recipe.training, self.at
        if self.device.type == "cpu" or self.step.skipping:
            self.check_numbers()
        if (at.step % t.log_every and not at.finished) or not self.step.count:
            bar.advance(t.batch)
            return
        self.check_numbers()
        terms = self.step.flush()
        loss = sum(terms.values())
        bar.advance(t.batch, epoch=at.epoch, loss=loss, **terms)
        if self.main:
            lr, epoch = self.learning_rate(at.step - 1), at.epochs_done
            self.records.write(step=at.step, epoch=epoch, loss=loss, **terms, lr=lr)
            self.records.speed.write(step=at.step, epoch=epoch, images_per_second=bar.rate, time=time.time())

    def evaluate(self, evaluate: Evaluate | None, stop: StopSignals) -> bool:
        """Every few epochs and at the end, measure, log and warn; whether this is the best so far by kNN. All ranks
        come here, for the first, which measures, may need their shards."""
        at, every = self.at, self.recipe.evaluation.every
        due = every and at.step % (every * at.per_epoch) == 0
        if not (due or at.finished):
            return False
        self.check_numbers()
        student = whole_student(self.learner, self.recipe, self.channels, self.device)
        distributed.wait_at_most(distributed.ALONE_SECONDS)
        improved = distributed.any_rank(evaluate is not None and self.measure(evaluate, student, stop))
        self.owed = distributed.any_rank(self.owed)
        distributed.wait_at_most(distributed.training_seconds())
        return improved

    def measure(self, evaluate: Evaluate, student: nn.Module, stop: StopSignals) -> bool:
        """A signal cuts it: it is then the first thing that the resumed run does."""
        at = self.at
        try:
            with stop.cutting():
                record = evaluate(student)
        except Cut:
            self.owed = True
            return False
        self.owed = False
        self.records.write(step=at.step, epoch=at.epochs_done, **record)
        if record["effective_rank"] < COLLAPSED:
            self.say(f"collapsed: effective rank {record['effective_rank']:.1f} at epoch {at.epochs_done:g}")
            if self.remedy:
                self.say(self.remedy)
            self.remedy = ""
        if "knn" not in record or record["knn"] <= self.best.get("knn", -1.0):
            return False
        self.best = {"step": at.step, "knn": record["knn"]}
        return True

    def check_numbers(self) -> None:
        """Where the loss or a gradient became NaN or infinite, skip the step or stop; the weights are good."""
        good = self.step.check()
        if good is None:
            return
        bad = self.at.step - 1 if self.step.skipping else self.first + good
        terms = {} if self.step.skipping else self.step.flush()
        self.failures.append(failure(self.feeder, bad, self.learning_rate(bad), terms))
        if self.main:
            write_down(self.folder, self.failures)
        if not self.step.skipping or len(self.failures) > SKIPS:
            raise stopped(self.failures[-1], self.folder)
        self.step.forget()
        self.say(f"skipped a step, {len(self.failures)} of {SKIPS} allowed: {words(self.failures[-1])}")


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
