"""Images in memory, as a tensor, an array or a map-style dataset, to a packed store that a run can open again."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kontrast.data.decode import pixels_of
from kontrast.data.image_set import ImageSet
from kontrast.data.limits import BadImage
from kontrast.data.listing import held_out
from kontrast.data.store import shape_images
from kontrast.data.store_writer import pack_split
from kontrast.errors import DataError, UsageError

ALLOWED = "allowed: a PIL image, or uint8 [C,H,W], [H,W,C] or [H,W] with 1, 3 or 4 channels, or a tuple (image, label)"


def pack_in_memory(images: Any, folder: Path, *, test_share: float = 0.2) -> Path:
    """Write images that are in memory into a packed store, which `open_data` opens like any other.

    Packing the same images into the same folder again changes nothing; other images replace those that are there.

    Args:
        images: uint8 or uint16 tensor or array [N,C,H,W], or a map-style dataset (`len` and `[i]`) whose items are PIL
            images or uint8 tensors or arrays [C,H,W], [H,W,C] or [H,W], alone or first in a tuple. An int that comes
            second is the label; the dataset's `classes`, if it has them, are the names of the labels.
        folder: where the store is written; created if it does not exist.
        test_share: share of each class that becomes the test split, if every image has a label; 0 for none.

    Returns:
        The folder. It has a `train` split, and a `test` split if the images have labels.

    Example:
        >>> import tempfile, torch, kontrast.data
        >>> images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8)
        >>> store = pack_in_memory(images, tempfile.mkdtemp())
        >>> len(kontrast.data.open_data(store))
        8
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryFile(dir=folder) as spool:  # a dataset may be larger than memory
            _pack(_image_set(images, spool), folder, test_share)
    finally:
        with contextlib.suppress(OSError):  # removes the folder only if nothing was written
            folder.rmdir()
    return folder


def _pack(whole: ImageSet, folder: Path, test_share: float) -> None:
    """Divide the images into splits and write them."""
    splits = {"train": whole}
    if whole.labels is not None:
        held = torch.from_numpy(held_out(whole.names, whole.labels.numpy(), test_share))
        if held.any():
            splits = {"train": whole.subset((~held).nonzero()[:, 0]), "test": whole.subset(held.nonzero()[:, 0])}
    has_test = "test" in splits
    if not has_test:
        shutil.rmtree(folder / "test", ignore_errors=True)
    for split, part in splits.items():
        key = f"{split} {test_share if has_test else 0} {whole.fingerprint}"
        part = replace(part, fingerprint=hashlib.sha256(key.encode()).hexdigest())
        pack_split(part, folder / split, {"name": whole.name, "split": split, "has_test": has_test}, origin=None)


def _image_set(images: Any, spool: Any) -> ImageSet:
    """All images with their labels. The pixels of a dataset go through the file `spool`."""
    if isinstance(images, Tensor | np.ndarray):
        pixels: Any = _tensor(images, "the images are", ("uint8", "uint16"))
        shape, labels, classes = list(images.shape), None, None
        if len(shape) != 4 or 0 in shape or (shape[3] in (1, 3, 4) and shape[1] > 4):
            raise DataError(
                f"the images have the shape {shape}; allowed: [N,C,H,W] with one image or more, "
                "channels before height and width (permute(0,3,1,2) puts them there)"
            )
        digest = hashlib.sha256(str(tuple(pixels.shape)).encode())
        for part in pixels.split(256):
            digest.update(part.numpy().tobytes())
    else:
        pixels, labels, classes, digest = _read_dataset(images, spool)
    digest.update(repr((None if labels is None else labels.tolist(), classes)).encode())
    names = [f"{i:08d}" for i in range(len(pixels))]
    fingerprint = digest.hexdigest()
    return ImageSet(pixels, names, labels, classes, name="images in memory", fingerprint=fingerprint)


