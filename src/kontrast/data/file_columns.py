"""Encoded images as columns of numbers and text instead of one object each: 28 bytes per image beside the names.

The columns may be memory-mapped, so that all ranks of one host share them. Names and paths are made when they are asked
for. Legend: N images, R selected ones.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kontrast.addresses import is_address
from kontrast.counters import mix

CHUNK = 65_536
"""Images whose names and numbers are made at once when all of them are visited."""


TABLE = "\0"
"""Separates the parts of the path of an image in a table; no file's path contains it."""


@dataclass(frozen=True, slots=True)
class Item:
    """One encoded image: a whole file, or `length` bytes of a shard from `offset`. size and mtime reveal a change.

    An object at an address has a hash of its version as its mtime.
    """

    name: str
    path: str
    offset: int = 0
    length: int = -1
    size: int = 0
    mtime: int = 0

    @property
    def is_remote(self) -> bool:
        """Whether the image is an object at an address, or a part of one."""
        return is_address(self.path)

    def stamp_to_check(self, compare: bool = False) -> tuple[int, int] | None:
        """What is compared when the image is read: always of objects and tables, which need it to find their bytes in
        the cache; of files if `compare` is set."""
        return self.stamp if compare or self.is_remote or self.in_table else None

    @property
    def in_table(self) -> bool:
        """Whether the image is in a cell of a table."""
        return TABLE in self.path

    @property
    def stamp(self) -> tuple[int, int]:
        return self.size, self.mtime


def to_bytes(text: str) -> bytes:
    """UTF-8, in which bytes of a file's name that are not UTF-8 stay what they were when they are read again."""
    return text.encode("utf-8", "surrogatepass")


def row_type(count: int) -> type:
    """The smallest integer type for numbers of rows."""
    return np.int32 if count < 2**31 else np.int64


class Texts(Sequence[str]):
    """Strings end to end in one array of bytes.

    Args:
        text: uint8, all strings as UTF-8.
        ends: int64 [N], where each string ends.
    """

    def __init__(self, text: np.ndarray, ends: np.ndarray):
        self.text, self.ends = text, ends

    @classmethod
    def of(cls, texts: Iterable[str]) -> Texts:
        content, ends = bytearray(), array("q")
        for text in texts:
            content += to_bytes(text)
            ends.append(len(content))
        return cls(np.frombuffer(content, np.uint8), np.frombuffer(ends, np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.at(np.arange(len(self))[index])
        return self.at(np.array([range(len(self))[index]]))[0]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), CHUNK):
            yield from self.at(np.arange(start, min(start + CHUNK, len(self))))

    def __eq__(self, other: object) -> bool:
        return same_strings(self, other)

    def at(self, rows: np.ndarray) -> list[str]:
        """The strings at these rows."""
        if not len(rows):
            return []
        ends = self.ends[rows]
        starts = np.where(rows > 0, self.ends[np.maximum(rows, 1) - 1], 0)
        if len(rows) > 1 and bool((starts[1:] == ends[:-1]).all()):  # neighbors: cut them from one string
            block = self.text[starts[0] : ends[-1]].tobytes()
            if block.isascii():
                whole, first = block.decode("ascii"), int(starts[0])
                return [whole[a:b] for a, b in zip((starts - first).tolist(), (ends - first).tolist())]
        text = self.text
        return [text[a:b].tobytes().decode("utf-8", "surrogatepass") for a, b in zip(starts.tolist(), ends.tolist())]


def same_strings(one: Sequence[str], other: object) -> bool:
    """Whether another sequence has the same strings in the same order."""
    if not isinstance(other, Sequence) or isinstance(other, str) or len(one) != len(other):
        return False
    return all(a == b for a, b in zip(one, other))


class Shards(NamedTuple):
    """The archives that hold images: their paths, and size and date of each, int64."""

    paths: list[str]
    size: np.ndarray
    mtime: np.ndarray


