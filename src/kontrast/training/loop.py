"""Pretraining from a recipe to a run folder, resumable to the same bits.

What a step does is a pure function of the recipe and the step's number: the order of images, the draws of the views,
the learning rate and the shuffles all come from counters, so a checkpoint needs no generator's state.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kontrast import distributed
from kontrast.data import Feeder, ImageSet
from kontrast.networks import smallest_batch, synchronise_batch_norm
from kontrast.registry import CheckpointError, NumbersError, UsageError
from kontrast.settings import Recipe
from kontrast.training import checkpoints
from kontrast.training.folder import Lines, RunFolder, disk_faults
from kontrast.training.learner import Learner
from kontrast.training.optimizers import build_optimizer
from kontrast.training.progress import Progress
from kontrast.training.schedules import learning_rate, scaled_learning_rate, teacher_momentum
from kontrast.training.step import Step
from kontrast.training.stopping import StopWatch
from kontrast.views import Views, keys

Say = Callable[[str], None]


@dataclass
class Position:
    """Where a run stands."""

    step: int
    total: int
    per_epoch: int

    @property
    def epoch(self) -> int:
        return self.step // self.per_epoch


class Loop:
    """Everything one run holds while it trains."""

    def __init__(self, recipe: Recipe, folder: RunFolder, train: ImageSet, device: torch.device, say: Say):
        self.recipe, self.folder, self.device, self.say = recipe, folder, device, say
        t = recipe.training
        self.main = distributed.is_main()
        self.feeder = Feeder(
            train,
            batch=t.batch,
            seed=recipe.seed,
            device=device,
            rank=distributed.rank(),
            world=distributed.world(),
            allow_small=recipe.data.allow_small,
            resident=recipe.data.resident,
        )
        self.precision = precision(t.precision, device)
        self.views = build_views(recipe, self.precision)
        torch.manual_seed(recipe.seed)
        self.learner = build_learner(recipe, train.channels, device)
        torch.backends.cudnn.benchmark = True
        self.optimizer = build_optimizer(
            self.learner,
            t.optimizer,
            t.lr,
            momentum=t.momentum if t.optimizer in ("sgd", "lars") else None,
            weight_decay=t.weight_decay,
            **({} if t.decay_all and t.optimizer != "lars" else {"exclude_1d": True}),
        )
        self.lr = scaled_learning_rate(t.lr, t.batch, t.lr_scaling)
        per_epoch = self.feeder.steps_per_epoch
        self.at = Position(0, t.max_steps or t.epochs * per_epoch, per_epoch)
        self.metrics, self.speed = Lines(folder / "metrics.jsonl"), Lines(folder / "speed.jsonl")
        self.step = Step(
            self.learner,
            self.optimizer,
            self.views,
            device=device,
            precision=self.precision,
            compile=t.compile == "yes" or (t.compile == "auto" and device.type == "cuda"),
            accumulate=t.accumulate,
            say=self.say if self.main else lambda _: None,
        )

    def restore(self, facts: dict[str, Any]) -> None:
        """Go to the newest valid checkpoint, if there is one."""
        found = checkpoints.newest(self.folder / "checkpoints", self.say if self.main else None)
        if found is None:
            self.say(f"no checkpoint yet in {self.folder.path}: starting from step 0")
            return
        tensors, state, manifest = found
        for key, value in facts.items():
            if manifest.get(key) not in (None, value):
                self.say(f"not bit-exact: {key} was {manifest[key]} and is {value}")
        try:
            self.learner.load_state_dict(checkpoints.under("learner", tensors))
        except RuntimeError:
            raise CheckpointError(f"the checkpoint in {self.folder.path} does not fit its recipe") from None
        self.optimizer.load_state_dict(checkpoints.under("optimizer", tensors))
        self.at.step = state["step"]
        self.step.names, self.step.count = state["names"], state["count"]
        self.step.sums = tensors["window"].to(self.device)

    def save(self) -> None:
        """Write a checkpoint of this very step; only the first rank does."""
        if not self.main:
            return
        self.metrics.sync()
        tensors = checkpoints.flatten("learner", self.learner.state_dict())
        tensors |= checkpoints.flatten("optimizer", self.optimizer.state_dict())
        tensors["window"] = self.step.sums
        state = {"step": self.at.step, "names": self.step.names, "count": self.step.count}
        place = self.folder / "checkpoints"
        checkpoints.save(place, self.at.step, tensors, state, {**checkpoints.versions(), **self.world()})
        checkpoints.prune(place, self.recipe.checkpoints.keep)

    def world(self) -> dict[str, Any]:
        return {"world": distributed.world(), "device": self.device.type}

    def run(self, evaluate: Callable[[int], dict[str, float]] | None, resume_command: str) -> None:
        """Train to the end, or until asked to stop."""
        t, at = self.recipe.training, self.at
        self.learner.train()
        if self.main:
            self.metrics.open(keep_until_step=at.step)
            self.speed.open()
        save_every = max(1, round(self.recipe.checkpoints.every * at.per_epoch)) if self.recipe.checkpoints.every else 0
        done, total = at.step * t.batch, at.total * t.batch
        with StopWatch() as stop, Progress("train", total, done=done, silent=not self.main) as bar:
            while at.step < at.total:
                for batch in self.feeder.batches(at.epoch, start=at.step % at.per_epoch):
                    self.take(batch)
                    self.report(bar)
                    ends_epoch = at.step % at.per_epoch == 0
                    if ends_epoch:
                        self.end_epoch(evaluate)
                    asked = distributed.any_rank(stop.asked is not None)
                    if asked or (save_every and at.step % save_every == 0 and at.step < at.total):
                        self.check_numbers()
                        self.save()
                    if asked:
                        raise stop.error(f"step {at.step} of {at.total}", resume_command)
                    if ends_epoch or at.step >= at.total:
                        break
        self.check_numbers()
        self.save()
        self.metrics.close()
        self.speed.close()

    def take(self, batch: Any) -> None:
        t, at = self.recipe.training, self.at
        lr = self.learning_rate()
        teacher = self.recipe.teacher
        momentum = (
            teacher_momentum(at.step, total=at.total, momentum=teacher.momentum, schedule=teacher.schedule)
            if teacher
            else 1.0
        )
        ramp = self.recipe.objective.ramp
        if ramp:
            share = (at.epoch + 1) / max(t.epochs, 1)
            self.learner.objective.set_argument(ramp, share * float(self.recipe.objective.arguments[ramp]))
        view_keys = keys(self.recipe.seed, at.epoch, batch.indices)
        self.step(batch.images, view_keys, batch.sizes, lr, momentum)
        at.step += 1

    def learning_rate(self) -> float:
        t = self.recipe.training
        return learning_rate(
            self.at.step,
            lr=self.lr,
            epochs=self.at.total / self.at.per_epoch,
            steps_per_epoch=self.at.per_epoch,
            schedule=t.schedule,
            warmup=t.warmup,
            milestones=t.milestones,
            factor=t.gamma,
        )

    def report(self, bar: Progress) -> None:
        """Show and log; the device is waited for once in `log_every` steps, on the CPU's own step every time."""
        t, at = self.recipe.training, self.at
        if self.device.type == "cpu":
            self.check_numbers()
        if at.step % t.log_every and at.step != at.total:
            bar.advance(t.batch)
            return
        self.check_numbers()
        terms = self.step.flush()
        loss = sum(terms.values())
        bar.advance(t.batch, epoch=at.step // at.per_epoch, loss=loss, **terms)
        if self.main:
            epoch = at.step / at.per_epoch
            self.metrics.write(step=at.step, epoch=epoch, loss=loss, **terms, lr=self.learning_rate())
            self.speed.write(step=at.step, epoch=epoch, images_per_second=bar.rate, time=time.time())

    def end_epoch(self, evaluate: Callable[[int], dict[str, float]] | None) -> None:
        at, every = self.at, self.recipe.evaluation.every
        epoch = at.step // at.per_epoch
        if evaluate is None or not every or (epoch % every and at.step != at.total) or not self.main:
            return
        self.check_numbers()
        record = evaluate(epoch)
        self.metrics.write(step=at.step, epoch=epoch, **record)
        if record.get("effective_rank", 2.0) < 1.5:
            self.say(f"collapsed: effective rank {record['effective_rank']:.1f} at epoch {epoch}")

    def check_numbers(self) -> None:
        """Stop where the loss or a gradient became NaN or infinite; the weights and the last checkpoint are good."""
        if self.step.check() is None:
            return
        terms = self.step.flush()
        raise NumbersError(
            f"the loss or a gradient is not finite by step {self.at.step} (lr {self.learning_rate():.3g}, "
            f"{', '.join(f'{k} {v:.4g}' for k, v in terms.items())}); the weights before it are kept in "
            f"{self.folder / 'checkpoints'}: lower training.lr or raise objective.temperature"
        )

    def write_encoder(self) -> None:
        from safetensors.torch import save

        from kontrast.training.folder import write_atomic

        with disk_faults(self.folder.path):
            tensors = {k: t.detach().cpu().contiguous() for k, t in self.learner.student.encoder.state_dict().items()}
        write_atomic(self.folder / "encoder.safetensors", save(tensors))


def build_learner(recipe: Recipe, channels: int, device: torch.device) -> Learner:
    """The learner on its device; refused where a rank's share of the batch is too small for batch norm."""
    learner = Learner(recipe, channels).to(device)
    learner.to(memory_format=torch.channels_last)  # as the views come; faster on CUDA and on CPUs
    share = recipe.training.batch // distributed.world() // recipe.training.accumulate
    views = recipe.views.count if recipe.batch_norm.joint else 1
    least = smallest_batch(learner)
    if share * views < least:
        raise UsageError(f"training.batch gives {share} images a rank: batch norm needs at least {-(-least // views)}")
    if recipe.batch_norm.kind == "sync" and distributed.world() > 1:
        learner = synchronise_batch_norm(learner)
    return learner


def precision(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def build_views(recipe: Recipe, dtype: torch.dtype) -> Views:
    v = recipe.views
    local = {"local_count": v.local_count, "local_size": v.local_size} if v.local_count else {}
    return Views(v.policy, count=v.count, size=v.size, dtype=dtype, **local, **v.arguments)
