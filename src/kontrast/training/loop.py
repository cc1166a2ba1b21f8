"""Pretraining from a recipe to a run folder, resumable to the same bits.

What a step does is a pure function of the recipe and the step's number: the order of images, the draws of the views,
the learning rate and the shuffles all come from counters, so a checkpoint needs no generator's state.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kontrast import distributed
from kontrast.data import Feeder, ImageSet
from kontrast.networks import smallest_batch, synchronise_batch_norm
from kontrast.registry import CheckpointError, NumbersError, UsageError
from kontrast.settings import Recipe
from kontrast.training import checkpoints
from kontrast.training.folder import Lines, RunFolder, write_atomic
from kontrast.training.learner import Learner
from kontrast.training.optimizers import Optimizer, build_optimizer
from kontrast.training.progress import Progress
from kontrast.training.schedules import joint_weight, learning_rate, scaled_learning_rate, teacher_momentum
from kontrast.training.step import Step
from kontrast.training.stopping import StopWatch
from kontrast.views import Views, keys

Say = Callable[[str], None]
Evaluate = Callable[[], dict[str, float]]
COLLAPSED = 1.5
"""Below this effective rank the representation is all but one direction."""


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


class Loop:
    """Everything one run holds while it trains."""

    def __init__(self, recipe: Recipe, folder: RunFolder, train: ImageSet, device: torch.device, say: Say):
        self.folder, self.device, self.main = folder, device, distributed.is_main()
        self.say = say if self.main else lambda _: None
        self.feeder = build_feeder(recipe, train, device)
        if self.feeder.batch != recipe.training.batch:
            self.say(f"batch {recipe.training.batch} -> {self.feeder.batch}: there are {len(train)} images")
        self.recipe = recipe = replace(recipe, training=replace(recipe.training, batch=self.feeder.batch))
        t = recipe.training
        self.precision = precision(t.precision, device)
        torch.manual_seed(recipe.seed)
        self.learner = build_learner(recipe, train.channels, device)
        torch.backends.cudnn.benchmark = True
        self.optimizer = optimizer_of(recipe, self.learner)
        self.peak = scaled_learning_rate(t.lr, t.batch, t.lr_scaling)
        per_epoch = self.feeder.steps_per_epoch
        steps = t.epochs * per_epoch
        self.at = Position(0, min(steps, t.max_steps) if t.max_steps else steps, per_epoch)
        self.first = 0  # the step at which this process began
        self.best: dict[str, float] = {}
        self.metrics, self.speed = Lines(folder / "metrics.jsonl"), Lines(folder / "speed.jsonl")
        self.step = Step(
            self.learner,
            self.optimizer,
            build_views(recipe, self.precision),
            device=device,
            precision=self.precision,
            compile=t.compile == "yes" or (t.compile == "auto" and device.type == "cuda"),
            accumulate=t.accumulate,
            say=self.say,
        )

    def restore(self) -> None:
        """Go to the newest valid checkpoint, if there is one, and say what makes the rest differ from one run."""
        found = checkpoints.newest(self.folder / "checkpoints", self.say if self.main else None)
        if found is None:
            self.say(f"no checkpoint yet in {self.folder.path}: starting from step 0")
            return
        tensors, state, manifest = found
        for key, value in self.facts().items():
            if key not in ("kontrast", "python") and manifest.get(key) not in (None, value):
                self.say(f"not bit-exact: {key} was {manifest[key]} and is {value}")
        try:
            self.learner.load_state_dict(checkpoints.under("learner", tensors))
            self.optimizer.load_state_dict(checkpoints.under("optimizer", tensors))
            self.at.step = self.first = state["step"]
            self.step.names, self.step.count, self.best = state["names"], state["count"], state["best"]
            self.step.sums = tensors["window"].to(self.device)
        except (RuntimeError, KeyError):
            raise CheckpointError(f"the checkpoint in {self.folder.path} does not fit its recipe") from None
        self.say(f"going on from step {self.at.step} of {self.at.total}")

    def save(self) -> None:
        """Write a checkpoint of this very step; only the first rank does."""
        self.check_numbers()
        if not self.main:
            return
        self.metrics.sync()
        tensors = checkpoints.flatten("learner", self.learner.state_dict())
        tensors |= checkpoints.flatten("optimizer", self.optimizer.state_dict())
        tensors["window"] = self.step.sums
        state = {"step": self.at.step, "names": self.step.names, "count": self.step.count, "best": self.best}
        place = self.folder / "checkpoints"
        checkpoints.save(place, self.at.step, tensors, state, self.facts())
        checkpoints.prune(place, self.recipe.checkpoints.keep, int(self.best["step"]) if self.best else None)

    def facts(self) -> dict[str, Any]:
        """What, besides the recipe and the images, the bits depend on."""
        return {**checkpoints.versions(), "world": distributed.world(), "device": self.device.type}

    def run(self, evaluate: Evaluate | None, stop: StopWatch, resume_command: str) -> None:
        """Train to the end, or until asked to stop. `evaluate` measures the encoder; only the first rank has it."""
        at, batch = self.at, self.recipe.training.batch
        self.learner.train()
        if self.main:
            self.metrics.open(keep_until_step=at.step)
            self.speed.open()
        with Progress("train", at.total * batch, done=at.step * batch, silent=not self.main) as bar:
            while not at.finished:
                for images in self.feeder.batches(at.epoch, start=at.step % at.per_epoch):
                    self.take(images)
                    self.report(bar)
                    improved = self.evaluate(evaluate)
                    asked = self.asked(stop)
                    if asked or improved or self.save_due():
                        self.save()
                    if asked and not at.finished:
                        raise stop.error(f"step {at.step} of {at.total}", resume_command)
                    if at.finished or at.step % at.per_epoch == 0:
                        break
        self.save()
        self.metrics.close()
        self.speed.close()

    def save_due(self) -> bool:
        every = self.recipe.checkpoints.every
        return bool(every) and not self.at.finished and self.at.step % max(1, round(every * self.at.per_epoch)) == 0

    def asked(self, stop: StopWatch) -> bool:
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
            torch.default_generator.manual_seed((recipe.seed * 0x9E3779B97F4A7C15 + draw) % 2**63)
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
        )

    def report(self, bar: Progress) -> None:
        """Show and log; the device is waited for once in `log_every` steps, on the CPU's own step every time."""
        t, at = self.recipe.training, self.at
        if self.device.type == "cpu":
            self.check_numbers()
        if at.step % t.log_every and not at.finished:
            bar.advance(t.batch)
            return
        self.check_numbers()
        terms = self.step.flush()
        loss = sum(terms.values())
        bar.advance(t.batch, epoch=at.epoch, loss=loss, **terms)
        if self.main:
            lr, epoch = self.learning_rate(at.step - 1), at.epochs_done
            self.metrics.write(step=at.step, epoch=epoch, loss=loss, **terms, lr=lr)
            self.speed.write(step=at.step, epoch=epoch, images_per_second=bar.rate, time=time.time())

    def evaluate(self, evaluate: Evaluate | None) -> bool:
        """Every few epochs and at the end, measure, log and warn; whether this is the best so far by kNN."""
        at, every = self.at, self.recipe.evaluation.every
        due = every and at.step % (every * at.per_epoch) == 0
        if evaluate is None or not (due or at.finished):
            return False
        self.check_numbers()
        record = evaluate()
        self.metrics.write(step=at.step, epoch=at.epochs_done, **record)
        if record["effective_rank"] < COLLAPSED:
            self.say(f"collapsed: effective rank {record['effective_rank']:.1f} at epoch {at.epochs_done:g}")
        if "knn" not in record or record["knn"] <= self.best.get("knn", -1.0):
            return False
        self.best = {"step": at.step, "knn": record["knn"]}
        return True

    def check_numbers(self) -> None:
        """Stop where the loss or a gradient became NaN or infinite; the weights and the last checkpoint are good."""
        good = self.step.check()
        if good is None:
            return
        bad = self.first + good
        terms = ", ".join(f"{k} {v:.4g}" for k, v in self.step.flush().items())
        saved = checkpoints.checkpoints(self.folder / "checkpoints")
        kept = f"the last good checkpoint is {saved[-1]}" if saved else "there is no checkpoint before it"
        raise NumbersError(
            f"the loss or a gradient is not finite at step {bad + 1} (lr {self.learning_rate(bad):.3g}, {terms}); "
            f"{kept}: lower training.lr or raise objective.temperature"
        )

    def write_encoder(self) -> None:
        from safetensors.torch import save

        tensors = {k: t.detach().cpu().contiguous() for k, t in self.learner.student.encoder.state_dict().items()}
        write_atomic(self.folder / "encoder.safetensors", save(tensors))