@dataclass(frozen=True, eq=False)
class Columns:
    """Where N encoded images are.

    Attributes:
        base: the last part of each name.
        folder: int32 [N], the number of the folder or shard that holds the image.
        first: int64 [N], the size of a file, or where a member of a shard begins.
        second: int64 [N], the date of a file in nanoseconds, or the length of a member of a shard.
        prefixes: what precedes `base` in a name, for each folder or shard.
        root: the folder that names are relative to, for files.
        shards: the archives, for members of shards.
    """

    base: Texts
    folder: np.ndarray
    first: np.ndarray
    second: np.ndarray
    prefixes: Sequence[str]
    root: str = ""
    shards: Shards | None = None

    def names(self, rows: np.ndarray) -> list[str]:
        heads = self._of_folders(self.prefixes, rows)
        return [head + base for head, base in zip(heads, self.base.at(rows))]

    def _of_folders(self, texts: Sequence[str], rows: np.ndarray) -> list[str]:
        """The text of the folder of each row; each text is made once."""
        present, inverse = np.unique(self.folder[rows], return_inverse=True)
        known = texts.at(present) if isinstance(texts, Texts) else [texts[number] for number in present.tolist()]
        return [known[place] for place in inverse.tolist()]

    def numbers(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """int64 [R] each: offset, length, size and mtime, in this order."""
        first, second = self.first[rows], self.second[rows]
        if self.shards is None:
            length = np.full(len(rows), -1, np.int64)
            return {"offset": np.zeros(len(rows), np.int64), "length": length, "size": first, "mtime": second}
        folder = self.folder[rows]
        size, mtime = self.shards.size[folder], self.shards.mtime[folder]
        return {"offset": first, "length": second, "size": size, "mtime": mtime}

    def items(self, rows: np.ndarray) -> list[Item]:
        names = self.names(rows)
        if self.shards is None:
            head = os.path.join(self.root, "")
            paths = [head + name for name in names]
        else:
            paths = self._of_folders(self.shards.paths, rows)
        numbers = [values.tolist() for values in self.numbers(rows).values()]
        return [Item(*fields) for fields in zip(names, paths, *numbers)]


class Items(Sequence[Item]):
    """Encoded images; an `Item` is made when it is asked for. A slice or an array of positions selects some.

    Args:
        columns: where the images are.
        rows: int [R], the rows of the columns that belong to this selection; default: all.
    """

    def __init__(self, columns: Columns, rows: np.ndarray | None = None):
        self.columns, self.rows = columns, rows

    def __len__(self) -> int:
        return len(self.columns.folder) if self.rows is None else len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int | np.integer):
            place = range(len(self))[index]
            return self.columns.items(self._rows(np.array([place])))[0]
        return Items(self.columns, self._rows(np.arange(len(self))[index] if isinstance(index, slice) else index))

    def __iter__(self) -> Iterator[Item]:
        for rows in self.chunks():
            yield from self.columns.items(rows)

    def _rows(self, positions: np.ndarray) -> np.ndarray:
        positions = np.asarray(positions)
        return positions if self.rows is None else self.rows[positions]

    def chunks(self) -> Iterator[np.ndarray]:
        """The rows of all images, some at a time."""
        for start in range(0, len(self), CHUNK):
            yield self._rows(np.arange(start, min(start + CHUNK, len(self))))

    @property
    def names(self) -> Names:
        return Names(self)

    @property
    def stamps(self) -> Stamps:
        return Stamps(self)

    @property
    def folders(self) -> np.ndarray:
        """int32 [R]: the number of the folder or shard of each image."""
        return self.columns.folder if self.rows is None else self.columns.folder[self.rows]

    @property
    def blocks(self) -> np.ndarray:
        """int64 [R]: shards numbered from 0; the files of a folder are one block, since their order on disk is
        unknown."""
        if self.columns.shards is None:
            return np.broadcast_to(np.int64(0), len(self))
        return np.unique(self.folders, return_inverse=True)[1].astype(np.int64)

    @property
    def shard_paths(self) -> list[str]:
        """The archives that hold images of this selection."""
        if self.columns.shards is None:
            return []
        return [self.columns.shards.paths[number] for number in np.unique(self.folders).tolist()]

    def top_folders(self) -> dict[int, str]:
        """The first part of the name of each folder that holds an image, by its number; "" for the root itself."""
        present = np.flatnonzero(np.bincount(self.folders, minlength=len(self.columns.prefixes)))
        prefixes = self.columns.prefixes
        heads = prefixes.at(present) if isinstance(prefixes, Texts) else [prefixes[n] for n in present.tolist()]
        return {number: head.partition("/")[0] for number, head in zip(present.tolist(), heads)}


