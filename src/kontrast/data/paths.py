"""What a data source means: a named data set, a packed store, tar shards or a folder of images.

Every command asks `describe_source`; nothing else decides it.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kontrast.addresses import absolute, bare, is_address
from kontrast.data.folder_walk import class_folders, entries, first_image
from kontrast.data.listing import TEST_NAMES
from kontrast.data.named_sets import SOURCES
from kontrast.data.shards import both_kinds, is_shards, names_shards
from kontrast.data.store import MANIFEST, is_store
from kontrast.data.table_listing import PREFIX, absolute_dataset, names_tables
from kontrast.errors import DataError

Kind = Literal[
    "named", "store", "store split", "shards", "tables", "dataset", "folder", "train folder", "split folder", "missing"
]


@dataclass(frozen=True)
class Source:
    """A data source and what it is.

    Attributes:
        spec: the source as the user wrote it; an address without credentials.
        kind: "named" (a registered data set), "store" (a packed store with its splits), "store split" (one split of a
            store), "shards" (tar files), "tables" (Parquet files), "dataset" (of Hugging Face), "folder" (images,
            perhaps in class sub-folders), "train folder" (a folder whose sub-folder `train` holds the images), "split
            folder" (sub-folders `train` and `test`, `val`, ...), or "missing" (nothing that can be opened).
        tests: the names of the sub-folders of a "split folder" that hold test images.
    """

    spec: str
    kind: Kind
    tests: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return Path(self.spec)

    @property
    def place(self) -> str | None:
        """The absolute path, or the address; None for a named data set."""
        if self.kind == "dataset":
            return absolute_dataset(self.spec)
        return None if self.kind == "named" else absolute(self.spec)

    def inner(self, name: str) -> str:
        """A folder or file inside the source."""
        return os.path.join(self.spec, name)

    @property
    def train(self) -> str:
        """The folder that holds the training images of a folder."""
        return self.inner("train") if self.kind in ("train folder", "split folder") else self.spec

    def unread_folders(self, follow_links: bool = False) -> list[str]:
        """Sub-folders beside `train` that hold images and are not read: `train` may have been meant as a class."""
        if self.kind not in ("train folder", "split folder"):
            return []
        with contextlib.suppress(DataError):  # a sub-folder that can't be listed does not hinder training
            return [n for n in class_folders(self.spec, follow_links) if n not in ("train", *TEST_NAMES)]
        return []


def describe_source(spec: str | os.PathLike[str] | None) -> Source:
    """Decide what a data source is.

    Args:
        spec: a name, a path, a brace pattern of shards, or None for the embedded digits.

    Example:
        >>> describe_source("cifar10").kind, describe_source("images-{000..099}.tar").kind
        ('named', 'shards')
    """
    spec = "digits" if spec is None else bare(os.fspath(spec))
    if spec.startswith(PREFIX):
        return Source(spec, "dataset")
    if is_address(spec):
        return _describe_address(spec)
    path = Path(spec)
    if is_store(path):
        return Source(spec, "store split")
    if is_store(path / "train"):
        return Source(spec, "store")
    if spec in SOURCES:
        return Source(spec, "named")
    if names_tables(spec) or (path.is_dir() and _contains_tables(spec)):
        return Source(spec, "tables")
    if is_shards(spec):
        return Source(spec, "shards")
    if not path.is_dir():
        return Source(spec, "missing")
    if not (path / "train").is_dir():
        return Source(spec, "folder")
    tests = tuple(name for name in TEST_NAMES if (path / name).is_dir())
    return Source(spec, "split folder" if tests else "train folder", tests)


def _contains_tables(spec: str) -> bool:
    """Whether a folder contains Parquet files, itself or in `data`, and no images, which they might describe."""
    places = [place for place in (spec, os.path.join(spec, "data")) if os.path.isdir(place)]
    return any(names_tables(entry.name) for place in places for entry in entries(place)) and first_image(spec) is None


def is_folder(place: str) -> bool:
    """Whether there is a folder at a path, or anything under an address."""
    if not is_address(place):
        return os.path.isdir(place)
    from kontrast.data.remote_listing import list_objects

    return bool(list_objects(place).names)


def _describe_address(spec: str) -> Source:
    """The same for an address, by the names of the objects there."""
    from kontrast.data.remote_listing import image_folders, is_image, list_objects

    if names_tables(spec):
        return Source(spec, "tables")
    if names_shards(spec):
        return Source(spec, "shards")
    names = list_objects(spec).names
    if MANIFEST in names:
        return Source(spec, "store split")
    if f"train/{MANIFEST}" in names:
        return Source(spec, "store")
    picture = next(filter(is_image, names), None)
    archive = next((name for name in names if name.endswith(".tar") and "/" not in name), None)
    if archive is not None and picture is not None:
        raise both_kinds(spec, archive, picture)
    if archive is not None:
        return Source(spec, "shards")
    if picture is None and any(map(names_tables, names)):
        return Source(spec, "tables")
    folders = image_folders(spec)
    if "train" not in folders:
        return Source(spec, "folder" if names else "missing")
    tests = tuple(name for name in TEST_NAMES if name in folders)
    return Source(spec, "split folder" if tests else "train folder", tests)
