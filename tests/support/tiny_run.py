"""A real run of a few seconds for tests that look at runs: images in a folder, two epochs, all checkpoints kept."""

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
    """A folder that lives as long as the tests do."""
    place = Path(tempfile.mkdtemp(prefix="kontrast-tests-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return place


@functools.cache
def images() -> Path:
    """Real digits as PNG files in class folders."""
    from PIL import Image

    digits = open_data("digits", "test").first(IMAGES)
    for number, (picture, label) in enumerate(zip(digits.images, digits.labels.tolist())):
        folder = home() / "images" / str(label)
        os.makedirs(folder, exist_ok=True)
        Image.fromarray(picture.permute(1, 2, 0).numpy()).save(folder / f"{number:03d}.png")
    return home() / "images"


@functools.cache
def trained() -> Path:
    """A finished run folder; treat it as read-only, and copy it to change it."""
    overrides = {
        "training": {"epochs": 2, "batch": 32, "lr": 0.1, "warmup": 0.0},
        "encoder.width": 32,
        "evaluation.every": 0,
        "checkpoints": {"every": 1.0, "keep": 5},
    }
    torch.set_num_threads(1)
    run = pretrain(
        images(), recipe="quickstart", overrides=overrides, out=home() / "run", device="cpu", say=lambda _: None
    )
    return Path(run)


def copy(target: Path) -> Path:
    """The run in a folder of its own."""
    return Path(shutil.copytree(trained(), target / "run"))
