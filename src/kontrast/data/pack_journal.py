"""The diary of a packing: pixels are appended chunk by chunk to one file, and after each chunk a line says how far it
reaches and what its SHA-256 is.

A second run reads the lines, checks the pixels, drops what follows the last whole chunk, and goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO

from kontrast.data.decode_workers import Chunk
from kontrast.data.listing import Listing


class Journal:
    """The pixels so far and what is known of them; opening it goes on with a cut packing of the same files."""

    def __init__(self, work: Path, key: str):
        self.work, self.key = work, key
        self.pixels: BinaryIO
        self.lines: list[dict[str, Any]] = []
        work.parent.mkdir(parents=True, exist_ok=True)
        if work.is_dir():
            self.lines = self._read()
            if not self.lines:
                shutil.rmtree(work)
        work.mkdir(exist_ok=True)

    def _read(self) -> list[dict[str, Any]]:
        """The lines whose pixels are there, whole and unchanged, up to the first that are not."""
        good: list[dict[str, Any]] = []
        try:
            text = (self.work / "journal.jsonl").read_text().splitlines()
            if not text or json.loads(text[0]) != {"key": self.key}:
                return []
            with open(self.work / "images.u8", "rb") as file:
                for line in map(json.loads, text[1:]):
                    if hashlib.sha256(file.read(line["bytes"])).hexdigest() != line["sha256"]:
                        break
                    good.append(line)
        except (OSError, ValueError, KeyError):
            pass  # a line that was cut: the chunks before it count
        return good

    def __enter__(self) -> Journal:
        end = sum(line["bytes"] for line in self.lines)
        images = self.work / "images.u8"
        images.touch()
        os.truncate(images, end)
        self.pixels = open(images, "ab")
        self.text = open(self.work / "journal.jsonl", "w")
        self.text.write(json.dumps({"key": self.key}) + "\n")
        for line in self.lines:
            self.text.write(json.dumps(line) + "\n")
        self.text.flush()
        return self

    def append(self, chunk: Chunk) -> None:
        self.pixels.write(chunk.pixels)
        self.pixels.flush()
        line = {
            "bytes": len(chunk.pixels),
            "sha256": hashlib.sha256(chunk.pixels).hexdigest(),
            "sizes": chunk.sizes,
            "kept": chunk.kept,
            "bad": chunk.bad,
            "notes": chunk.notes,
        }
        self.lines.append(line)
        self.text.write(json.dumps(line) + "\n")
        self.text.flush()

    def __exit__(self, *_: object) -> None:
        for file in (self.pixels, self.text):
            os.fsync(file.fileno())
            file.close()

    def bad(self, listing: Listing, chunk: int) -> list[tuple[str, str]]:
        found = [
            (listing.items[n * chunk + position].name, reason)
            for n, line in enumerate(self.lines)
            for position, reason in line["bad"]
        ]
        return listing.bad + found

    def notes(self, listing: Listing) -> dict[str, int]:
        counts = dict(listing.notes)
        for line in self.lines:
            for what, count in line["notes"].items():
                counts[what] = counts.get(what, 0) + count
        return counts

    def kept(self, chunk: int) -> list[int]:
        return [n * chunk + position for n, line in enumerate(self.lines) for position in line["kept"]]

    def chunks(self) -> list[tuple[int, str]]:
        return [(line["bytes"], line["sha256"]) for line in self.lines]
