"""The list of a large folder, kept in the cache as memory-mapped columns, so that the second start is immediate.

    CACHE/lists/NAME-DIGEST/list.json     counts, what was left out, and a random id
                            *.u8, *.i32, *.i64      the columns (`file_columns.ColumnWriter.NAMES`)
                            derived-ID-*  what was computed from the list: labels, digests, which images are held out

It is written in NAME-DIGEST.part; a listing that was interrupted goes on there. A stored list is used only while every
folder still has the inode and the dates that it had when it was listed: a file that is added, removed or renamed
changes its folder's. A file whose content changes does not, so each file is compared too: all at once
(`changed_files`), or each when it is read. Legend: N images, F folders.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kontrast.data.decode import SUFFIXES
from kontrast.data.file_columns import CHUNK, ColumnWriter, columns_of, to_bytes
from kontrast.data.folder_walk import Mark, Walk, mark_of
from kontrast.errors import EnvironmentFault
from kontrast.files import atomic_path, exchange_folder, remove_folder, sync, take_lock, write_atomic

VERSION = 1
STORED_FROM = 50_000
"""Lists of fewer images are made anew every time: that takes a fraction of a second."""
FLUSH_EVERY = 200_000
"""Images between two points from which an interrupted listing can go on."""
SETTLED_AFTER = 2.0
"""Seconds. A folder that changed less than this before it was listed may have changed again with the same date."""


class FolderChanged(Exception):
    """A folder changed while its listing was interrupted."""


class StoredList:
    """A list in the cache; raises `OSError`, `ValueError`, `KeyError` or `TypeError` if there is none or it is damaged.

    Args:
        place: its folder.
    """

    def __init__(self, place: Path):
        self.place = place
        self.facts = json.loads((place / "list.json").read_bytes())
        if self.facts["version"] != VERSION:
            raise ValueError("another version")
        self.root, self.bad = str(self.facts["root"]), [(str(name), str(why)) for name, why in self.facts["bad"]]
        self.notes = Counter({str(what): int(count) for what, count in self.facts["notes"].items()})
        arrays = [_mapped(place / name, kind) for name, kind in zip(ColumnWriter.NAMES, ColumnWriter.TYPES)]
        self.columns, self.marks = columns_of(arrays, self.root), arrays[-1].reshape(-1, 3)
        rows, folders = self.facts["rows"], self.facts["folders"]
        base, heads = self.columns.base, self.columns.prefixes
        if {len(base), len(arrays[2]), len(arrays[3]), len(arrays[4])} != {rows} or len(heads) != len(self.marks):
            raise ValueError("columns of different lengths")
        if not rows or base.ends[-1] != len(base.text) or len(self.marks) != folders or arrays[2].max() >= folders:
            raise ValueError("columns that do not fit together")

    def is_current(self) -> bool:
        """Whether every folder is as it was when it was listed."""
        if not self.facts["settled"]:
            return False
        heads, head = self.columns.prefixes, os.path.join(self.root, "")
        with contextlib.suppress(OSError):
            return all(mark_of(os.stat(head + name)) == tuple(mark) for name, mark in zip(heads, self.marks.tolist()))
        return False

    def changed_files(self) -> bool:
        """Whether any file has another size or date than when it was listed, or is gone."""
        columns, head = self.columns, os.path.join(self.root, "")
        for start in range(0, self.facts["rows"], CHUNK):
            rows = np.arange(start, min(start + CHUNK, self.facts["rows"]))
            sizes, dates = columns.first[rows].tolist(), columns.second[rows].tolist()
            try:
                for name, size, date in zip(columns.names(rows), sizes, dates):
                    status = os.stat(head + name)
                    if status.st_size != size or status.st_mtime_ns != date:
                        return True
            except OSError:
                return True
        return False

    def derived(self, name: str, kind: Any, make: Callable[[], np.ndarray]) -> np.ndarray:
        """A column that was computed from the list once: memory-mapped, or as it is if the cache can't be written."""
        path = self._derived(name)
        with contextlib.suppress(OSError, ValueError):
            return _mapped(path, kind)
        values = np.ascontiguousarray(make(), dtype=kind)
        with contextlib.suppress(OSError, ValueError, EnvironmentFault):
            with atomic_path(path, needed=values.nbytes) as temporary:
                values.tofile(temporary)
            return _mapped(path, kind)
        return values

    def fact(self, name: str, make: Callable[[], str]) -> str:
        """A text that was computed from the list once."""
        path = self._derived(name)
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return path.read_text(encoding="ascii")
        text = make()
        with contextlib.suppress(OSError, EnvironmentFault):
            write_atomic(path, text)
        return text

    def _derived(self, name: str) -> Path:
        return self.place / f"derived-{self.facts['id']}-{hashlib.sha256(to_bytes(name)).hexdigest()[:16]}"

    def drop(self) -> None:
        """Forget the list: the folder is listed anew the next time."""
        with contextlib.suppress(OSError):
            (self.place / "list.json").unlink()


