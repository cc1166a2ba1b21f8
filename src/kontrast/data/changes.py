"""Which files a set was made of and which of them changed since: a listing small enough for a run's folder."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from kontrast.data.image_set import ImageSet
from kontrast.errors import DataError, printable

SHOWN = 3
LONGEST = 70_000
"""Bytes of a line: a path of 4,096 bytes takes at most six times as many in JSON."""


class Changes(NamedTuple):
    """Names of files, in order."""

    added: list[str]
    removed: list[str]
    modified: list[str]

    def __str__(self) -> str:
        """Counts, and the first names of each: `2 added (a.png, b.png), 1 modified (c.png)`."""
        words = []
        for what, names in self._asdict().items():
            if names:
                shown = ", ".join(printable(name) for name in names[:SHOWN])
                words.append(f"{len(names)} {what} ({shown}{', ...' if len(names) > SHOWN else ''})")
        return ", ".join(words) or "no image, but labels, class names or files that are skipped"


def file_listing(*parts: ImageSet, placed: bool = False) -> bytes | None:
    """A compressed text, a line for each image: 16 hexadecimal digits that stand for its file's place, size and date,
    and its name as JSON. None for sets that were not read from single files. placed: names are relative to the source,
    so that train/1.png and test/1.png are two, and a file that changes parts is one."""
    known = [part for part in parts if part.stamps is not None]
    if not known:
        return None
    lines = "".join(line for part in known for line in _lines(part, placed))
    return gzip.compress(lines.encode("ascii"), 6, mtime=0)


def _lines(part: ImageSet, placed: bool) -> Iterator[str]:
    head = f"{part.place}/" if placed and part.place else ""
    stamps = part.stamps.numpy().view("uint64").tolist()  # type: ignore[union-attr]
    for stamp, name in zip(stamps, part.names, strict=True):
        yield f"{stamp:016x} {json.dumps(head + name)}\n"


def changes(before: bytes, *parts: ImageSet, placed: bool = False) -> Changes:
    """What changed between a listing and the images of today."""
    now = file_listing(*parts, placed=placed)
    if now is None:
        raise DataError(f"{parts[0].name} has no files to compare")
    old, new = _read(before), _read(now)
    return Changes(
        added=[name for name in new if name not in old],
        removed=[name for name in old if name not in new],
        modified=[name for name in new if name in old and old[name] != new[name]],
    )


def _read(listing: bytes) -> dict[str, str]:
    try:
        found = {}
        with gzip.GzipFile(fileobj=io.BytesIO(listing)) as file:
            while line := file.readline(LONGEST):  # a line at a time: a small file may unpack to anything
                found[json.loads(line[17:])] = line[:16].decode("ascii")
        return found
    except (OSError, EOFError, zlib.error, ValueError, TypeError):
        raise DataError("the run's listing of its files is damaged") from None