def _tensor(pixels: Tensor | np.ndarray, subject: str, allowed: tuple[str, ...] = ("uint8",)) -> Tensor:
    """The same values as a tensor on the CPU; `subject` begins the error if their type is not allowed."""
    kind = str(pixels.dtype).removeprefix("torch.")
    if kind not in allowed:
        raise DataError(
            f"{subject} {kind}; allowed: uint8, 0 to 255. Leave out transforms (kontrast makes the views itself), "
            "or convert values in 0 to 1 with (images * 255).round().to(torch.uint8)"
        )
    if isinstance(pixels, np.ndarray):
        return torch.from_numpy(np.require(pixels, requirements=["C", "W"]))
    return pixels.detach().cpu().contiguous()


def _read_dataset(dataset: Any, spool: Any) -> tuple[Any, Tensor | None, list[str] | None, Any]:
    """Pixels (a tensor if all sizes agree), labels, class names and a digest that has seen the pixels and sizes."""
    sizes: list[tuple[int, int]] = []
    labels: list[int | None] = []
    channels, digest = 0, hashlib.sha256()
    for number, (pixels, label) in enumerate(_items(dataset)):
        channels = channels or len(pixels)
        if len(pixels) != channels:
            raise DataError(f"item {number} has {len(pixels)} channels but item 0 has {channels}")
        content = pixels.numpy().tobytes()
        spool.write(content)
        digest.update(content)
        sizes.append((pixels.shape[1], pixels.shape[2]))
        labels.append(label)
    spool.flush()
    digest.update(repr((channels, sizes)).encode())
    flat = torch.from_numpy(np.memmap(spool, dtype=np.uint8, mode="r+"))
    images = shape_images(flat, torch.tensor(sizes), channels)
    return images, *_classes(labels, getattr(dataset, "classes", None)), digest


def _items(dataset: Any) -> Iterator[tuple[Tensor, int | None]]:
    """Every item as uint8 [C,h,w] and its label."""
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")) or isinstance(dataset, Mapping | str):
        raise UsageError(
            f"data is {type(dataset)}; allowed: a path, a name of a data set, uint8 images [N,C,H,W], or a map-style "
            "dataset of images (with len() and [i])"
        )
    if len(dataset) == 0:
        raise DataError("the dataset is empty: it has 0 items")
    for number in range(len(dataset)):
        item = dataset[number]
        image, given, *_ = (*item, None, None) if isinstance(item, tuple | list) else (item, None)
        yield _pixels(image, number), _label(given)


def _label(given: Any) -> int | None:
    """The label as an int; None if it is something else, such as a mask or a dict of boxes, or negative."""
    if isinstance(given, Tensor) and given.ndim == 0 and not given.is_floating_point():
        given = given.item()
    return int(given) if isinstance(given, int | np.integer) and type(given) is not bool and given >= 0 else None


def _pixels(image: Any, number: int) -> Tensor:
    """uint8 [C,h,w] of an item's image."""
    problem = f"is {type(image)}"
    if isinstance(image, Image.Image):
        try:
            return torch.from_numpy(pixels_of(image)[0])
        except BadImage as error:
            problem = f"can't be used: {error.reason}"
    pixels = torch.empty(0)
    if isinstance(image, Tensor | np.ndarray):
        pixels, problem = _tensor(image, f"item {number} is"), f"has the shape {list(image.shape)}"
        pixels = pixels[None] if pixels.ndim == 2 else pixels
    if pixels.ndim != 3 or 0 in pixels.shape or not {pixels.shape[0], pixels.shape[2]} & {1, 3, 4}:
        raise DataError(f"item {number} {problem}; {ALLOWED}")
    return pixels if pixels.shape[0] in (1, 3, 4) else pixels.permute(2, 0, 1).contiguous()


def _classes(labels: list[int | None], names: Any) -> tuple[Tensor | None, list[str] | None]:
    """Labels and class names, if every image has a label and there are two or more."""
    numbers = [label for label in labels if label is not None]
    if len(numbers) < len(labels) or len(set(numbers)) < 2:
        return None, None
    classes = [str(name) for name in names] if isinstance(names, list | tuple) else []
    if len(classes) <= max(numbers):
        classes = [str(i) for i in range(max(numbers) + 1)]
    return torch.tensor(numbers), classes
