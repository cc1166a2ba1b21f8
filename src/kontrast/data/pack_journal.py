"""The journal of a packing, by which an interrupted one continues.

Pixels are appended to one file, chunk by chunk; after each chunk the journal gets a line with its length and SHA-256. A
second process reads the journal, verifies the pixels, drops what follows the last complete chunk, and continues.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

from kontrast.data.decode_workers import Chunk
from kontrast.data.limits import MAX_SIDE, ORDINARY, Form
from kontrast.data.listing import Listing
from kontrast.data.store import PIXELS
from kontrast.files import read_faults, read_json_lines


class Journal:
    """The chunks that have been packed so far. Opening it continues an interrupted packing of the same files.

    Args:
        work: the folder that is being written.
        key: identifies the files and options; a journal with another key is discarded.
        total: the number of all images.
        chunk: the number of images per chunk.
        form: the type and channels of the images.
    """

    def __init__(self, work: Path, key: str, total: int, chunk: int, form: Form = ORDINARY):
        self.work, self.key, self.total, self.chunk, self.form = work, key, total, chunk, form
        self.pixels: BinaryIO
        self.lines: list[dict[str, Any]] = []
        work.parent.mkdir(parents=True, exist_ok=True)
        if work.is_dir():
            self.lines = self._read()
            if not self.lines:
                shutil.rmtree(work)
        work.mkdir(exist_ok=True)

    def _read(self) -> list[dict[str, Any]]:
        """The lines up to the first whose pixels are incomplete or changed."""
        good: list[dict[str, Any]] = []
        wrong_entries = (KeyError, TypeError, ValueError, AttributeError)
        with contextlib.suppress(FileNotFoundError, *wrong_entries), read_faults(self.work):
            lines = read_json_lines(self.work / "journal.jsonl")
            if lines[:1] != [{"key": self.key}]:
                return []
            with open(self.work / PIXELS[self.form.dtype], "rb") as file:
                for number, line in enumerate(lines[1:]):
                    if (
                        not self._is_sound(line, number)
                        or hashlib.sha256(file.read(line["bytes"])).hexdigest() != line["sha256"]
                    ):
                        break
                    good.append(line)
        return good

    def _is_sound(self, line: dict[str, Any], number: int) -> bool:
        """Whether a line is what `append` writes: it accounts for every image of its chunk."""
        kept, bad, sizes, notes = line["kept"], line["bad"], line["sizes"], line["notes"]
        images = min(self.chunk, self.total - number * self.chunk)
        whole = [height * width for height, width in sizes if 0 < height <= MAX_SIDE and 0 < width <= MAX_SIDE]
        return (
            sorted([*kept, *(position for position, _ in bad)]) == list(range(images))
            and kept == sorted(kept)
            and len(whole) == len(sizes) == len(kept)
            and type(line["bytes"]) is int
            and line["bytes"] == self.form.pixel_bytes * sum(whole)
            and all(isinstance(reason, str) for _, reason in bad)
            and all(type(count) is int for count in [*notes.values(), *kept, *itertools.chain(*sizes)])
        )

    def __enter__(self) -> Journal:
        end = sum(line["bytes"] for line in self.lines)
        images = self.work / PIXELS[self.form.dtype]
        images.touch()
        os.truncate(images, end)
        self.pixels = open(images, "ab")
        self.text = open(self.work / "journal.jsonl", "w", encoding="ascii", newline="\n")
        self.text.writelines(json.dumps(line) + "\n" for line in [{"key": self.key}, *self.lines])
        self.text.flush()
        return self

    def append(self, chunk: Chunk) -> None:
        """Write the pixels of a chunk, then its line."""
        self.pixels.write(chunk.pixels)
        self.pixels.flush()
        line = {"bytes": len(chunk.pixels), "sha256": hashlib.sha256(chunk.pixels).hexdigest(), "sizes": chunk.sizes}
        line |= {"kept": chunk.kept, "bad": chunk.bad, "notes": chunk.notes}
        self.lines.append(line)
        self.text.write(json.dumps(line) + "\n")
        self.text.flush()

    def __exit__(self, *_: object) -> None:
        with self.pixels, self.text:
            for file in (self.pixels, self.text):
                os.fsync(file.fileno())

    def bad(self, listing: Listing) -> list[tuple[str, str]]:
        """Names and reasons of all bad images so far."""
        decoded = [
            (listing.items[n * self.chunk + position].name, reason)
            for n, line in enumerate(self.lines)
            for position, reason in line["bad"]
        ]
        return listing.bad + decoded

    def notes(self, listing: Listing) -> dict[str, int]:
        counts = Counter(listing.notes)
        for line in self.lines:
            counts.update(line["notes"])
        return counts

    def kept(self) -> list[int]:
        """Positions of the images that were decoded."""
        return [n * self.chunk + position for n, line in enumerate(self.lines) for position in line["kept"]]

    def chunks(self) -> list[tuple[int, str]]:
        """Length and SHA-256 of each chunk of pixels."""
        return [(line["bytes"], line["sha256"]) for line in self.lines]
