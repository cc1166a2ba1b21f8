"""The image files that annotations refer to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kontrast.data.annotated.annotated_images import AnnotatedImages, UnreadablePicture
from kontrast.data.decode import decode_file, read_size
from kontrast.data.limits import BadImage
from kontrast.errors import DataError


class FolderPictures:
    """Image files of a folder, decoded when they are needed: `pictures(i)` is uint8 [3,H,W].

    Args:
        folder: the folder.
        names: paths relative to it.
        sizes: the height and width that the annotations give for each image.
    """

    def __init__(self, folder: Path, names: Sequence[str], sizes: Sequence[tuple[int, int]]):
        self.folder, self.names, self.sizes = folder, names, sizes

    def __call__(self, index: int) -> Tensor:
        path = self.folder / self.names[index]
        try:
            pixels = decode_file(str(path))[0]
        except BadImage as error:
            raise UnreadablePicture(path, self.names[index], error.reason) from None
        if problem := other_size(pixels.shape[1:], self.sizes[index]):
            raise UnreadablePicture(path, self.names[index], problem)
        return torch.from_numpy(pixels)


def other_size(given: Sequence[int], stated: Sequence[int]) -> str:
    """Say that an image has another height or width than its annotations state; "" if it has not."""
    if tuple(given) == tuple(stated):
        return ""
    return f"it has {given[0]} x {given[1]} pixels, its annotations are for {stated[0]} x {stated[1]}"


def unusable(folder: Path, name: str, size: tuple[int, int]) -> str:
    """Say why an image that annotations name can't be used, as far as its header shows; "" if it can.

    Args:
        folder: the folder that it must be in.
        name: its path relative to the folder.
        size: the height and width that its annotations are for.
    """
    parts = Path(name).parts
    if not parts or "\0" in name or Path(name).is_absolute() or ".." in parts:
        return "a file name that leads out of the folder of images"
    try:
        return other_size(read_size(str(folder / name)), size)
    except BadImage as error:
        return f"an image that can't be read: {error.reason}"


def write_pictures(images: AnnotatedImages, folder: Path) -> list[str]:
    """Write images as PNG files and return their names."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for i, name in enumerate(images.names):
        names.append(Path(name).with_suffix(".png").name)
        if (folder / names[-1]).exists():
            raise DataError(f"{folder} already has {names[-1]}: choose an empty folder, or give images different names")
        Image.fromarray(images.pixels(i).permute(1, 2, 0).contiguous().numpy()).save(folder / names[-1])
    return names
