"""A run folder opened again: its recipe, its encoder, its images."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from kontrast.config.recipe import DataSettings, Recipe
from kontrast.data import ImageSet
from kontrast.errors import CheckpointError, DataError, UsageError, refuse_pickle
from kontrast.networks import Encoder
from kontrast.training.build import evaluation_view
from kontrast.training.checkpoints import read_weights
from kontrast.training.learner import Student, build_student
from kontrast.training.run_folder import RunFolder, stored_recipe
from kontrast.training.splits import located, open_split
from kontrast.views import Views

MOST_CHANNELS = 4096


class Run:
    """A run folder: what `kontrast pretrain` wrote. Its files are read when they are needed.

    Every function that takes a run takes either the folder's path or a `Run`, and a `Run` can be used as a path.

    Args:
        path: The run folder.

    Attributes:
        path: The run folder as a `pathlib.Path`.
        recipe: The resolved recipe that the run was trained by.
        info: The content of run.json: command, device, versions, data, duration.

    Example:
        >>> import kontrast
        >>> run = kontrast.Run("runs/digits")
        >>> print(run)  # doctest: +ELLIPSIS
        runs/digits: nt-xent, small-conv, 192 images of ...images, 12 steps
        >>> run.prepare("photo.png").shape
        torch.Size([1, 3, 32, 32])
    """

    def __init__(self, path: str | os.PathLike[str]):
        if not isinstance(path, str | os.PathLike):
            raise UsageError(f"a run can't be given as {type(path).__name__}: give its folder or a kontrast.Run")
        self.folder = RunFolder(path)
        self.path = Path(path)
        refuse_pickle(self.path)
        if not (self.path / "recipe.toml").is_file():
            raise UsageError(f"{self.path} is not a run folder: it has no recipe.toml")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def __str__(self) -> str:
        data, recipe = self.info.get("data", {}), self.recipe
        state = f"{self.info.get('steps')} steps" if self.info.get("finished") else "not finished"
        images = f"{data.get('images', 0):,} images of {data.get('name', '?')}"
        return f"{self.path}: {recipe.objective.name}, {recipe.encoder.name}, {images}, {state}"

    def __fspath__(self) -> str:
        return str(self.path)

    @cached_property
    def recipe(self) -> Recipe:
        return stored_recipe(self.folder)

    @cached_property
    def info(self) -> dict[str, Any]:
        return self.folder.info()

    @property
    def channels(self) -> int:
        """The number of channels of the images that the encoder takes."""
        data = self.info.get("data")
        channels = data.get("channels") if isinstance(data, dict) else None
        if not isinstance(channels, int) or not 1 <= channels <= MOST_CHANNELS:
            raise CheckpointError(f"{self.path / 'run.json'} is damaged: its data has no number of channels")
        return channels

    def untrained(self) -> Student:
        """Return encoder and head with the weights they had before the first step."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.seed)
            return build_student(self.recipe, self.channels)

    def encoder(self, device: torch.device | str = "cpu", trained: bool = True) -> Encoder:
        """Return the encoder in eval mode.

        Args:
            device: Where to put it; default: the CPU.
            trained: False gives the encoder as it was before the first step.

        Shape:
            images [N,C,h,w], as `prepare` returns them -> features [N,F].
        """
        encoder = self.untrained().encoder
        if trained:
            encoder.load_state_dict(self._read_weights(encoder.state_dict()))
        return encoder.to(device).eval()

    def _read_weights(self, expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Read encoder.safetensors and compare it with the tensors that the recipe's encoder has."""
        path = self.path / "encoder.safetensors"
        weights = read_weights(path)
        if {k: (t.shape, t.dtype) for k, t in weights.items()} != {k: (t.shape, t.dtype) for k, t in expected.items()}:
            raise CheckpointError(f"{path} does not fit the run's recipe: it has other tensors")
        if not all(torch.isfinite(t).all() for t in weights.values()):
            raise CheckpointError(f"{path} holds NaN or infinity: its training went wrong")
        if self.info.get("encoder_sha256") not in (None, hashlib.sha256(path.read_bytes()).hexdigest()):
            raise CheckpointError(
                f"{path} is damaged or was changed after the run wrote it (its SHA-256 differs): restore it, or remove "
                "encoder_sha256 from run.json if you changed it on purpose"
            )
        return weights

    def check_channels(self, images: ImageSet, name: str = "") -> ImageSet:
        """Return the images if they have as many channels as the encoder takes."""
        if images.channels != self.channels:
            raise DataError(
                f"{name or images.name} has images of {images.channels} channels, the run's encoder takes "
                f"{self.channels}: give images like those it was trained on"
            )
        return images

    def transform(self, dtype: torch.dtype = torch.float32) -> Views:
        """Return the view used outside training: center crop, resized and normalized as in training."""
        return evaluation_view(self.recipe, dtype)

    def prepare(self, images: Any) -> torch.Tensor:
        """Crop, resize and normalize images as the encoder expects them.

        Args:
            images: One image file or a list of them, of any sizes; or decoded pixels, uint8 [N,C,H,W] or [C,H,W].

        Returns:
            float32 [N,C,h,w], the same input that `kontrast.embed` gives the encoder.
        """
        from kontrast.runs.image_stream import one_image

        view, hint = self.transform(), "give image files, or uint8 pixels [N,C,H,W]"
        if not isinstance(images, list | tuple) and not hasattr(images, "ndim"):
            images = [images]
        if not len(images):
            raise DataError(f"no images to prepare: {hint}")
        if isinstance(images, list | tuple):
            for image in images:
                if not isinstance(image, str | os.PathLike):
                    raise UsageError(f"can't prepare an image of type {type(image).__name__}: {hint}")
            return torch.cat([view(one_image(self, path)[:], torch.zeros(1, dtype=torch.int64))[0] for path in images])
        pixels = torch.as_tensor(images)
        pixels = pixels[None] if pixels.ndim == 3 else pixels
        self.check_channels(ImageSet(pixels, [""] * len(pixels)), "images")
        return view(pixels, torch.arange(len(pixels), device=pixels.device))[0]

    def data(self, split: str) -> ImageSet:
        """Open the run's own images: "train" or "test"."""
        return open_split(self.data_settings, split, seed=self.recipe.seed)

    @property
    def data_settings(self) -> DataSettings:
        """The recipe's data section, with the absolute path that its images had when the run began."""
        return located(self.recipe.data, self.info)


def open_run(run: str | os.PathLike[str], float_range: tuple[float, float] | None = None) -> Run:
    """Return a path or `Run` as a `Run`; `float_range` replaces the recipe's range of float images."""
    opened = run if isinstance(run, Run) and float_range is None else Run(run)
    if float_range is not None:
        opened.recipe = replace(opened.recipe, data=replace(opened.recipe.data, float_range=float_range))
    return opened


def load(run: str | os.PathLike[str], device: torch.device | str = "cpu") -> Encoder:
    """Load the trained encoder of a run, in eval mode.

    Args:
        run: A run folder or a `kontrast.Run`.
        device: Where to put the encoder: "cpu" (default), "cuda" or "cuda:N".

    Returns:
        A `torch.nn.Module` whose `width` is the number of features. `kontrast.Run(run).prepare(files)` makes its input.

    Shape:
        images [N,C,h,w] -> features [N,F].

    Example:
        >>> import kontrast
        >>> encoder = kontrast.load("runs/digits")
        >>> encoder(kontrast.Run("runs/digits").prepare("photo.png")).shape
        torch.Size([1, 32])
    """
    try:
        device = torch.device(device)
    except RuntimeError:
        raise UsageError(f"unknown device {device!r}: give cpu, cuda or cuda:N") from None
    return Run(run).encoder(device)
