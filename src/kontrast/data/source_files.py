"""From a data source to the images of one of its splits, listed but (except for named sets) not yet decoded."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kontrast.addresses import is_address
from kontrast.data.captions import find_captions, read_captions, with_captions
from kontrast.data.file_kinds import FILE_KINDS
from kontrast.data.folder_walk import class_folders, entries
from kontrast.data.image_set import ImageSet
from kontrast.data.limits import Limits
from kontrast.data.listing import TEST_NAMES, Listing, check_split, scan_folder
from kontrast.data.named_sets import CAPTIONED, SOURCES, data_root
from kontrast.data.paths import Source
from kontrast.data.shards import scan_shards
from kontrast.data.table_listing import scan_dataset, scan_tables, split_of_file, table_files
from kontrast.errors import DataError, UsageError
from kontrast.registry import nearest

ProgressCallback = Callable[[int, int], None]
"""Called with the number of images that are done and the number of all images."""
CHOICES = ("test_share", "max_bad", "follow_links", "captions", "files", "every")
"""Options, besides the limits of decoding, that decide which images of a source go into a store."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How the images of a source are found, decoded and stored; `open_data` explains each option."""

    root: str | Path | None = None
    test_share: float = 0.2
    max_bad: float = 0.05
    follow_links: bool = False
    pack: bool = True
    progress: ProgressCallback | None = None
    workers: int | None = None
    limits: Limits = dataclasses.field(default_factory=Limits)
    other_bad: Sequence[tuple[str, str]] = ()
    say: Callable[[str], None] | None = None
    verify: bool = True
    listed: Callable[[int], None] = lambda count: None
    captions: str = ""
    depth: str = "auto"
    files: str = "auto"
    every: float = 1.0


def find_images(source: Source, split: str, options: Options) -> tuple[ImageSet | Listing, bool]:
    """The images of a split (a listing, or the images themselves for most named sets), and whether there is a test
    split."""
    if source.kind == "named":
        captioned = options.captions and source.spec in CAPTIONED
        found = (CAPTIONED if captioned else SOURCES)[source.spec](split, options.root)
        return found, found.has_test if isinstance(found, ImageSet) else True
    if source.kind == "shards":
        return _divide(scan_shards(source.spec, bool(options.captions)), split, options)
    if source.kind == "tables":
        return _find_in_tables(source, split, options)
    if source.kind == "dataset":
        found, is_split = scan_dataset(source.spec, split, bool(options.captions))
        return (found, True) if is_split else _divide(found, split, options)
    if source.kind == "split folder":
        check_split(source.spec, split, ("train", *TEST_NAMES))
        part = split if split == "train" or split in source.tests else source.tests[0]
        listed = _scan(source.inner(part), options)
        listed = _with_train_classes(listed, source.train, options.follow_links)

        def others() -> list[str]:
            parts = [other for other in ("train", *source.tests) if other != part]
            return [item.name for other in parts for item in _scan(source.inner(other), options).items]

        return _captioned(listed, source, options, f"{part}/", whole=False, others=others), True
    if source.kind in ("folder", "train folder"):
        return _divide(_captioned(_scan(source.train, options), source, options, "train/"), split, options)
    if source.kind in ("store", "store split"):
        raise UsageError(f"{source.spec} is a packed store already: give the images that it was made of")
    if is_address(source.spec):
        raise DataError(f"nothing is found at {source.spec}: check the address, and whose credentials are used")
    raise DataError(f"no folder {source.spec!r}{_suggestion(source.path)}; or a named set: {', '.join(SOURCES)}")


def _find_in_tables(source: Source, split: str, options: Options) -> tuple[Listing, bool]:
    """The images in Parquet files, which may be of several splits by their names."""
    files = table_files(source.spec)
    parts = {part: [path for path in files if split_of_file(path) == part] for part in ("train", *TEST_NAMES)}
    tests = [name for name in TEST_NAMES if parts[name]]
    if not (parts["train"] and tests):
        return _divide(scan_tables(source.spec, files, bool(options.captions)), split, options)
    check_split(source.spec, split, ("train", *TEST_NAMES))
    part = split if parts.get(split) else tests[0]
    return scan_tables(source.spec, parts[part], bool(options.captions)), True


