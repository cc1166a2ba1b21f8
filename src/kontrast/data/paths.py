"""What a data source means: a named data set, a packed store, tar shards or a folder of images.

Every command asks `describe_source`; nothing else decides it.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kontrast.data.folder_walk import class_folders
from kontrast.data.listing import TEST_NAMES
from kontrast.data.named_sets import SOURCES
from kontrast.data.shards import is_shards
from kontrast.data.store import is_store
from kontrast.errors import DataError

Kind = Literal["named", "store", "store split", "shards", "folder", "train folder", "split folder", "missing"]


@dataclass(frozen=True)
class Source:
    """A data source and what it is.

    Attributes:
        spec: the source as the user wrote it.
        kind: "named" (a registered data set), "store" (a packed store with its splits), "store split" (one split of a
            store), "shards" (tar files), "folder" (images, perhaps in class sub-folders), "train folder" (a folder
            whose sub-folder `train` holds the images), "split folder" (sub-folders `train` and `test`, `val`, ...), or
            "missing" (nothing that can be opened).
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
        """The absolute path; None for a named data set."""
        return None if self.kind == "named" else os.path.abspath(self.spec)

    @property
    def train(self) -> Path:
        """The folder that holds the training images of a folder."""
        return self.path / "train" if self.kind in ("train folder", "split folder") else self.path

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
    spec = "digits" if spec is None else os.fspath(spec)
    path = Path(spec)
    if is_store(path):
        return Source(spec, "store split")
    if is_store(path / "train"):
        return Source(spec, "store")
    if spec in SOURCES:
        return Source(spec, "named")
    if is_shards(spec):
        return Source(spec, "shards")
    if not path.is_dir():
        return Source(spec, "missing")
    if not (path / "train").is_dir():
        return Source(spec, "folder")
    tests = tuple(name for name in TEST_NAMES if (path / name).is_dir())
    return Source(spec, "split folder" if tests else "train folder", tests)
