"""An encoder in scikit-learn's manner: `fit` trains it on images without labels, `transform` gives their features.

It has the methods that scikit-learn asks for, without its base class: importing it does not wait for scikit-learn.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kontrast.data import ImageSet
from kontrast.errors import DataError, UsageError
from kontrast.files import atomic_folder, disk_faults
from kontrast.networks import Encoder as Network
from kontrast.probes import extract_features
from kontrast.registry import nearest
from kontrast.runs.image_stream import open_stream
from kontrast.runs.run import Run
from kontrast.training.build import evaluation_view
from kontrast.training.checkpoints import to_safetensors
from kontrast.training.device import choose_device
from kontrast.training.run_folder import sha256


class ImageEncoder:
    """An encoder in scikit-learn's manner, which turns images into features and learns without labels.

    Args:
        recipe: A name that `kontrast recipes` lists, or the path of a .toml file; default: one that suits the images.
        minutes: How long the training may take; default: the recipe's epochs.
        settings: Settings that replace the recipe's, such as {"training.epochs": 5}.
        random_state: The seed, a whole number; default: 0.
        out: A run folder to write and keep; default: none, everything stays in memory.
        device: "auto" (a GPU if there is one), "cpu", "mps", "cuda" or "cuda:N".
        verbose: Whether to print progress.

    Attributes:
        encoder_: The trained network, a torch module; `encoder_.width` is the number of features.
        recipe_: The resolved recipe.
        info_: The facts of its run.json: device, versions, data, duration.

    Images are uint8 or uint16 [N,C,H,W] (a tensor or an array); a folder, shards, a packed store or a named set; or,
    for `fit`, a map-style dataset of images.

    Example:
        >>> import numpy, kontrast
        >>> images = numpy.random.default_rng(0).integers(0, 256, (32, 3, 16, 16), dtype=numpy.uint8)
        >>> tiny = {"encoder.width": 8, "training.batch": 8, "training.max_steps": 2}
        >>> encoder = kontrast.Encoder(settings=tiny, device="cpu").fit(images)
        >>> encoder.transform(images).shape
        (32, 8)
    """

    def __init__(
        self,
        recipe: str | None = None,
        *,
        minutes: float | None = None,
        settings: Mapping[str, Any] | None = None,
        random_state: int = 0,
        out: str | os.PathLike[str] | None = None,
        device: str = "auto",
        verbose: bool = False,
    ):
        self.recipe, self.minutes, self.settings, self.random_state = recipe, minutes, settings, random_state
        self.out, self.device, self.verbose = out, device, verbose

    def fit(self, X: Any, y: Any = None) -> ImageEncoder:
        """Train the encoder on images. Labels `y` are not used; they are there because a Pipeline passes them.

        Args:
            X: The images.
            y: Ignored.
        """
        import kontrast

        settings = {"seed": self.random_state, **(self.settings or {})}
        settings |= {} if self.minutes is None else {"minutes": self.minutes}
        say = print if self.verbose else _silent
        with tempfile.TemporaryDirectory(prefix="kontrast-") as place:
            out = os.path.join(place, "run") if self.out is None else self.out
            run = kontrast.pretrain(X, self.recipe, out=out, device=self.device, say=say, **settings)
            self._take(run)
        return self

    def _take(self, run: Run) -> None:
        """Keep what a run folder has, in memory."""
        self.encoder_: Network = run.encoder()
        self.recipe_, self.info_ = run.recipe, run.info
        self._recipe_text = (run.path / "recipe.toml").read_bytes()

    def transform(self, X: Any) -> np.ndarray:
        """Return the features of images, float32 [N,F], or the data frame that `set_output` asks for.

        Args:
            X: The images. Their sizes may differ from those of training; their channels may not, but gray images suit
                an encoder of color images.
        """
        self._check_fitted()
        images = _source(X)
        if isinstance(images, ImageSet) and not len(images):
            return self._in_container(np.empty((0, self.encoder_.width), np.float32))
        device = choose_device(self.device)
        encoder, view = self.encoder_.to(device), evaluation_view(self.recipe_)
        with tempfile.TemporaryDirectory(prefix="kontrast-") as place:
            stream = open_stream(self._write(Path(place), weights=False), images, say=_silent, max_bad=0.0)
            rows = [torch.empty(0, encoder.width)]
            for batch in stream.batches(0, stream.steps):
                if bad := [*stream.bad, *batch.bad]:
                    raise DataError(f"can't read {bad[0][0]} ({bad[0][1]}): every image needs a row of features")
                rows.append(extract_features(encoder, batch.images, view, device=device))
        return self._in_container(torch.cat(rows).numpy())

    def fit_transform(self, X: Any, y: Any = None) -> np.ndarray:
        """Train on images and return their features.

        Args:
            X: The images.
            y: Ignored.
        """
        return self.fit(X, y).transform(X)

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """Return the names of the features, for scikit-learn.

        Args:
            input_features: Ignored.
        """
        self._check_fitted()
        return np.array([f"encoder{number}" for number in range(self.encoder_.width)], dtype=object)

    def set_output(self, *, transform: str | None = None) -> ImageEncoder:
        """Choose what `transform` returns, for scikit-learn.

        Args:
            transform: "default" for an array, "pandas" or "polars" for a data frame; None changes nothing.
        """
        if transform is not None:
            if transform not in CONTAINERS:
                raise UsageError(f"unknown transform {transform!r}: {nearest(transform, CONTAINERS)}")
            self._sklearn_output_config = {"transform": transform}  # the name by which scikit-learn copies it
        return self

    def _in_container(self, features: np.ndarray) -> Any:
        """Return the features as `set_output` asks, or else as the configuration of scikit-learn does."""
        configured = sys.modules["sklearn"].get_config() if "sklearn" in sys.modules else {}
        chosen = getattr(self, "_sklearn_output_config", {"transform": configured.get("transform_output", "default")})
        names = self.get_feature_names_out()
        if chosen["transform"] == "pandas":
            import pandas

            return pandas.DataFrame(features, columns=names, copy=False)
        if chosen["transform"] == "polars":
            import polars

            return polars.DataFrame(features, schema=names.tolist(), orient="row")
        return features

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the fitted encoder to a new run folder, which `load` and the commands open.

        Args:
            path: The folder. It must not exist yet.
        """
        self._check_fitted()
        path = Path(path)
        if path.exists():
            raise UsageError(f"{path} already exists: give another folder")
        with disk_faults(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(path) as place:
            self._write(place)
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ImageEncoder:
        """Open a folder that `save` or `kontrast pretrain` wrote, as a fitted estimator.

        Args:
            path: The folder.
        """
        run = Run(path)
        found = cls(random_state=run.recipe.seed)
        if (run.path / "estimator.json").is_file():
            found.set_params(**_read_parameters(run.path / "estimator.json", found))
        found._take(run)
        return found

    def _write(self, place: Path, weights: bool = True) -> Run:
        """Write a run folder; without its weights, it is enough to read images as in training."""
        info = dict(self.info_)
        (place / "recipe.toml").write_bytes(self._recipe_text)
        if weights:
            content = to_safetensors(self.encoder_.state_dict())
            (place / "encoder.safetensors").write_bytes(content)
            info |= {"encoder_sha256": sha256(content)}
            kept = {name: value for name, value in self.get_params().items() if name != "out"}
            (place / "estimator.json").write_text(
                json.dumps({"version": 1, "parameters": kept}, default=_plain), "ascii"
            )
        (place / "run.json").write_text(json.dumps(info), "ascii")
        return Run(place)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the arguments of the constructor by name.

        Args:
            deep: There are no nested estimators, so it changes nothing.
        """
        return {name: getattr(self, name) for name in _parameters(type(self))}

    def set_params(self, **params: Any) -> ImageEncoder:
        """Set arguments of the constructor.

        Args:
            **params: The new values by name.
        """
        known = _parameters(type(self))
        for name, value in params.items():
            if name not in known:
                raise UsageError(f"Invalid parameter {name!r} for estimator {self!r}: allowed are {', '.join(known)}")
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        changed = [
            f"{name}={getattr(self, name)!r}"
            for name, default in _parameters(type(self)).items()
            if getattr(self, name) is not default and getattr(self, name) != default
        ]
        return f"Encoder({', '.join(changed)})"

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "encoder_")

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import InputTags, Tags, TargetTags, TransformerTags

        images = InputTags(two_d_array=False)
        return Tags(None, TargetTags(required=False), TransformerTags(preserves_dtype=[]), input_tags=images)

    def _check_fitted(self) -> None:
        if not self.__sklearn_is_fitted__():
            from sklearn.exceptions import NotFittedError

            raise NotFittedError("This Encoder instance is not fitted yet: call fit(images), or Encoder.load(folder)")


ImageEncoder.__name__ = ImageEncoder.__qualname__ = "Encoder"  # how users know it; networks.Encoder is the bare network
Encoder = ImageEncoder


CONTAINERS = ("default", "pandas", "polars")


def _plain(value: Any) -> Any:
    """Return what JSON doesn't know as what it knows: numpy's numbers and arrays as Python's, all else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _silent(_: str) -> None:
    pass


def _parameters(kind: type) -> dict[str, Any]:
    """Return the arguments of the constructor with their defaults."""
    arguments = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    return {name: argument.default for name, argument in arguments.items() if name != "self"}


def _read_parameters(path: Path, estimator: ImageEncoder) -> dict[str, Any]:
    """Return the parameters that `save` wrote, as far as this version knows them."""
    from kontrast.files import read_json

    tree = read_json(path)
    given = tree.get("parameters") if isinstance(tree, dict) else None
    return {name: value for name, value in (given or {}).items() if name in estimator.get_params()}


ENCODED = ("uint8", "uint16")
"""The types of values that images in memory can have."""


def _source(images: Any) -> str | ImageSet:
    """Return what `open_stream` takes: a place, or an image set of pixels."""
    if isinstance(images, ImageSet):
        return images
    if isinstance(images, str | os.PathLike):
        return os.fspath(images)
    kind = f"{getattr(images, 'dtype', type(images).__name__)} {list(getattr(images, 'shape', []))}"
    if (
        not hasattr(images, "ndim")
        or images.ndim != 4
        or str(images.dtype).rpartition(".")[2] not in ("uint8", "uint16")
    ):
        raise DataError(f"can't encode {kind}: give uint8 images [N,C,H,W], or a folder or the name of a data set")
    pixels = images if torch.is_tensor(images) else torch.from_numpy(np.require(images, requirements=["C", "W"]))
    return ImageSet(pixels.cpu(), [str(number) for number in range(len(pixels))], name="images in memory")
