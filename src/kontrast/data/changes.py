"""Record which files a run was trained on, and tell which of them have changed since."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from typing import NamedTuple

import numpy as np

from kontrast.data.file_columns import CHUNK
from kontrast.data.image_set import ImageSet
from kontrast.errors import DataError, printable

SHOWN = 3
LONGEST_LINE = 70_000
"""Bytes; a path has at most 4,096, and JSON takes at most six times as many."""


class Changes(NamedTuple):
    """The names of the files that were added, removed or modified."""

    added: list[str]
    removed: list[str]
    modified: list[str]

    def __str__(self) -> str:
        """Counts and first names: `2 added (a.png, b.png), 1 modified (c.png)`."""
        parts = []
        for what, names in self._asdict().items():
            if names:
                shown = ", ".join(printable(name) for name in names[:SHOWN])
                parts.append(f"{len(names)} {what} ({shown}{', ...' if len(names) > SHOWN else ''})")
        return ", ".join(parts) or "only labels, class names or skipped files"


def file_listing(*parts: ImageSet, placed: bool = False) -> bytes | None:
    """Compressed text with a line per image: 16 hexadecimal digits (a hash of the file's position, size and date) and
    the name as JSON. None for images that did not come from files.

    placed: names are relative to the source, which distinguishes train/1.png from test/1.png and recognizes a file
    that moves from one split to the other.
    """
    known = [part for part in parts if part.stamps is not None]
    if not known:
        return None
    content = io.BytesIO()
    with gzip.GzipFile(fileobj=content, mode="wb", compresslevel=6, mtime=0) as out:
        for part in known:
            _write_lines(part, placed, out)
    return content.getvalue()


def _write_lines(part: ImageSet, placed: bool, out: gzip.GzipFile) -> None:
    head = f"{part.place}/" if placed and part.place else ""
    names = iter(part.names)
    for start in range(0, len(part), CHUNK):
        stamps = np.asarray(part.stamps[start : start + CHUNK]).view(np.uint64).tolist()  # type: ignore[index]
        lines = [f"{stamp:016x} {json.dumps(head + name)}\n" for stamp, name in zip(stamps, names)]
        out.write("".join(lines).encode("ascii"))


def changes(before: bytes, *parts: ImageSet, placed: bool = False) -> Changes:
    """Compare an earlier listing with the images of today."""
    old, new = _read(before), _read(file_listing(*parts, placed=placed) or b"")
    return Changes(
        added=[name for name in new if name not in old],
        removed=[name for name in old if name not in new],
        modified=[name for name in new if name in old and old[name] != new[name]],
    )


def _read(listing: bytes) -> dict[str, str]:
    try:
        found = {}
        with gzip.GzipFile(fileobj=io.BytesIO(listing)) as file:
            while line := file.readline(LONGEST_LINE):  # line by line: a small file may unpack to gigabytes
                found[json.loads(line[17:])] = line[:16].decode("ascii")
        return found
    except (OSError, EOFError, zlib.error, ValueError, TypeError):
        raise DataError("files.txt.gz, the list of the run's images, is damaged") from None
