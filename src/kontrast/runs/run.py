"""A run folder opened again: its recipe, its encoder, its data."""

from __future__ import annotations

import hashlib
import os
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
    """What a run folder holds, read when asked for."""

    def __init__(self, path: str | os.PathLike[str]):
        if not isinstance(path, str | os.PathLike):
            raise UsageError(f"a run is {type(path).__name__}: give its folder, or the Run that pretrain returned")
        self.folder = RunFolder(path)
        self.path = Path(path)
        refuse_pickle(self.path)
        if not (self.path / "recipe.toml").is_file():
            raise UsageError(f"{self.path} is not a run folder: it has no recipe.toml")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def __fspath__(self) -> str:
        """A run stands for its folder wherever one is asked for."""
        return str(self.path)

    @cached_property
    def recipe(self) -> Recipe:
        return stored_recipe(self.folder)

    @cached_property
    def info(self) -> dict[str, Any]:
        return self.folder.info()

    @property
    def channels(self) -> int:
        """Of the images that the encoder takes."""
        data = self.info.get("data")
        channels = data.get("channels") if isinstance(data, dict) else None
        if not isinstance(channels, int) or not 1 <= channels <= MOST_CHANNELS:
            raise CheckpointError(f"{self.path / 'run.json'} is damaged: its data has no number of channels")
        return channels

    def untrained(self) -> Student:
        """Encoder and head with the weights they had before the first step."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.seed)
            return build_student(self.recipe, self.channels)

    def encoder(self, device: torch.device | str = "cpu", trained: bool = True) -> Encoder:
        """The encoder [N,C,h,w] -> [N,F] in eval mode: trained, or as it was before the first step."""
        encoder = self.untrained().encoder
        if trained:
            encoder.load_state_dict(self._weights(encoder.state_dict()))
        return encoder.to(device).eval()

    def _weights(self, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those that the run wrote, checked against the network's own."""
        path = self.path / "encoder.safetensors"
        weights = read_weights(path)
        if {k: (t.shape, t.dtype) for k, t in weights.items()} != {k: (t.shape, t.dtype) for k, t in own.items()}:
            raise CheckpointError(f"{path} does not fit the run's recipe: it has other tensors")
        if not all(torch.isfinite(t).all() for t in weights.values()):
            raise CheckpointError(f"{path} holds NaN or infinity: its training went wrong")
        if self.info.get("encoder_sha256") not in (None, hashlib.sha256(path.read_bytes()).hexdigest()):
            raise CheckpointError(
                f"{path} is damaged or was changed since the run wrote it (its SHA-256 differs): restore it, or, if "
                "the change is meant, remove encoder_sha256 from run.json"
            )
        return weights

    def fitting(self, images: ImageSet, name: str = "") -> ImageSet:
        """The images, if they have as many channels as those that the encoder was built for."""
        if images.channels != self.channels:
            raise DataError(
                f"{name or images.name} has images of {images.channels} channels, the run's encoder takes "
                f"{self.channels}: give images like those it was trained on"
            )
        return images

    def transform(self, dtype: torch.dtype = torch.float32) -> Views:
        """Images as the encoder wants them outside training: centre crop, resized, normalised as in training."""
        return evaluation_view(self.recipe, dtype)

    def prepare(self, images: Any) -> torch.Tensor:
        """Pictures as the encoder takes them, float32 [N,C,h,w]: cropped, resized and normalised as `embed` does.

        images: one picture file or several, of any sizes; or pixels as they were decoded, uint8 [N,C,H,W] or [C,H,W].
        """
        from kontrast.runs.image_stream import one_image

        view = self.transform()
        if isinstance(images, str | os.PathLike):
            images = [images]
        several = images if isinstance(images, list | tuple) else [] if hasattr(images, "ndim") else [images]
        for odd in (image for image in several if not isinstance(image, str | os.PathLike)):
            kind = type(odd).__name__
            raise UsageError(f"an image is {kind}: give picture files, or pixels uint8 [N,C,H,W] as one tensor")
        if not len(images):
            raise DataError("no images to prepare: give picture files, or pixels uint8 [N,C,H,W]")
        if isinstance(images, list | tuple):
            return torch.cat([view(one_image(self, path)[:], torch.zeros(1, dtype=torch.int64))[0] for path in images])
        pixels = torch.as_tensor(images)
        pixels = pixels[None] if pixels.ndim == 3 else pixels
        self.fitting(ImageSet(pixels, [""] * len(pixels)), "images")
        return view(pixels, torch.arange(len(pixels), device=pixels.device))[0]

    def data(self, split: str) -> ImageSet:
        return open_split(self.data_settings, split, seed=self.recipe.seed)

    @property
    def data_settings(self) -> DataSettings:
        """The recipe's data section, with the place where its images lay when the run began."""
        return located(self.recipe.data, self.info)


def load(run: str | os.PathLike[str], device: torch.device | str = "cpu") -> Encoder:
    """The trained encoder of a run folder, in eval mode: [N,C,h,w] -> [N,F]. `Run(run).prepare(files)` makes its input,
    with the size and normalisation that it was trained with."""
    try:
        on = torch.device(device)
    except RuntimeError:
        raise UsageError(f"unknown device {device!r}: give cpu, cuda or cuda:N") from None
    return Run(run).encoder(on)
