"""List the images of a folder, with labels from its sub-folders, before any pixel is read.

Names are paths relative to the root, with "/" between parts. Bytes that are not UTF-8 become surrogates, which JSON
with ASCII escapes preserves.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kontrast.counters import mix
from kontrast.data.decode import SUFFIXES
from kontrast.errors import DataError, EnvironmentFault, UsageError, printable
from kontrast.registry import nearest

if TYPE_CHECKING:
    from kontrast.data.captions import Captions

TEST_NAMES = ("test", "val", "valid", "validation")
LINKS = "data.follow_links=true follows (pack: --follow-links; embed, probe: give the store that pack then writes)"


@dataclass(frozen=True, slots=True)
class Item:
    """One encoded image: a whole file, or `length` bytes of a shard from `offset`. size and mtime reveal a change."""

    name: str
    path: str
    offset: int = 0
    length: int = -1
    size: int = 0
    mtime: int = 0


@dataclass(frozen=True)
class Listing:
    """Encoded images in a stable order.

    Attributes:
        root: the folder, or the shards as the user wrote them.
        items: N encoded images.
        labels: int64 [N], or None.
        classes: the names of the labels, or None.
        bad: (name, reason) of files that can't be read.
        notes: how many other files, links, ... were left out.
        source_total: for one split of a divided source, the number of all images of the source, else 0.
        other_bad: for one split of a divided source, the images of the other split that are known to be bad.
        captions: of each image, or None.
    """

    root: str
    items: list[Item]
    labels: np.ndarray | None = None
    classes: list[str] | None = None
    bad: list[tuple[str, str]] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    source_total: int = 0
    other_bad: Sequence[tuple[str, str]] = ()
    captions: Captions | None = None

    @property
    def fingerprint(self) -> str:
        """SHA-256 over names, positions, sizes and dates: changes if a file is added, removed or modified."""
        digest = hashlib.sha256()
        for i in self.items:
            digest.update(f"{i.name}\0{i.offset}\0{i.length}\0{i.size}\0{i.mtime}\n".encode("utf-8", "surrogatepass"))
        if self.labels is not None:
            digest.update(self.labels.astype("<i8").tobytes())
        digest.update(json.dumps(self.classes).encode())
        if self.captions is not None:
            digest.update(self.captions.digest.encode())
        return digest.hexdigest()

    @property
    def stamps(self) -> np.ndarray:
        """int64 [N]: a hash of each item's position, size and date."""
        stamps = np.zeros(len(self.items), dtype=np.uint64)
        for part in ("offset", "length", "size", "mtime"):
            values = np.fromiter((getattr(item, part) for item in self.items), np.int64, len(self.items))
            stamps = mix(stamps ^ values.view(np.uint64))
        return stamps.view(np.int64)

    def take(self, positions: np.ndarray) -> Listing:
        """The items at these positions."""
        labels = None if self.labels is None else self.labels[positions]
        captions = None if self.captions is None else self.captions.take(positions)
        return replace(self, items=[self.items[i] for i in positions], labels=labels, captions=captions)

    def with_classes(self, classes: list[str]) -> Listing:
        """The same items, labeled with the number of their top folder in `classes`."""
        number = {name: i for i, name in enumerate(classes)}
        labels = np.array([number[item.name.split("/", 1)[0]] for item in self.items], dtype=np.int64)
        return replace(self, labels=labels, classes=classes)


def check_split(source: str, split: str, allowed: Sequence[str]) -> None:
    """Raise `UsageError` if a source has no such split."""
    if split not in allowed:
        raise UsageError(f"{source} has no split {split!r}: {nearest(split, allowed)}")


def cache_home() -> Path:
    """The folder for packed stores and shard indexes: KONTRAST_CACHE, else the user's cache, else (for a user without a
    home folder, as in some containers) a private folder in the temporary directory."""
    if place := os.environ.get("KONTRAST_CACHE"):
        return Path(place)
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not user.startswith("~"):
        return Path(user, "kontrast")
    private = Path(tempfile.gettempdir(), f"kontrast-{os.getuid()}")
    with contextlib.suppress(OSError):
        private.mkdir(mode=0o700, exist_ok=True)
        if private.lstat().st_uid == os.getuid():  # another user could put images into theirs
            return private
    reason = "belongs to another user or can't be created"
    raise EnvironmentFault(f"no cache: this user has no home, and {private} {reason}; set KONTRAST_CACHE")


