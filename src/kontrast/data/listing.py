"""List the images of a folder, with labels from its sub-folders, before any pixel is read.

Names are paths relative to the root, with "/" between parts. Bytes that are not UTF-8 become surrogates, which JSON
with ASCII escapes preserves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kontrast.data.decode import list_frames
from kontrast.data.dicom_files import require_pydicom
from kontrast.data.file_columns import ColumnWriter, Items, row_type, to_bytes
from kontrast.data.file_columns import Item as Item
from kontrast.data.file_kinds import FILE_KINDS, kinds_to_try
from kontrast.data.folder_walk import Walk
from kontrast.data.limits import BadImage
from kontrast.data.stored_list import STORED_FROM, StoredList, list_into, locked, open_stored
from kontrast.data.video_frames import frame_name, split_frame
from kontrast.errors import DataError, EnvironmentFault, UsageError
from kontrast.operating_system import user_id
from kontrast.registry import nearest

if TYPE_CHECKING:
    from kontrast.data.captions import Captions

TEST_NAMES = ("test", "val", "valid", "validation")
LINKS = "data.follow_links=true follows (pack: --follow-links; embed, probe: give the store that pack then writes)"


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
        stored: the list in the cache that these images are from, which keeps what is computed from it; or None.
        part: which of its images these are.
        unverified: whether the files may have changed since they were listed, so that each must be compared when it
            is read.
        captions: of each image, or None.
        kind: the kind of files that the images are, one of `FILE_KINDS`.
    """

    root: str
    items: Items
    labels: np.ndarray | None = None
    classes: list[str] | None = None
    bad: list[tuple[str, str]] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    source_total: int = 0
    other_bad: Sequence[tuple[str, str]] = ()
    stored: StoredList | None = None
    part: str = "all"
    unverified: bool = False
    captions: Captions | None = None
    kind: str = "pictures"

    @property
    def fingerprint(self) -> str:
        """SHA-256 over names, positions, sizes and dates: changes if a file is added, removed or modified."""
        if self.stored is None:
            return self._fingerprint()
        return self.stored.fact(f"fingerprint of {self.part}", self._fingerprint)

    def _fingerprint(self) -> str:
        digest, columns = hashlib.sha256(), self.items.columns
        for rows in self.items.chunks():
            numbers = [values.tolist() for values in columns.numbers(rows).values()]
            lines = ("\0".join(map(str, fields)) + "\n" for fields in zip(columns.names(rows), *numbers))
            digest.update(to_bytes("".join(lines)))
        if self.labels is not None:
            digest.update(self.labels.astype("<i8").tobytes())
        digest.update(json.dumps(self.classes).encode())
        if self.captions is not None:
            digest.update(self.captions.digest.encode())
        return digest.hexdigest()

    @property
    def stamps(self) -> np.ndarray:
        """int64 [N]: a hash of each item's position, size and date."""
        return self.items.stamps[:]

    def column(self, name: str, kind: Any, make: Callable[[], np.ndarray]) -> np.ndarray:
        """A column that is computed from these images; of a stored list, only once."""
        return make() if self.stored is None else self.stored.derived(f"{name} of {self.part}", kind, make)

    def take(self, positions: np.ndarray, part: str = "") -> Listing:
        """The items at these positions. `part` names them, if the same positions are taken every time."""
        known = replace(self, part=f"{part} of {self.part}") if part else replace(self, stored=None)
        labels = self.labels
        if labels is not None:
            labels = known.column("labels", np.int64, lambda whole=labels: whole[positions])  # type: ignore[misc]
        captions = None if self.captions is None else self.captions.take(positions)
        return replace(known, items=self.items[positions], labels=labels, captions=captions)

    def held_out(self, share: float) -> np.ndarray:
        """The positions of the images that are held out for testing; see `held_out`."""
        kind = row_type(len(self.items))
        groups = np.zeros(len(self.items), np.int64) if self.labels is None else self.labels

        def find() -> np.ndarray:
            divide = held_out_clips if self.kind == "video" else held_out
            return np.flatnonzero(divide(self.items.names, groups, share)).astype(kind)

        return self.column(f"{share!r} held out", kind, find)

    def not_held_out(self, share: float) -> np.ndarray:
        """The positions of all other images."""
        kind = row_type(len(self.items))

        def find() -> np.ndarray:
            return np.delete(np.arange(len(self.items), dtype=kind), self.held_out(share))

        return self.column(f"{share!r} not held out", kind, find)

    def with_own_classes(self) -> Listing:
        """The same items, labelled with their top folders, if there are two or more that contain all images."""
        find = lambda: json.dumps(sorted(set(self.items.top_folders().values()), key=os.fsencode))  # noqa: E731
        classes = json.loads(find() if self.stored is None else self.stored.fact("classes", find))
        return self if len(classes) < 2 or "" in classes else self._with_classes(classes, self.stored)

    def with_classes(self, classes: list[str]) -> Listing:
        """The same items, labeled with the number of their top folder in `classes`."""
        return self._with_classes(classes, None)

    def _with_classes(self, classes: list[str], stored: StoredList | None) -> Listing:
        known = replace(self, classes=classes, stored=stored)

        def labels() -> np.ndarray:
            number = {name: i for i, name in enumerate(classes)}
            of_folder = np.zeros(len(self.items.columns.prefixes), dtype=np.int64)
            for folder, top in self.items.top_folders().items():
                of_folder[folder] = number[top]
            return of_folder[self.items.folders]

        return replace(known, labels=known.column("labels", np.int64, labels))


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
    private = Path(tempfile.gettempdir(), f"kontrast-{user_id()}")
    with contextlib.suppress(OSError):
        private.mkdir(mode=0o700, exist_ok=True)
        if user_id() in (None, private.lstat().st_uid):  # another user could put images into theirs
            return private
    reason = "belongs to another user or can't be created"
    raise EnvironmentFault(f"no cache: this user has no home, and {private} {reason}; set KONTRAST_CACHE")


