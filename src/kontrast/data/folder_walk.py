"""Visit the images of a folder in the order of their names, as a stream that can go on from any of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kontrast.data.decode import SUFFIXES
from kontrast.errors import DataError, printable

Mark = tuple[int, int, int]
"""What changes if a folder gets or loses an entry: its inode and its dates."""


def mark_of(status: os.stat_result) -> Mark:
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns


@dataclass
class Walk:
    """What is found beside the images, and how the walk goes.

    Attributes:
        follow_links: whether symbolic links are followed.
        enter: called with the prefix of names and the mark of each folder that is visited; returns its number.
        bad: (name, reason) of files that can't be read.
        notes: how many other files, links, ... were left out.
        after: the name of the image after which to go on, which an interrupted walk found last; "" for all.
        suffixes: what the names of images end with, in lower case.
    """

    follow_links: bool = False
    enter: Callable[[str, Mark], int] = lambda prefix, mark: 0
    bad: list[tuple[str, str]] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    after: str = ""
    suffixes: tuple[str, ...] = SUFFIXES
    seen: set[tuple[int, int]] = field(default_factory=set)

    def images(self, root: str) -> Iterator[tuple[str, int, os.DirEntry[str], os.stat_result]]:
        """Every image under the root: the prefix of its name, the number of its folder, its entry and its status.

        Hidden files and run folders are left out; a file or folder that links lead to twice is visited once.
        """
        stack = [self._open("", root, self.after)]
        while stack:
            prefix, number, rest = stack[-1]
            for entry, after in rest:
                status = self._status(prefix, entry) if not after else None
                if after or (status is not None and entry.is_dir()):
                    stack.append(self._open(f"{prefix}{entry.name}/", entry.path, after))
                    break
                if status is not None and entry.is_file():
                    if entry.name.lower().endswith(self.suffixes):
                        yield prefix, number, entry, status
                    else:
                        self.notes["other files"] += 1
            else:
                stack.pop()

    def _open(self, prefix: str, folder: str, after: str) -> tuple[str, int, Iterator[tuple[os.DirEntry[str], str]]]:
        """The prefix and number of a folder, and its entries in order, each with the image inside it to go on from."""
        try:
            status = os.stat(folder)  # before its entries are read: a change while they are read shows in the next mark
        except OSError as error:
            raise _unlisted(folder, error) from None
        self.seen.add((status.st_dev, status.st_ino))
        number = self.enter(prefix, mark_of(status))
        keyed = sorted(((self._key(entry), entry) for entry in images_and_folders(folder)), key=lambda pair: pair[0])
        head, slash, inner = after.partition("/")
        last = os.fsencode(head + slash)
        found = ((e, inner if key == last else "") for key, e in keyed if key > last or (inner and key == last))
        return prefix, number, found

    def _key(self, entry: os.DirEntry[str]) -> bytes:
        """What sorts the entries of a folder as the names of the images inside them sort."""
        is_link = entry.is_symlink()
        is_folder = (self.follow_links and os.path.isdir(entry.path)) if is_link else entry.is_dir()
        return os.fsencode(entry.name) + (b"/" if is_folder else b"")

    def _status(self, prefix: str, entry: os.DirEntry[str]) -> os.stat_result | None:
        """The status of an entry; None if it is left out, which is noted."""
        name = prefix + entry.name
        is_image = name.lower().endswith(self.suffixes)
        if entry.is_symlink() and not self.follow_links:
            if is_image and not os.path.exists(entry.path):
                self.bad.append((name, "dangling link"))
            else:
                self.notes["links not followed"] += 1
            return None
        try:
            status = entry.stat()
        except OSError as error:
            if entry.is_dir(follow_symlinks=False):
                raise _unlisted(entry.path, error) from None
            if is_image:
                self.bad.append((name, f"{error.strerror} ({error.errno})"))
            return None
        if self.follow_links:
            identity = (status.st_dev, status.st_ino)
            if identity in self.seen:
                self.notes["seen twice"] += 1
                return None
            if not entry.is_dir():
                self.seen.add(identity)
        return status


def entries(folder: str) -> list[os.DirEntry[str]]:
    """The entries of a folder. A folder that can't be listed is an error, not a bad image: it may hold any number."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError as error:
        raise _unlisted(folder, error) from None


def _unlisted(folder: str, error: OSError) -> DataError:
    why = f"{error.strerror} ({error.errno})"
    return DataError(f"can't list the folder {printable(folder)}: {why}; make it readable, or move it elsewhere")


def images_and_folders(folder: str) -> list[os.DirEntry[str]]:
    """The entries of a folder without hidden ones; none if it is a run folder."""
    listed = [e for e in entries(folder) if not e.name.startswith(".") and e.name != "__MACOSX"]
    if {"recipe.toml", "run.json"} <= {e.name for e in listed}:  # the pictures of a run folder are not data
        return []
    return listed


def class_folders(root: str, follow_links: bool = False, suffixes: tuple[str, ...] = SUFFIXES) -> list[str]:
    """The names of the sub-folders that contain an image: the classes of a labelled folder."""
    folders = [e for e in images_and_folders(root) if e.is_dir(follow_symlinks=follow_links)]
    return sorted((e.name for e in folders if first_image(e.path, follow_links, suffixes)), key=os.fsencode)


def first_image(root: str, follow_links: bool = False, suffixes: tuple[str, ...] = SUFFIXES) -> str | None:
    """The name of an image under a folder, or None."""
    found = next(Walk(follow_links, suffixes=suffixes).images(root), None)
    return None if found is None else found[0] + found[2].name
