"""A run folder opened again: its recipe, its encoder, its images."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from kontrast.config.recipe import DataSettings, Recipe
from kontrast.data import ImageSet
from kontrast.data.decode import decode_file
from kontrast.data.limits import MOST_CHANNELS, BadImage, Form, Limits
from kontrast.errors import CheckpointError, DataError, UsageError, refuse_pickle
from kontrast.files import read_bytes
from kontrast.networks import Encoder
from kontrast.notebook import Printed, html_of_page
from kontrast.registry import nearest
from kontrast.training.build import evaluation_view
from kontrast.training.checkpoints import read_weights, under
from kontrast.training.device import choose_device
from kontrast.training.hub import fetch, is_hub
from kontrast.training.learner import Student, build_student
from kontrast.training.run_folder import RunFolder, sha256, stored_recipe, weights_path
from kontrast.training.splits import located, open_split
from kontrast.training.starting_weights import FILE as START_FILE
from kontrast.training.starting_weights import load_named, read_start
from kontrast.views import Views
from kontrast.views.composite import Composite, ShownImages


class Run(Printed):
    """A run folder: what `kontrast pretrain` wrote. Its files are read when they are needed.

    Every function that takes a run takes either the folder's path or a `Run`, and a `Run` can be used as a path.

    Args:
        path: The run folder, the folder of an exported model (`kontrast export --format hub`), or a model on the
            Hugging Face Hub, "hf://owner/name" or "hf://owner/name@revision", which is downloaded.

    Attributes:
        path: The run folder as a `pathlib.Path`.
        recipe: The resolved recipe that the run was trained by.
        info: The content of run.json: command, device, versions, data, duration.

    Example:
        >>> import kontrast
        >>> run = kontrast.Run("runs/digits")
        >>> print(run)  # doctest: +ELLIPSIS
        runs/digits: nt-xent, small-conv, ...images (192 images), 12 steps
        >>> run.prepare("photo.png").shape
        torch.Size([1, 3, 32, 32])
    """

    def __init__(self, path: str | os.PathLike[str]):
        place = os.fspath(path)
        self.path = fetch(place) if is_hub(place) else Path(place)
        self.folder = RunFolder(self.path)
        refuse_pickle(self.path)
        if not (self.path / "recipe.toml").is_file():
            raise UsageError(f"{self.path} is not a run folder: it has no recipe.toml")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def __str__(self) -> str:
        data, recipe = self.info.get("data", {}), self.recipe
        state = f"{self.info.get('steps')} steps" if self.info.get("finished") else "not finished"
        count = data.get("images")
        images = f"{data.get('name', '?')} ({f'{count:,}' if isinstance(count, int) else '?'} images)"
        return f"{self.path}: {recipe.objective.name}, {recipe.encoder.name}, {images}, {state}"

    def _repr_html_(self) -> str:
        return super()._repr_html_() + html_of_page(self.path / "report.html")

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
        channels = self.info.get("data", {}).get("channels")
        if not isinstance(channels, int) or not 1 <= channels <= MOST_CHANNELS:
            raise CheckpointError(f"{self.path / 'run.json'} is damaged: its data has no number of channels")
        return channels

    @property
    def limits(self) -> Limits:
        """How the recipe's data settings say that image files are decoded."""
        data = self.recipe.data
        form = Form(str(self.info.get("data", {}).get("dtype", "uint8")), self.channels)
        return Limits(
            data.size or None, float_range=data.float_range, longest=data.longest or None,
            form=form if data.depth == "own" else None, layout=data.layout, pages=data.pages,
        )  # fmt: skip

    def untrained(self) -> Student:
        """Return encoder and head with the recipe's random weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.seed)
            return build_student(self.recipe, self.channels)

    def before_training(self) -> Student:
        """Return encoder and head with the weights they had before the first step: random ones or those of `--from`."""
        student = self.untrained()
        if self.recipe.start is not None:
            tensors, path = read_start(self.folder), self.path / START_FILE
            for name, part in (("encoder", student.encoder), ("head", student.head)):
                if own := under(name, tensors):
                    load_named(part, own, path)
        return student

    def encoder(self, device: torch.device | str = "cpu", trained: bool = True) -> Encoder:
        """Return the encoder in eval mode.

        Args:
            device: Where to put it; default: the CPU.
            trained: False gives the encoder with random weights.

        Shape:
            images [N,C,h,w], as `prepare` returns them -> features [N,F].
        """
        encoder = self.untrained().encoder
        if trained:
            encoder.load_state_dict(self._read_weights(encoder.state_dict()))
        return encoder.to(device).eval()

    def _read_weights(self, expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Read encoder.safetensors and check it: the recipe's tensors, finite numbers, the digest in run.json."""
        path = weights_path(self.path)
        weights = read_weights(path)
        if {k: (t.shape, t.dtype) for k, t in weights.items()} != {k: (t.shape, t.dtype) for k, t in expected.items()}:
            problem = "does not fit the run's recipe: it has other tensors"
        elif not all(torch.isfinite(t).all() for t in weights.values()):
            problem = "holds NaN or infinity: its training went wrong"
        elif self.info.get("encoder_sha256") not in (None, self.encoder_digest()):
            problem = "is damaged or was changed: restore it, or remove encoder_sha256 from run.json to use it as it is"
        else:
            return weights
        raise CheckpointError(f"{path} {problem}")

    def encoder_digest(self) -> str:
        """Return the SHA-256 of the encoder's file."""
        path = weights_path(self.path)
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: the run has not finished; resume it first")
        return sha256(read_bytes(path))

    def check_channels(self, images: ImageSet, name: str = "") -> ImageSet:
        """Return the images if they have as many channels as the encoder takes, and values of the same type.

        For an encoder of color images, gray ones get three equal channels, as gray files do when they are decoded.
        """
        given, problem = name or images.name, ""
        gray = images.channels == 1 and isinstance(images.images, torch.Tensor)
        if gray and self.channels == 3 and self.limits.form is None:
            images = replace(images, images=images.images.expand(-1, 3, -1, -1))
        if images.channels != self.channels:
            problem = f"has images of {images.channels} channels, the run's encoder takes {self.channels}"
        elif self.limits.form is not None and images.dtype != getattr(torch, self.limits.made.dtype):
            problem = f"has {images.dtype} values, the run was trained on {self.limits.made.dtype}"
        if problem:
            raise DataError(f"{given} {problem}: give images like those of its training")
        return images

    @property
    def composite(self) -> Composite:
        """What shows images of the run on a screen: the bands of data.bands, stretched if they are not 8-bit."""
        return Composite(self.transform().policies[0], self.recipe.data.bands)

    def shown(self, images: ImageSet) -> ImageSet:
        """The set with its images as a screen can show them."""
        return replace(images, images=ShownImages(images.pictures, self.composite))

    def transform(self) -> Views:
        """Return the view used outside training: center crop, resized and normalized as in training."""
        return evaluation_view(self.recipe)

    def prepare(self, images: Any) -> torch.Tensor:
        """Crop, resize and normalize images as the encoder expects them.

        Args:
            images: One image file or a list of them, of any sizes; or decoded pixels, [N,C,H,W] or [C,H,W], uint8 or
                of the type that the run's images have.

        Returns:
            float32 [N,C,h,w], the same input that `kontrast.embed` gives the encoder.
        """
        view = self.transform()
        if hasattr(images, "ndim"):
            pixels = torch.as_tensor(images)
            pixels = pixels[None] if pixels.ndim == 3 else pixels
            pixels = self.check_channels(ImageSet(pixels, [""] * len(pixels)), "images").images
            return view(pixels, torch.arange(len(pixels), device=pixels.device))[0]
        files = images if isinstance(images, list | tuple) else [images]
        kinds = {type(file).__name__ for file in files if not isinstance(file, str | os.PathLike)}
        if kinds or not files:
            given = ", ".join(kinds) or "no images"
            raise UsageError(f"can't prepare {given}: give image files, or uint8 pixels [N,C,H,W]")
        return torch.cat([view(self.read_image(file)[:], torch.zeros(1, dtype=torch.int64))[0] for file in files])

    def read_image(self, path: str | os.PathLike[str]) -> ImageSet:
        """Decode an image file; a set of one image."""
        name = os.fspath(path)
        try:
            pixels, _ = decode_file(name, limits=self.limits)
        except BadImage as error:
            raise DataError(f"can't read the image {name}: {error.reason}") from None
        return self.check_channels(ImageSet(torch.from_numpy(pixels)[None], [name]), name)

    def data(self, split: str) -> ImageSet:
        """Open the run's own images: "train" or "test"."""
        return open_split(self.data_settings, split, seed=self.recipe.seed)

    @property
    def data_settings(self) -> DataSettings:
        """The recipe's data section, with the absolute path that its images had when the run began."""
        return located(self.recipe.data, self.info)

    def settings_for(self, source: str | None, captions: bool = False) -> DataSettings:
        """Return the data section for other images, whose captions are read only if asked for; None: the run's own."""
        own = self.recipe.data
        if source is None:
            return self.data_settings
        return replace(own, source=source, captions=own.captions if captions or source == own.source else "")


