"""Choose the settings of the `folder` recipe by the images and the device. results/folder-race.md has the evidence."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from kontrast.config.recipe import Recipe, TrainingSettings
from kontrast.data import ImageSet
from kontrast.data.decode import SUFFIXES
from kontrast.data.paths import describe_source
from kontrast.training.build import build_views

CPU_IMAGES = 200_000  # how often two cores process an image of 32 px in a minute or two
CUDA_IMAGES = 20_000_000
LONGEST = 1.5
"""The longest side of an image, in shorter sides that images are reduced to: most photos are 4:3 or 3:2."""
SMALL_VIEWS = {"crop_scale": [0.2, 1.0], "jitter": [0.8, 0.8, 0.8, 0.2], "blur": 0.5, "blur_sigma": [0.1, 1.5]}
"""The augmentations that were best on small images in long trainings; results/README.md has what was tried."""
CPU_OBJECTIVE = {"name": "cacr", "t_plus": 1.0, "t_minus": 2.0}
"""What learned most in three minutes on a CPU."""
CHOSEN = (
    "adapt", "objective.", "views.size", "views.policy", "views.crop_scale", "views.jitter", "views.blur",
    "views.blur_sigma", "encoder.", "training.batch", "training.epochs", "training.warmup",
    "training.weight_decay", "data.size", "data.longest", "data.depth", "views.low", "views.high", "views.mean",
    "views.std", "views.gray",
)  # fmt: skip
"""Prefixes of the settings that are chosen here."""


def adapt(count: int, side: int, device: torch.device, size: int = 0) -> dict[str, Any]:
    """Choose settings; those of the user override them.

    Args:
        count: number of training images.
        side: their typical shorter side, in pixels.
        device: where the run trains.
        size: the side of the views, if it is known; 0: the one that suits the images.
    """
    cuda = device.type == "cuda"
    size = size or view_size(side, cuda)
    batch = batch_size(count, size, cuda)
    budget = (CUDA_IMAGES if cuda else CPU_IMAGES) * 32 * 32 // (size * size)
    epochs = max(1, min(1000 if cuda else 200, round(budget / count)))
    small = size <= 64
    encoder = ("resnet-18" if small else "resnet-50") if cuda else "small-conv"
    reduced = 2 * size if small else round(size * 8 / 7)
    views: dict[str, Any] = {"size": size, "policy": "simclr-cifar" if small else "moco-v2"}
    training: dict[str, Any] = {"batch": batch, "epochs": epochs}
    if cuda:
        training["warmup"] = min(10.0, epochs / 10)
    if cuda and small:
        views |= SMALL_VIEWS
        training["weight_decay"] = 5e-4
    return {
        **({} if cuda else {"objective": CPU_OBJECTIVE}),
        "views": views,
        "encoder": {"name": encoder},
        "training": training,
        # Images of twice the view size keep the detail of small crops; full photos would fill memory and disk.
        "data": {"size": reduced, "longest": round(LONGEST * reduced)},
    }


def bounded(recipe: Recipe) -> Recipe:
    """The recipe with the size to which images are reduced, of a recipe that doesn't give one.

    The smallest crop of a square image of that size has as many pixels as the view that is made of it, so that reducing
    larger images costs the views no detail, and the memory of a batch depends on the views alone.
    """
    views = build_views(recipe, torch.float32)
    sizes = [(views.size, policy) for policy in views.policies]
    sizes += [(views.local_size or 0, policy) for policy in views.local_policies]
    least = max(size / (math.sqrt(p.crop_scale[0]) if p.crop_scale else p.center_fraction) for size, p in sizes)
    size = math.ceil(least)
    return replace(recipe, data=replace(recipe.data, size=size, longest=math.ceil(LONGEST * size)))


def reasons(recipe: Recipe, train: ImageSet, side: int, device: torch.device) -> list[str]:
    """Lines that explain the chosen settings; `side` is the typical shorter side before images are reduced."""
    count, t, v = len(train), recipe.training, recipe.views
    return [
        f"images: {count:,}, typical shorter side {side} px -> views of {v.size} px ({v.policy})",
        *describe_folder(recipe, train),
        f"device: {device.type} -> {recipe.objective.name}, encoder {recipe.encoder.name}, batch {t.batch}",
        describe_length(t, count),
    ]


def describe_length(training: TrainingSettings, count: int) -> str:
    """A line on how long the training is: its epochs or, if they end it earlier, its steps."""
    presentations, limit = training.epochs * count, training.max_steps * training.batch
    if 0 < limit < presentations:
        length, key, presentations = f"steps: {training.max_steps}", "max_steps", limit
    else:
        length, key = f"epochs: {training.epochs}", "epochs"
    return f"{length} (about {presentations:,} image presentations); set training.{key}=N for more or fewer"


def describe_folder(recipe: Recipe, train: ImageSet) -> list[str]:
    """Lines on what users may not expect of their folder: sub-folders are labels, and some files are not images."""
    lines = []
    if train.classes and describe_source(recipe.data.source).kind in ("folder", "train folder"):
        held_out = ", with part of the images held out; if they are not classes, data.test_share=0 trains on all"
        names = f"{len(train.classes)} sub-folders ({_first(train.classes)})"
        lines.append(f"labels: {names}, which the probes use as classes{held_out if train.has_test else ''}")
    if others := train.notes.get("other files"):
        lines.append(f"left out: {others:,} other files; images are {' '.join(s[1:] for s in SUFFIXES)}")
    return lines


def unread_folders(recipe: Recipe) -> list[str]:
    """A line on sub-folders that are not read because there is one called train, if there are any."""
    source = describe_source(recipe.data.source)
    unread = source.unread_folders(recipe.data.follow_links)
    advice = f"beside {source.train}, which is used as the training split; if it is a class, rename it"
    return [f"not read: {_first(unread)} {advice}"] if unread else []


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def view_size(side: int, cuda: bool) -> int:
    """The largest usual view size that is not larger than the images; on a CPU at most 64."""
    return max((s for s in ((32, 64, 96, 128, 224) if cuda else (32, 64)) if s <= side), default=32)


def batch_size(count: int, size: int, cuda: bool) -> int:
    """The largest power of two that gives at least four batches per epoch, within limits of memory."""
    batch = 256 if cuda or size <= 32 else 128
    while batch > 8 and batch * 4 > count:
        batch //= 2
    return max(2, min(batch, count))
