"""A real run of a few seconds for tests that need one: images in a folder, two epochs, all checkpoints kept."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

import torch

from kontrast.data import open_data
from kontrast.training.pretrain import pretrain

IMAGES = 240


@functools.cache
def home() -> Path:
    """Return a folder that exists until the tests end."""
    place = Path(tempfile.mkdtemp(prefix="kontrast-tests-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return place


@functools.cache
def images() -> Path:
    """Return a folder of real digits, as PNG files in class folders."""
    from PIL import Image

    digits = open_data("digits", "test").first(IMAGES)
    for number, (picture, label) in enumerate(zip(digits.images, digits.labels.tolist())):
        folder = home() / "images" / str(label)
        os.makedirs(folder, exist_ok=True)
        Image.fromarray(picture.permute(1, 2, 0).numpy()).save(folder / f"{number:03d}.png")
    return home() / "images"


@functools.cache
def trained() -> Path:
    """Return a finished run folder, which is read-only: use `copy` to change it."""
    overrides = {
        "training": {"epochs": 2, "batch": 32, "lr": 0.1, "warmup": 0.0},
        "encoder.width": 32,
        "evaluation.every": 0,
        "checkpoints": {"every": 1.0, "keep": 5},
    }
    torch.set_num_threads(1)
    return pretrain(
        images(), recipe="quickstart", overrides=overrides, out=home() / "run", device="cpu", say=lambda _: None
    )


def copy(target: Path) -> Path:
    """Copy the finished run below `target` and return the copy."""
    return Path(shutil.copytree(trained(), target / "run"))


def example_folder(folder: Path) -> None:
    """Fill a working folder with what the examples in docstrings use: a run, photos and vectors."""
    import numpy as np

    written_later = shutil.ignore_patterns("embeddings")  # by another test, which searched the run's images
    shutil.copytree(trained(), folder / "runs" / "digits", ignore=written_later)
    shutil.copytree(images(), folder / "photos")
    shutil.copy(next(images().rglob("*.png")), folder / "photo.png")
    np.save(folder / "vectors.npy", np.array([[1, 0], [0, 1], [1, 0]], dtype=np.float32))