def open_run(run: str | os.PathLike[str], float_range: tuple[float, float] | None = None) -> Run:
    """Return a path or `Run` as a `Run`; `float_range` replaces the recipe's range of float images."""
    opened = run if isinstance(run, Run) and float_range is None else Run(run)
    if float_range is not None:
        opened.recipe = replace(opened.recipe, data=replace(opened.recipe.data, float_range=float_range))
    return opened


BACKBONES = ("encoder", "fpn", "c4")


def load(run: str | os.PathLike[str], device: torch.device | str = "cpu", *, as_: str = "encoder") -> Any:
    """Load the trained encoder of a run, in eval mode.

    Args:
        run: A run folder or a `kontrast.Run`; the folder of an exported model; or a model on the Hugging Face Hub,
            "hf://owner/name" or "hf://owner/name@revision", which needs the extra `hub`.
        device: Where to put the encoder: "cpu" (default), "cuda" or "cuda:N".
        as_: "encoder" (default); or, of a ResNet, the backbone of a detector of your own: "fpn", with a feature pyramid
            whose new layers are random, or "c4", without the last stage. Both have `out_channels`, as torchvision's
            detectors expect, and take images [N,3,H,W] of any size, normalized as in training.

    Returns:
        A `torch.nn.Module` whose `width` is the number of features. Its `prepare(files)` makes its input from image
        files or from uint8 pixels, as `kontrast.Run(run).prepare` does; backbones have none.

    Shape:
        images [N,C,h,w] -> features [N,F].

    Example:
        >>> import kontrast
        >>> encoder = kontrast.load("runs/digits")
        >>> encoder(encoder.prepare("photo.png")).shape
        torch.Size([1, 32])
    """
    if as_ not in BACKBONES:
        raise UsageError(f"as_ = {as_!r}: {nearest(as_, BACKBONES)}")
    opened, on = Run(run), choose_device(str(device))
    if as_ == "encoder":
        encoder: Any = opened.encoder(on)
        encoder.prepare = opened.prepare
        return encoder
    from kontrast.detection.backbones import c4_backbone, fpn_backbone

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(opened.recipe.seed)
        return {"fpn": fpn_backbone, "c4": c4_backbone}[as_](opened.encoder()).to(on).eval()