class Names(Sequence[str]):
    """The names of images, each made when it is asked for."""

    def __init__(self, items: Items):
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        found = self.items[index]
        return found.name if isinstance(found, Item) else Names(found)

    def __iter__(self) -> Iterator[str]:
        for rows in self.items.chunks():
            yield from self.items.columns.names(rows)

    def __eq__(self, other: object) -> bool:
        return same_strings(self, other)

    def __repr__(self) -> str:
        return f"<{len(self):,} names>"


class Stamps:
    """A hash of position, size and date of each image, int64, computed when it is asked for."""

    def __init__(self, items: Items):
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> np.ndarray:
        columns, rows = self.items.columns, self.items._rows(np.arange(len(self))[index])
        stamps = np.zeros(len(rows), dtype=np.uint64)
        for values in columns.numbers(rows).values():
            stamps = mix(stamps ^ values.view(np.uint64))
        return stamps.view(np.int64)

    def select(self, positions: np.ndarray) -> Stamps:
        return Stamps(self.items[positions])


class ColumnWriter:
    """Collects the columns of images and of their folders as they are found, in memory or at the end of files."""

    NAMES = ("base.u8", "ends.i64", "folder.i32", "size.i64", "mtime.i64", "heads.u8", "head_ends.i64", "marks.i64")
    TYPES = (np.uint8, np.int64, np.int32, np.int64, np.int64, np.uint8, np.int64, np.int64)

    def __init__(self) -> None:
        self.count = self.folders = 0
        self._ends = [0, 0]  # bytes of names and of folder names
        self._names: list[bytes] = []
        self._rows: list[tuple[int, int, int, int]] = []
        self._heads: list[bytes] = []
        self._marks: list[tuple[int, int, int, int]] = []
        self.parts: list[list[bytes]] = [[] for _ in self.NAMES]

    def add(self, name: bytes, folder: int, size: int, mtime: int) -> None:
        self._names.append(name)
        self._ends[0] += len(name)
        self._rows.append((self._ends[0], folder, size, mtime))
        self.count += 1

    def add_folder(self, head: str, mark: tuple[int, int, int]) -> int:
        """Add a folder by the beginning of its images' names and return its number; `mark` reveals a change."""
        self._heads.append(to_bytes(head))
        self._ends[1] += len(self._heads[-1])
        self._marks.append((self._ends[1], *mark))
        self.folders += 1
        return self.folders - 1

    def pack(self) -> None:
        """Turn what was added since the last call into bytes of columns."""
        rows = np.array(self._rows, np.int64).reshape(-1, 4)
        marks = np.array(self._marks, np.int64).reshape(-1, 4)
        columns = (rows[:, 0], rows[:, 1].astype(np.int32), rows[:, 2], rows[:, 3])
        packed = [b"".join(self._names), *(c.tobytes() for c in columns), b"".join(self._heads)]
        for part, content in zip(self.parts, [*packed, marks[:, 0].tobytes(), marks[:, 1:].tobytes()]):
            part.append(content)
        self._names, self._rows, self._heads, self._marks = [], [], [], []

    def columns(self, root: str) -> Columns:
        """The columns of everything that was added, in memory."""
        self.pack()
        whole = [np.frombuffer(b"".join(part), kind) for part, kind in zip(self.parts, self.TYPES)]
        return columns_of(whole, root)


def columns_of(arrays: Sequence[np.ndarray], root: str) -> Columns:
    """The columns of files, from arrays in the order of `ColumnWriter.NAMES`."""
    base, ends, folder, size, mtime, heads, head_ends, _ = arrays
    return Columns(Texts(base, ends), folder, size, mtime, Texts(heads, head_ends), root)
