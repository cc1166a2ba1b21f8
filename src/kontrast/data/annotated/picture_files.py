"""The image files that annotations refer to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kontrast.data.annotated.annotated_images import AnnotatedImages
from kontrast.data.decode import decode_file, read_sides
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
            raise DataError(f"can't read the image {path}: {error.reason}") from None
        if pixels.shape[1:] != tuple(self.sizes[index]):
            given = " x ".join(map(str, pixels.shape[1:]))
            stated = " x ".join(map(str, self.sizes[index]))
            raise DataError(f"{path} has {given} pixels, its annotations are for {stated}: correct them or the image")
        return torch.from_numpy(pixels)


def contained(folder: Path, name: str) -> str:
    """Say why a name from an annotation file can't be used as an image of a folder; "" if it can."""
    parts = Path(name).parts
    if not parts or "\0" in name or Path(name).is_absolute() or ".." in parts:
        return "a file name that leads out of the folder of images"
    try:
        read_sides(str(folder / name))
    except BadImage as error:
        return f"an image that can't be read: {error.reason}"
    return ""


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