def scan_folder(
    root: str, follow_links: bool = False, *, verify: bool = True, listed: Callable[[int], None] = lambda count: None,
    files: str = "auto", every: float = 1.0,
) -> Listing:  # fmt: skip
    """List all images under a folder. Its sub-folders are classes if there are two or more that contain all images.

    The list of a large folder is stored in the cache, where the next call finds it.

    Args:
        root: the folder.
        follow_links: whether symbolic links are followed.
        verify: compare every file of a stored list with the folder. With False only the folders are compared, which
            reveals every file that is added or removed; each file must then be compared when it is read.
        listed: called with the number of images that have been found so far.
        files: the kind of files that are images, one of `FILE_KINDS`; "auto": the first kind of which there is one.
        every: seconds between two frames of a video.
    """
    kinds, first = kinds_to_try(files), None
    for kind in kinds:
        found = _scan_kind(root, follow_links, verify, listed, kind, every)
        if len(found.items):
            return found.with_own_classes()
        first = first or found
        if found.bad and kind != "pictures":
            first = found
            break
    assert first is not None
    others = [f"{count} {what}" for what, count in first.notes.items()]
    others += [f"{len(first.bad)} unreadable, the first {first.bad[0][0]} ({first.bad[0][1]})"] if first.bad else []
    hint = f", which {LINKS}" if first.notes.get("links not followed") else ""
    only = f"only {', '.join(others)}{hint}; " if others else ""
    allowed = " ".join(suffix[1:] for kind in kinds for suffix in FILE_KINDS[kind])
    raise DataError(f"no images in {root}: {only}allowed: {allowed}, in upper or lower case and at any depth")


