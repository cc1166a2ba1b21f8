"""From a spec to what one of its splits holds: decoded images of a named set, or a listing of files."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kontrast.data import official
from kontrast.data.decode import Limits
from kontrast.data.digits import digits
from kontrast.data.imageset import ImageSet
from kontrast.data.listing import TEST_NAMES, Listing, class_folders, entries, held_out, scan_folder
from kontrast.data.shards import is_shards, scan_shards
from kontrast.registry import DataError, Registry, UsageError, nearest

if TYPE_CHECKING:
    from kontrast.data.packing import Progress

SOURCES = Registry("data set")
for _name, _source in {
    "cifar10": official.cifar10,
    "cifar100": official.cifar100,
    "stl10": official.stl10,
    "mnist": official.mnist,
    "fashion-mnist": official.fashion_mnist,
    "imagenet": official.imagenet,
    "imagenet100": official.imagenet100,
}.items():
    SOURCES.register(_name)(_source)
SOURCES.register("digits")(lambda split="train", root=None: _embedded(split))


@dataclasses.dataclass(frozen=True)
class Options:
    """How files are found, decoded and kept. beside: what is bad in the other part of one source; say: for what a
    person should know."""

    root: str | Path | None = None
    test_share: float = 0.2
    max_bad: float = 0.05
    follow_links: bool = False
    pack: bool = True
    progress: Progress | None = None
    workers: int | None = None
    limits: Limits = dataclasses.field(default_factory=Limits)
    beside: Sequence[tuple[str, str]] = ()
    say: Callable[[str], None] | None = None


def _embedded(split: str) -> ImageSet:
    if split not in ("train", "test"):
        raise UsageError(f"digits has no split {split!r}: {nearest(split, ('train', 'test'))}")
    return digits(split)


def find(spec: str, split: str, options: Options) -> tuple[ImageSet | Listing, bool]:
    """What a spec's split holds, decoded or listed, and whether there is a test part."""
    if spec in SOURCES:
        found = SOURCES[spec](split, options.root)
        return (found, found.has_test) if isinstance(found, ImageSet) else (found, True)
    if is_shards(spec) or spec.startswith("pipe:"):
        return _divided(scan_shards(spec), split, options)
    path = Path(spec)
    if not path.is_dir():
        raise DataError(f"no folder {spec!r}{_hint(path)}; or a named set: {', '.join(SOURCES)}")
    train = path / "train"
    tests = [path / name for name in TEST_NAMES if (path / name).is_dir()]
    if train.is_dir() and tests:
        if split not in ("train", "test", *TEST_NAMES):
            raise UsageError(f"{spec} has no split {split!r}: {nearest(split, ('train', 'test'))}")
        part = train if split == "train" else (path / split if (path / split).is_dir() else tests[0])
        listed = scan_folder(str(part), options.follow_links)
        return _with_classes(listed, train, options.follow_links), True
    return _divided(scan_folder(str(train if train.is_dir() else path), options.follow_links), split, options)


def _with_classes(listed: Listing, train: Path, follow_links: bool) -> Listing:
    """The listing with the train part's class numbers, also where a part lacks a class."""
    names = class_folders(str(train), follow_links)
    heads = [item.name.split("/", 1)[0] for item in listed.items if "/" in item.name]
    if listed.labels is None and (len(heads) < len(listed.items) or len(names) < 2):
        return listed
    strange = sorted(set(heads) - set(names))
    if strange:
        raise DataError(
            f"{listed.root} has the class {strange[0]!r}, which {train} has not: {nearest(strange[0], names)}"
        )
    number = {name: i for i, name in enumerate(names)}
    return dataclasses.replace(listed, labels=np.array([number[h] for h in heads], dtype=np.int64), classes=names)


def _divided(listed: Listing, split: str, options: Options) -> tuple[Listing, bool]:
    """A listing without parts: train and test by hash where it has labels, else all of it for training."""
    if split not in ("train", "test", "all"):
        raise UsageError(f"{listed.root} has no split {split!r}: {nearest(split, ('train', 'test', 'all'))}")
    if listed.labels is None or split == "all" or options.test_share == 0:
        if split == "test":
            raise DataError(f"{listed.root} has no test part: give class sub-folders, or the folders train and test")
        return listed, False
    held = held_out([item.name for item in listed.items], listed.labels, options.test_share)
    if split == "test" and not held.any():
        raise DataError(
            f"{listed.root} has no test part: a test_share of {options.test_share:g} holds none of its "
            f"{len(listed.items)} images out; give a larger one, or the folders train and test"
        )
    part = listed.take(np.flatnonzero(held if split == "test" else ~held))
    whole = len(listed.items) + len(listed.bad)
    return dataclasses.replace(part, whole=whole, beside=options.beside), bool(held.any())


def _hint(path: Path) -> str:
    parent, beside = path.parent, []
    with contextlib.suppress(DataError):  # a folder that is not there, or may not be looked into, gives no hint
        beside = [entry.name for entry in entries(str(parent)) if entry.is_dir()][:200]
    close = difflib.get_close_matches(path.name, [*beside, *SOURCES], n=1)
    return f": did you mean {str(parent / close[0]) if close[0] in beside else close[0]!r}?" if close else ""