def _mapped(path: Path, kind: Any) -> np.ndarray:
    """A file as a read-only array, which all processes of this host share."""
    if path.stat().st_size == 0:
        return np.empty(0, kind)
    # Nobody writes, but torch warns about read-only memory. A plain view of it is indexed faster.
    return np.memmap(path, dtype=kind, mode="c").view(np.ndarray)


def open_stored(place: Path, verify: bool) -> StoredList | None:
    """The stored list if there is one and the folder has not changed since.

    verify: compare every file, not only every folder.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError):
        found = StoredList(place)
        if found.is_current() and not (verify and found.changed_files()):
            return found
    return None


def list_into(
    place: Path, root: str, follow_links: bool, listed: Callable[[int], None], suffixes: tuple[str, ...] = SUFFIXES
) -> StoredList:
    """List a folder into the cache, from where an interrupted listing stopped. Call it with the lock of `locked`."""
    work = place.with_name(place.name + ".part")
    for attempt in range(2):
        if attempt or follow_links:  # an interrupted walk does not know which links it has followed
            remove_folder(work)
        try:
            return _list_into(place, work, root, follow_links, listed, suffixes)
        except FolderChanged:
            continue
    raise AssertionError("a fresh listing has nothing to go on from")


def _list_into(
    place: Path, work: Path, root: str, follow_links: bool, listed: Callable[[int], None], suffixes: tuple[str, ...]
) -> StoredList:
    journal = _Journal(work)
    walk = Walk(follow_links, journal.enter, journal.bad, journal.notes, journal.after, suffixes)
    for prefix, number, entry, status in walk.images(root):
        journal.writer.add(to_bytes(entry.name), number, status.st_size, status.st_mtime_ns)
        if journal.writer.count % FLUSH_EVERY == 0:
            journal.after = prefix + entry.name
            journal.flush()
            listed(journal.writer.count)
    journal.finish(root)
    listed(journal.writer.count)
    exchange_folder(work, place)
    return StoredList(place)


class _Journal:
    """The columns of a listing that is under way, and how far it is known to be complete."""

    def __init__(self, work: Path):
        self.work, self.writer = work, ColumnWriter()
        self.after, self.notes = "", Counter[str]()
        self.bad: list[tuple[str, str]] = []
        self.started, self.settled = time.time(), True
        self._open: dict[str, tuple[int, Mark]] = {}  # the folders that an interrupted walk had entered and not left
        work.mkdir(parents=True, exist_ok=True)
        try:
            self._resume(json.loads((work / "state.json").read_bytes()))
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            for name in ColumnWriter.NAMES:
                (work / name).write_bytes(b"")

    def _resume(self, state: dict[str, Any]) -> None:
        for name, length in zip(ColumnWriter.NAMES, state["lengths"], strict=True):
            if (self.work / name).stat().st_size < length:
                raise ValueError("cut")
            os.truncate(self.work / name, length)
        columns = columns_of([_mapped(self.work / n, k) for n, k in zip(ColumnWriter.NAMES, ColumnWriter.TYPES)], "")
        marks = _mapped(self.work / "marks.i64", np.int64).reshape(-1, 3)
        for number, prefix in enumerate(columns.prefixes):
            if state["after"].startswith(prefix):
                self._open[prefix] = number, tuple(marks[number].tolist())
        self.writer.count, self.writer.folders = len(columns.folder), len(marks)
        self.writer._ends = [len(columns.base.text), state["lengths"][5]]
        self.after, self.settled = state["after"], state["settled"]
        self.bad, self.notes = [(name, why) for name, why in state["bad"]], Counter(state["notes"])

    def enter(self, prefix: str, mark: Mark) -> int:
        self.settled &= max(mark[1:]) < 1e9 * (time.time() - SETTLED_AFTER)
        known = self._open.pop(prefix, None)
        if known is None:
            return self.writer.add_folder(prefix, mark)
        if known[1] != mark:
            raise FolderChanged
        return known[0]

    def flush(self) -> None:
        """Write what was found to the columns, then the state that says how much of them is complete."""
        self.writer.pack()
        for name, part in zip(ColumnWriter.NAMES, self.writer.parts):
            with open(self.work / name, "ab") as file:
                file.writelines(part)
            part.clear()
        lengths = [(self.work / name).stat().st_size for name in ColumnWriter.NAMES]
        state = {"lengths": lengths, "after": self.after, "bad": self.bad, "notes": self.notes}
        write_atomic(self.work / "state.json", json.dumps({**state, "settled": self.settled}))

    def finish(self, root: str) -> None:
        self.flush()
        facts = {"version": VERSION, "id": uuid.uuid4().hex, "root": root, "settled": self.settled}
        facts |= {"rows": self.writer.count, "folders": self.writer.folders, "bad": self.bad, "notes": self.notes}
        (self.work / "state.json").unlink()
        for name in ColumnWriter.NAMES:
            sync(self.work / name)
        write_atomic(self.work / "list.json", json.dumps(facts))


@contextlib.contextmanager
def locked(place: Path) -> Iterator[None]:
    """One process lists a folder, or copies a store, at a time; the others wait and then find the work done."""
    place.parent.mkdir(parents=True, exist_ok=True)
    handle = take_lock(place.with_name(place.name + ".lock"))
    try:
        yield
    finally:
        os.close(handle)
