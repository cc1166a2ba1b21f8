"""The `folder` recipe's choices: sizes, batch and epochs from the images and the device, each with its reason."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from kontrast.config.recipe import Recipe, TrainingSettings
from kontrast.data import ImageSet
from kontrast.data.decode import SUFFIXES
from kontrast.data.listing import TEST_NAMES, class_folders
from kontrast.data.shards import is_shards
from kontrast.data.sources import SOURCES
from kontrast.data.store import is_store
from kontrast.errors import DataError

CPU_IMAGES = 60_000  # image presentations that two slow cores manage at 32 px in a few minutes
CUDA_IMAGES = 20_000_000
CHOSEN = ("adapt", "views.size", "views.policy", "encoder.", "training.batch", "training.epochs", "data.size")
"""How the settings begin that are not known before the images are."""


def adapt(train: ImageSet, device: torch.device) -> dict[str, Any]:
    """Settings to lay under the user's own."""
    cuda = device.type == "cuda"
    count, side = len(train), train.typical_side
    size = view_size(side, cuda)
    batch = batch_size(count, size, cuda)
    budget = (CUDA_IMAGES if cuda else CPU_IMAGES) * 32 * 32 // (size * size)
    epochs = max(1, min(1000 if cuda else 200, round(budget / count)))
    small = size <= 64
    encoder = "resnet-18" if cuda else "small-conv"
    picks: dict[str, Any] = {
        "views": {"size": size, "policy": "simclr-cifar" if small else "moco-v2"},
        "encoder": {"name": encoder},
        "training": {"batch": batch, "epochs": epochs},
        # Small crops of small views keep their detail at twice the size; a camera's pixels would fill memory and disk.
        "data": {"size": 2 * size if small else round(size * 8 / 7)},
    }
    if cuda and size > 64:
        picks["encoder"] = {"name": "resnet-50"}
    return picks


def reasons(recipe: Recipe, train: ImageSet, device: torch.device) -> list[str]:
    """What will run, with the user's own settings laid over the picks, and why."""
    count, t, v = len(train), recipe.training, recipe.views
    return [
        f"images: {count:,}, typical shorter side {train.typical_side} px -> views of {v.size} px ({v.policy})",
        *taken_for(recipe, train),
        f"device: {device.type} -> encoder {recipe.encoder.name}, batch {t.batch}",
        length(t, count),
    ]


def length(training: TrainingSettings, count: int) -> str:
    """How long the training is: of epochs, or of the steps that end it before them."""
    shown, most = training.epochs * count, training.max_steps * training.batch
    if 0 < most < shown:
        word, key, shown = f"steps: {training.max_steps}", "max_steps", most
    else:
        word, key = f"epochs: {training.epochs}", "epochs"
    return f"{word} (about {shown:,} image presentations); set training.{key}=N for more or fewer"


def taken_for(recipe: Recipe, train: ImageSet) -> list[str]:
    """What a person may not expect of their folder: names of sub-folders as labels, and files that are left out. Labels
    in shards, of a store or of a named set were given as such."""
    lines, source = [], Path(recipe.data.source)
    given = recipe.data.source in SOURCES or is_shards(recipe.data.source)
    given = given or is_store(source) or is_store(source / "train")
    parts = (source / "train").is_dir() and any((source / name).is_dir() for name in TEST_NAMES)
    if train.classes and source.is_dir() and not (given or parts):
        names = ", ".join(train.classes[:3]) + (", ..." if len(train.classes) > 3 else "")
        lines.append(f"labels: {len(train.classes)} sub-folders ({names}), which the probes take for classes")
        if train.has_test:
            lines[-1] += ", with part of the images held out; are they none? data.test_share=0 trains on all"
    if others := train.notes.get("other files"):
        lines.append(f"left out: {others:,} other files; images are {' '.join(s[1:] for s in SUFFIXES)}")
    return lines


def beside_train(recipe: Recipe) -> list[str]:
    """What is not read of a folder that has one called train: its other sub-folders with images, of which train may be
    a class like them."""
    source = Path(recipe.data.source)
    if recipe.data.source in SOURCES or not (source / "train").is_dir():
        return []
    beside: list[str] = []
    with contextlib.suppress(DataError):  # one that may not be looked into keeps nobody from training on the others
        beside = [n for n in class_folders(str(source), recipe.data.follow_links) if n not in ("train", *TEST_NAMES)]
    if not beside:
        return []
    names = ", ".join(beside[:3]) + (", ..." if len(beside) > 3 else "")
    return [f"not read: {names} beside {source / 'train'}, which is taken for the training part; a class? rename it"]


def view_size(side: int, cuda: bool) -> int:
    """The largest usual size that the images fill; on a CPU at most 64."""
    sizes = [s for s in ((32, 64, 96, 128, 224) if cuda else (32, 64)) if s <= side]
    return sizes[-1] if sizes else 32


def batch_size(count: int, size: int, cuda: bool) -> int:
    """A power of two: large enough to contrast, and at least four batches an epoch."""
    largest = (512 if size <= 96 else 256) if cuda else (256 if size <= 32 else 128)
    batch = largest
    while batch > 8 and batch * 4 > count:
        batch //= 2
    return max(2, min(batch, count))
