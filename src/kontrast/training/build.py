"""Build the parts of a run from its recipe: feeder, learner on its device, optimizer, views."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from kontrast import distributed
from kontrast.config.recipe import Recipe
from kontrast.data import Feeder, ImageSet
from kontrast.errors import EnvironmentFault, UsageError
from kontrast.networks import smallest_batch, synchronize_batch_norm
from kontrast.optim.optimizers import Optimizer, build_optimizer
from kontrast.sharding import is_sharded, shard, whole_state
from kontrast.training.learner import Learner, build_student
from kontrast.training.step_schedule import largest_weight_decay
from kontrast.views import Views


def build_feeder(recipe: Recipe, train: ImageSet, device: torch.device) -> Feeder:
    """Return the batches of the training images."""
    data, feeder = recipe.data, partial(Feeder, rank=distributed.rank(), world=distributed.world(), device=device)
    batch, seed = recipe.training.batch, recipe.seed
    return feeder(train, batch, seed=seed, allow_small=data.allow_small, resident=data.resident)


def build_learner(
    recipe: Recipe, channels: int, device: torch.device, images: int = 2**20, classes: int = 0
) -> Learner:
    """Return the learner on its device. Raises if a rank's share of the batch is too small for batch norm."""
    learner = Learner(recipe, channels, images, classes).to(device)
    if recipe.start is not None:
        learner.freeze(recipe.start.frozen_stages)
    sharded = recipe.training.parallel == "fsdp" and distributed.world() > 1
    if not sharded:  # sharding needs contiguous parameters
        learner.to(memory_format=torch.channels_last)  # like the views; faster on CUDA and on CPUs
    share = recipe.training.batch // distributed.world() // recipe.training.accumulate
    one_view = not recipe.batch_norm.joint or (recipe.teacher is not None and not recipe.teacher.symmetric)
    views = 1 if one_view else recipe.views.count
    least = smallest_batch(learner)
    if share * views < least:
        raise UsageError(f"training.batch: batch norm needs at least {-(-least // views)} images per rank, not {share}")
    if recipe.batch_norm.kind == "sync" and distributed.world() > 1:
        learner = synchronize_batch_norm(learner)
    if sharded:
        for _, part in learner.parts():
            shard(part)
    return learner


def facts_of(train: ImageSet) -> dict[str, int]:
    """Return what a learner has to know of its training images: channels, how many there are, and their classes.

    Images are counted by their numbers in the source, of which a part may have been left out.
    """
    images = len(train) if train.index is None else int(train.index.max()) + 1
    classes = 0 if train.labels is None or not len(train) else int(train.labels.max()) + 1
    return {"channels": train.channels, "images": images, "classes": classes}


def optimizer_of(recipe: Recipe, learner: Learner) -> Optimizer:
    """Return the recipe's optimizer of the learner's parameters."""
    t = recipe.training
    momentum = t.momentum if t.optimizer in ("sgd", "lars") else None
    lars = t.optimizer == "lars"
    options: dict[str, Any] = {"trust": t.trust, "lr_inside": t.lr_inside} if lars else {}
    options["exclude_1d"] = not (t.adapt_all if lars else t.decay_all)
    decay = largest_weight_decay(recipe)
    return build_optimizer(learner, t.optimizer, t.lr, momentum=momentum, weight_decay=decay, **options)


@contextmanager
def algorithms(deterministic: bool) -> Iterator[None]:
    """Let CUDA use the fastest algorithms, found by trying, or deterministic ones; restore the settings afterwards.

    Args:
        deterministic: give the same bits each time. If the calling program has already set torch to do so, it stays so.
    """
    cudnn = torch.backends.cudnn
    memory: Any = torch.utils.deterministic  # whose only attribute is made at run time
    already = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    before = cudnn.benchmark, cudnn.deterministic, memory.fill_uninitialized_memory
    cudnn.benchmark, cudnn.deterministic = not (deterministic or already), deterministic or already
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first matrix product
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic, memory.fill_uninitialized_memory = before
        if deterministic:  # otherwise nothing changed, and this call imports torch's compiler, which takes seconds
            torch.use_deterministic_algorithms(already, warn_only=only_warns)


def precision(name: str, device: torch.device) -> torch.dtype:
    """Return the type to compute in; auto: bfloat16 on a GPU that has it, else float32."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    if name == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise EnvironmentFault("training.precision=bfloat16: this GPU does not support it; use float32 or auto")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def build_views(recipe: Recipe, dtype: torch.dtype) -> Views:
    """Return the views that the recipe trains on."""
    v = recipe.views
    local: dict[str, Any] = {"local_count": v.local_count, "local_size": v.local_size} if v.local_count else {}
    return views_of(recipe, v.count, dtype=dtype, local_policy=v.local_policy or None, **local)


def whole_student(learner: Learner, recipe: Recipe, channels: int, device: torch.device) -> nn.Module:
    """Return the student, or the teacher if it is the recipe's result; if it is sharded, an unsharded copy, which all
    ranks must ask for together."""
    if not is_sharded(learner.result):
        return learner.result
    copy = build_student(recipe, channels)
    copy.load_state_dict(whole_state(learner.result))
    return copy.to(device)


def views_of(recipe: Recipe, count: int, **options: Any) -> Views:
    """Return views by the recipe's policy, which leaves the channels of random bits unchanged."""
    arguments = {**recipe.views.arguments, "planes": recipe.data.random_bits}
    return Views(recipe.views.policy, count=count, size=recipe.views.size, **options, **arguments)


EVALUATED = ("mean", "std", "low", "high", "planes", "colors", "interpolation")
"""Fields of the training views' policy that views outside training have too."""


def evaluation_view(recipe: Recipe, dtype: torch.dtype = torch.float32) -> Views:
    """Return one view without random augmentation, normalized like the training views."""
    policy = views_of(recipe, 1).policies[0]
    return Views(
        "evaluate", count=1, size=recipe.views.size, dtype=dtype, center_fraction=recipe.evaluation.crop,
        **{name: getattr(policy, name) for name in EVALUATED},
    )  # fmt: skip