def build_feeder(recipe: Recipe, train: ImageSet, device: torch.device) -> Feeder:
    return Feeder(
        train,
        batch=recipe.training.batch,
        seed=recipe.seed,
        device=device,
        rank=distributed.rank(),
        world=distributed.world(),
        allow_small=recipe.data.allow_small,
        resident=recipe.data.resident,
    )


def build_learner(recipe: Recipe, channels: int, device: torch.device) -> Learner:
    """The learner on its device; refused where a rank's share of the batch is too small for batch norm."""
    learner = Learner(recipe, channels).to(device)
    learner.to(memory_format=torch.channels_last)  # as the views come; faster on CUDA and on CPUs
    share = recipe.training.batch // distributed.world() // recipe.training.accumulate
    one = not recipe.batch_norm.joint or (recipe.teacher is not None and not recipe.teacher.symmetric)
    views = 1 if one else recipe.views.count
    least = smallest_batch(learner)
    if share * views < least:
        raise UsageError(f"training.batch gives {share} images a rank: batch norm needs at least {-(-least // views)}")
    if recipe.batch_norm.kind == "sync" and distributed.world() > 1:
        learner = synchronise_batch_norm(learner)
    return learner


def optimizer_of(recipe: Recipe, learner: Learner) -> Optimizer:
    t = recipe.training
    momentum = t.momentum if t.optimizer in ("sgd", "lars") else None
    exclude = {"exclude_1d": True} if t.optimizer == "lars" or not t.decay_all else {}
    return build_optimizer(learner, t.optimizer, t.lr, momentum=momentum, weight_decay=t.weight_decay, **exclude)


def precision(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def build_views(recipe: Recipe, dtype: torch.dtype) -> Views:
    v = recipe.views
    local = {"local_count": v.local_count, "local_size": v.local_size} if v.local_count else {}
    return Views(v.policy, count=v.count, size=v.size, dtype=dtype, **local, **v.arguments)
