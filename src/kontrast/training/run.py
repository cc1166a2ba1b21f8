"""A run folder opened again: its recipe, its encoder, its data."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from kontrast.data import ImageSet, imbalance, open_data
from kontrast.data.sources import SOURCES
from kontrast.networks import Encoder
from kontrast.recipes import RECIPE_BYTES
from kontrast.registry import CheckpointError, DataError, EnvironmentFault, UsageError, refuse_pickle
from kontrast.settings import DataSettings, Recipe, parse_toml, read_recipe
from kontrast.training.checkpoints import read_weights
from kontrast.training.folder import RunFolder
from kontrast.training.learner import Student, build_student
from kontrast.training.progress import PackingBar, tell
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
        from kontrast.training.streams import one_image

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


def views_of(recipe: Recipe, count: int, **how: Any) -> Views:
    """Views by the recipe's policy, which leaves alone what lies behind the picture."""
    arguments = {**recipe.views.arguments, "planes": recipe.data.random_bits}
    return Views(recipe.views.policy, count=count, size=recipe.views.size, **how, **arguments)


def evaluation_view(recipe: Recipe, dtype: torch.dtype = torch.float32) -> Views:
    """One view without chance, normalised as the recipe's training views are."""
    trained = views_of(recipe, 1).policies[0]
    return Views(
        "evaluate", count=1, size=recipe.views.size, dtype=dtype, centre_fraction=recipe.evaluation.crop,
        **{name: getattr(trained, name) for name in ("mean", "std", "planes", "colours", "interpolation")},
    )  # fmt: skip


def open_split(
    settings: DataSettings,
    split: str,
    seed: int = 0,
    pretraining: bool = False,
    beside: Sequence[tuple[str, str]] = (),
) -> ImageSet:
    """The images of one split as the recipe's data section asks for them. Its own split and label imbalance are for
    pretraining alone: probes read the whole balanced set. beside: what is bad in the other part, to be judged with
    what is bad in this."""
    from kontrast.data.features import overlay_digits, random_bits

    split = settings.split if pretraining else split
    with PackingBar(f"read {split}") as bar:
        images = open_data(
            settings.source,
            split,
            root=settings.root or None,
            size=settings.size or None,
            test_share=settings.test_share,
            max_bad=settings.max_bad,
            follow_links=settings.follow_links,
            float_range=settings.float_range,
            pack=settings.pack,
            progress=bar,
            beside=beside,
            say=tell,
        )
    if pretraining and settings.imbalance != "none":
        images = images.subset(imbalance(images, settings.imbalance))
    if settings.overlay_digits:
        # Test images wear any digit, as in the paper: few digits are what training has, not what there is to tell.
        unique = None if split == "test" else settings.overlay_digits
        images = overlay_digits(images, unique, seed=seed, root=settings.root or None)
    if settings.random_bits:
        images = random_bits(images, settings.random_bits, seed=seed)
    return images


def place_of(source: str) -> dict[str, str] | None:
    """A folder, a store or shards, with its absolute path; None for a named set."""
    return None if source in SOURCES else {"source": source, "place": os.path.abspath(source)}


def located(settings: DataSettings, info: dict[str, Any]) -> DataSettings:
    """The settings with the place where the run's images lay when it began, if it is still there: from another working
    folder a relative path is another folder, or none."""
    known = info.get("data_place")
    place = known.get("place") if isinstance(known, dict) and known.get("source") == settings.source else None
    if not isinstance(place, str):
        return settings
    whole, pattern, _ = place.partition("{")
    there = os.path.exists(os.path.dirname(whole) if pattern else whole)
    return dataclasses.replace(settings, source=place) if there else settings


def stored_recipe(folder: RunFolder) -> Recipe:
    """The recipe a run wrote: the file's very bytes, so that no flipped bit becomes another learning rate."""
    path = folder / "recipe.toml"
    if path.stat().st_size > RECIPE_BYTES:
        raise CheckpointError(f"{path} is larger than {RECIPE_BYTES} bytes: no run wrote it")
    text = path.read_bytes()
    known = folder.info().get("recipe_sha256")  # a list: a resumed run notes its recipe before it writes it
    if isinstance(known, list) and recipe_digest(text) not in known:
        raise CheckpointError(
            f"{path} is damaged or was edited since the run wrote it (its SHA-256 differs): restore it, or, if the "
            "edit is meant, remove recipe_sha256 from run.json"
        )
    try:
        return read_recipe(parse_toml(text.decode("utf-8"), str(path)), str(path))
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is damaged: not text") from None


def recipe_digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def load(run: str | os.PathLike[str], device: torch.device | str = "cpu") -> Encoder:
    """The trained encoder of a run folder, in eval mode: [N,C,h,w] -> [N,F]. `Run(run).prepare(files)` makes its input,
    with the size and normalisation that it was trained with."""
    try:
        on = torch.device(device)
    except RuntimeError:
        raise UsageError(f"unknown device {device!r}: give cpu, cuda or cuda:N") from None
    return Run(run).encoder(on)


def choose_device(name: str) -> torch.device:
    """auto: CUDA where there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"unknown device {name!r}; allowed: auto, cpu, cuda, cuda:N") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise EnvironmentFault("--device cuda: no usable NVIDIA GPU here; use --device cpu or auto")
        index = device.index if device.index is not None else int(os.environ.get("LOCAL_RANK", 0))
        if index >= torch.cuda.device_count():
            raise EnvironmentFault(f"--device cuda:{index}: this machine has {torch.cuda.device_count()} GPU(s)")
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    if device.type != "cpu":
        raise UsageError(f"--device {name}: kontrast trains on cpu or cuda")
    return device