def scan_folder(root: str, follow_links: bool = False) -> Listing:
    """List all images under a folder. Its sub-folders are classes if there are two or more that contain all images."""
    found: list[Item] = []
    bad: list[tuple[str, str]] = []
    notes: Counter[str] = Counter()
    for item in _walk(root, follow_links, bad, notes):
        if item.name.lower().endswith(SUFFIXES):
            found.append(item)
        else:
            notes["other files"] += 1
    found.sort(key=lambda item: os.fsencode(item.name))
    if not found:
        others = [f"{count} {what}" for what, count in notes.items()]
        others += [f"{len(bad)} unreadable, the first {bad[0][0]} ({bad[0][1]})"] if bad else []
        hint = f", which {LINKS}" if notes["links not followed"] else ""
        only = f"only {', '.join(others)}{hint}; " if others else ""
        raise DataError(
            f"no images in {root}: {only}"
            f"allowed: {' '.join(s[1:] for s in SUFFIXES)}, in upper or lower case and at any depth"
        )
    listing = Listing(root, found, bad=bad, notes=notes)
    classes = sorted({item.name.split("/", 1)[0] for item in found}, key=os.fsencode)
    if len(classes) < 2 or not all("/" in item.name for item in found):
        return listing
    return listing.with_classes(classes)


def class_folders(root: str, follow_links: bool = False) -> list[str]:
    """The names of the sub-folders that contain an image: the classes of a labelled folder."""
    folders = [e for e in _images_and_folders(root, follow_links) if e.is_dir(follow_symlinks=follow_links)]
    return sorted((e.name for e in folders if first_image(e.path, follow_links)), key=os.fsencode)


def first_image(root: str, follow_links: bool = False) -> str | None:
    """The name of an image under a folder, or None."""
    names = (item.name for item in _walk(root, follow_links, [], Counter()))
    return next((name for name in names if name.lower().endswith(SUFFIXES)), None)


def _walk(root: str, follow_links: bool, bad: list[tuple[str, str]], notes: Counter[str]) -> Iterator[Item]:
    """Every regular file under root that is not hidden; a folder that links lead to twice is visited once."""
    status = os.stat(root)
    seen = {(status.st_dev, status.st_ino)}
    stack = [("", root)]
    while stack:
        prefix, folder = stack.pop()
        for entry in _images_and_folders(folder, follow_links):
            name = prefix + entry.name
            if entry.is_symlink() and not follow_links:
                if name.lower().endswith(SUFFIXES) and not os.path.exists(entry.path):
                    bad.append((name, "dangling link"))
                else:
                    notes["links not followed"] += 1
                continue
            try:
                status = entry.stat()
            except OSError as error:
                if entry.is_dir(follow_symlinks=False):
                    stack.append((name + "/", entry.path))  # the attempt to list it says why it can't be read
                elif name.lower().endswith(SUFFIXES):
                    bad.append((name, f"{error.strerror} ({error.errno})"))
                continue
            identity = (status.st_dev, status.st_ino)
            if follow_links and identity in seen:
                notes["seen twice"] += 1
                continue
            seen.add(identity)
            if entry.is_dir():
                stack.append((name + "/", entry.path))
            elif entry.is_file():
                yield Item(name, entry.path, size=status.st_size, mtime=status.st_mtime_ns)


def entries(folder: str) -> list[os.DirEntry[str]]:
    """The entries of a folder. A folder that can't be listed is an error, not a bad image: it may hold any number."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError as error:
        why = f"{error.strerror} ({error.errno})"
        raise DataError(
            f"can't list the folder {printable(folder)}: {why}; make it readable, or move it elsewhere"
        ) from None


def _images_and_folders(folder: str, follow_links: bool) -> list[os.DirEntry[str]]:
    """The entries of a folder without hidden ones; none if it is a run folder."""
    listed = [e for e in entries(folder) if not e.name.startswith(".") and e.name != "__MACOSX"]
    if {"recipe.toml", "run.json"} <= {e.name for e in listed}:  # the pictures of a run folder are not data
        return []
    if follow_links:  # the order decides which of two links to one file is kept
        listed.sort(key=lambda entry: os.fsencode(entry.name))
    return listed


def held_out(names: list[str], labels: np.ndarray, share: float) -> np.ndarray:
    """bool [N]: which images are held out for testing: the `share` of each class with the lowest hashes of names.

    Adding or removing a file moves at most one other file per class. A class of one image stays in training.
    """
    hashes = (hashlib.sha256(f"0\0{name}".encode("utf-8", "surrogatepass")).digest()[:8] for name in names)
    keys = np.frombuffer(b"".join(hashes), dtype=">u8")
    mask = np.zeros(len(names), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        held = min(round(share * len(members)), len(members) - 1)
        mask[members[np.argsort(keys[members], kind="stable")[:held]]] = True
    return mask