def _scan(folder: str, options: Options) -> Listing:
    return scan_folder(
        folder, options.follow_links, verify=options.verify, listed=options.listed,
        files=options.files, every=options.every,
    )  # fmt: skip


def _captioned(listed: Listing, source: Source, options: Options, prefix: str, **arguments: Any) -> Listing:
    """The listing with the captions of its folder, if they are wanted."""
    if not options.captions:
        return listed
    return with_captions(listed, read_captions(find_captions(source.spec, options.captions)), prefix, **arguments)


def names_folder(source: Source, split: str, found: ImageSet | Listing) -> str:
    """The folder inside the source that image names are relative to; "" for the source itself."""
    if isinstance(found, ImageSet) or source.kind == "named":
        return split
    if source.kind in ("tables", "dataset"):
        return split if split != "all" else ""
    inner = os.path.relpath(found.root, source.spec)
    return "" if inner == "." else inner


def origin_of(source: Source, options: Options) -> dict[str, Any]:
    """What a store's manifest records about its source, so that the store can be packed again from any directory."""
    return {
        "spec": source.place or source.spec,
        "root": os.path.abspath(data_root(options.root)) if source.kind == "named" else None,
        **{key: getattr(options, key) for key in CHOICES},
        "limits": options.limits.facts(),
    }


def options_of(origin: dict[str, Any], options: Options) -> Options:
    """The options that a store was packed with, according to its manifest."""
    try:
        root, follow = origin["root"], origin["follow_links"]
        test_share, max_bad = float(origin["test_share"]), float(origin["max_bad"])
        limits = Limits(**origin["limits"])
        more = {"captions": str(origin.get("captions", "")), "files": str(origin.get("files", "auto"))}
        if isinstance(origin["spec"], str) and isinstance(root, str | None) and isinstance(follow, bool):
            chosen: dict[str, Any] = {"root": root, "follow_links": follow, "limits": limits, **more}
            chosen["every"] = float(origin.get("every", 1.0))
            return dataclasses.replace(options, **chosen, test_share=test_share, max_bad=max_bad)
    except (KeyError, TypeError, ValueError):
        pass
    raise DataError("its manifest does not say how it was packed")


def _with_train_classes(listed: Listing, train: str, follow_links: bool) -> Listing:
    """The listing with the class numbers of the train folder, even if this folder lacks some of the classes."""
    classes = class_folders(train, follow_links, FILE_KINDS[listed.kind])
    folders = set(listed.items.top_folders().values())
    if listed.labels is None and ("" in folders or len(classes) < 2):
        return listed
    unknown = sorted(folders - set(classes))
    if unknown:
        hint = nearest(unknown[0], classes)
        raise DataError(f"{listed.root} has the class {unknown[0]!r}, which {train} does not have: {hint}")
    return listed.with_classes(classes)


def _divide(listed: Listing, split: str, options: Options) -> tuple[Listing, bool]:
    """Divide a listing with labels or captions into train and test by a hash of the names; others are for training."""
    check_split(listed.root, split, ("train", "test", "all"))
    share = options.test_share
    divided = (listed.labels is not None or listed.captions is not None) and split != "all"
    held = listed.held_out(share) if divided else np.empty(0, np.int64)
    if not len(held):
        if split == "test":
            raise DataError(
                f"{listed.root} has no test part: a test_share of {options.test_share:g} holds out none of its "
                f"{len(listed.items)} images; give class sub-folders, a larger share, or the folders train and test"
            )
        return listed, False
    part = listed.take(held if split == "test" else listed.not_held_out(share), f"{split} {share!r}")
    total = len(listed.items) + len(listed.bad)
    return dataclasses.replace(part, source_total=total, other_bad=options.other_bad), True


def _suggestion(path: Path) -> str:
    """A folder or data set with a similar name, as the end of an error message."""
    folders: list[str] = []
    with contextlib.suppress(DataError):
        folders = [entry.name for entry in entries(str(path.parent)) if entry.is_dir()][:200]
    close = difflib.get_close_matches(path.name, [*folders, *SOURCES], n=1)
    return f": did you mean {str(path.parent / close[0]) if close[0] in folders else close[0]!r}?" if close else ""