def _scan_kind(
    root: str, follow_links: bool, verify: bool, listed: Callable[[int], None], kind: str, every: float
) -> Listing:
    """List the files of one kind; there may be none."""
    place = None if kind == "video" else _stored_place(root, follow_links, kind)
    stored = None if place is None else open_stored(place, verify)
    if stored is None:
        found = _list_in_memory(root, follow_links, place, kind, every)
        if place is not None and found is None:
            with contextlib.suppress(OSError, ValueError, EnvironmentFault), locked(place):
                stored = open_stored(place, verify)
                stored = stored or list_into(place, os.path.abspath(root), follow_links, listed, FILE_KINDS[kind])
        if stored is None:  # the folder is small, or the cache can't be written
            found = found or _list_in_memory(root, follow_links, None, kind, every)
            assert found is not None
            return _readable(found)
    items, notes = Items(dataclasses.replace(stored.columns, root=root)), dict(stored.notes)
    listing = Listing(root, items, bad=stored.bad, notes=notes, stored=stored, unverified=not verify, kind=kind)
    return _readable(listing)


def _readable(found: Listing) -> Listing:
    """The listing, unless an extra that its files need is missing."""
    if found.kind == "dicom" and len(found.items):
        require_pydicom()
    return found


def _stored_place(root: str, follow_links: bool, kind: str) -> Path | None:
    """Where the cache keeps the list of a folder; None if there is no cache."""
    whole = os.path.abspath(root)
    other = "" if kind == "pictures" else f"\0{kind}"
    digest = hashlib.sha256(to_bytes(f"{whole}\0{follow_links}{other}")).hexdigest()[:16]
    stem = "".join(c if c.isalnum() else "-" for c in os.path.basename(whole))[:40]
    with contextlib.suppress(EnvironmentFault):
        return cache_home() / "lists" / f"{stem}-{digest}"
    return None


def _list_in_memory(
    root: str, follow_links: bool, place: Path | None, kind: str = "pictures", every: float = 1.0
) -> Listing | None:
    """List a folder in memory; None if there are so many images that their list is to be stored at `place`."""
    writer = ColumnWriter()
    walk = Walk(follow_links, writer.add_folder, suffixes=FILE_KINDS[kind])
    if place is not None and os.path.isdir(f"{place}.part"):  # False also if the cache may not be read
        return None  # a listing that was interrupted goes on
    for prefix, number, entry, status in walk.images(root):
        if place is not None and writer.count == STORED_FROM:
            return None
        for name in _image_names(walk, prefix, entry, every) if kind == "video" else (entry.name,):
            writer.add(to_bytes(name), number, status.st_size, status.st_mtime_ns)
    return Listing(root, Items(writer.columns(root)), bad=walk.bad, notes=walk.notes, kind=kind)


def _image_names(walk: Walk, prefix: str, entry: os.DirEntry[str], every: float) -> list[str]:
    """The names of the frames of a video that are images; none if it can't be read, which the walk records."""
    try:
        return [frame_name(entry.name, time) for time in list_frames(entry.path, every)]
    except BadImage as error:
        walk.bad.append((prefix + entry.name, error.reason))
        return []


def held_out(names: Iterable[str], labels: np.ndarray, share: float) -> np.ndarray:
    """bool [N]: which images are held out for testing: the `share` of each class with the lowest hashes of names.

    Adding or removing a file moves at most one other file per class. A class of one image stays in training.
    """
    hashes = (hashlib.sha256(b"0\0" + to_bytes(name)).digest()[:8] for name in names)
    keys = np.fromiter((int.from_bytes(one, "big") for one in hashes), np.uint64, len(labels))
    order = np.lexsort((keys, labels))  # by class, then by hash
    counts = np.unique(labels, return_counts=True)[1]
    mask = np.zeros(len(labels), dtype=bool)
    for start, count in zip((np.cumsum(counts) - counts).tolist(), counts.tolist()):
        mask[order[start : start + min(round(share * count), count - 1)]] = True
    return mask


def held_out_clips(names: Iterable[str], labels: np.ndarray, share: float) -> np.ndarray:
    """bool [N]: which frames are held out for testing: all frames of the videos that `held_out` chooses, because the
    frames of one video are nearly equal."""
    clips: dict[str, int] = {}
    clip_of = np.array([clips.setdefault(split_frame(name)[0], len(clips)) for name in names], np.int64)
    label_of = np.zeros(len(clips), np.int64)
    label_of[clip_of] = labels
    return held_out(clips, label_of, share)[clip_of]
