"""Images that stay encoded, in files or shards, and are decoded as batches need them: sets larger than memory and disk.

Legend: N images of 3 channels, h x w pixels each, B of them asked for at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kontrast.data.decode import BadImage, Limits, decode_file
from kontrast.data.decode_workers import Chunk, Decoders, answer
from kontrast.data.image_set import pad, square
from kontrast.data.listing import Item, Listing
from kontrast.data.store_writer import judge
from kontrast.errors import DataError, EnvironmentFault, printable

PIECE = 32
"""A worker gets at most this many images at once."""
GONE = 3
"""As many failures of the system in a row from one mount are the mount's, not the files'."""
SAMPLED = 33


class Reader:
    """What all selections of one source share: its decoders, and the account of what could not be read."""

    def __init__(self, listing: Listing, limits: Limits, max_bad: float, workers: int | None = None):
        self.listing, self.root, self.limits, self.max_bad = listing, listing.root, limits, max_bad
        self.total = len(listing.items) + len(listing.bad)
        self.bad = list(listing.bad)
        self.known: set[str] = set()
        self.checked = len(self.bad)
        self.decoders = Decoders(limits, workers)
        self.failed: dict[int, list[str]] = {}
        self.mounts = {place: _device(place) for place in {os.path.dirname(path) for path in _containers(listing)}}

    def judge(self, item: Item, reason: str, lost: bool = False) -> None:
        """Count what became of an image ("" for good), in the order of asking; stop where it is too much.

        Files that the system can't read count as bad from the next one on that it can: till then it may be the mount.
        """
        mount = self.mounts.get(os.path.dirname(item.path), 0)
        if reason and item.name not in self.known:
            self.known.add(item.name)
            self.bad.append((item.name, reason))
        if lost:
            names = self.failed.setdefault(mount, [])
            names.append(item.name)
            if len(names) >= GONE:
                raise EnvironmentFault(
                    f"{len(names)} files in a row can't be read from {os.path.dirname(item.path)} ({reason}; "
                    f"{', '.join(printable(name) for name in names)}): storage gone? resume when it is back"
                )
            return
        self.failed.pop(mount, None)
        self.check()

    def learn(self, bad: Iterable[tuple[str, str]]) -> None:
        """Names and reasons of images that others (ranks) could not read count here too."""
        there = {name for name, _ in self.bad}
        fresh = {name: reason for name, reason in bad if name not in there}
        self.known.update(fresh)
        self.bad += fresh.items()

    def check(self) -> None:
        """Stop where too much is bad."""
        if len(self.bad) > self.checked:
            self.checked = len(self.bad)
            judge(self.listing, self.bad, self.max_bad)


def _containers(listing: Listing) -> Iterable[str]:
    """Where mounts are told apart: the shards, or the root of a folder, which a file's own folder falls back to."""
    shards = {item.path for item in listing.items if item.length >= 0}
    return shards or [os.path.join(listing.root, "")]


def _device(place: str) -> int:
    return os.stat(place or ".").st_dev


class Asked:
    """Images on their way: for each piece, which rows of the batch it holds."""

    def __init__(self, items: list[Item], pieces: list[tuple[list[int], Future[Chunk]]]):
        self.items, self.pieces = items, pieces


class Lazy:
    """Pictures that are decoded at every access, by background processes; otherwise like `Ragged`.

    lazy[3] is image 3 as it is, [3,h,w]; a slice or index tensor gives centre squares [B,3,side,side]; `padded` keeps
    every pixel. An image that can't be read is counted, and the next readable one of its class stands in for it; a
    `Feeder`, which may change what is in a batch, takes another image with its own label instead.
    """

    def __init__(self, items: Sequence[Item], reader: Reader, labels: np.ndarray | None, blocks: np.ndarray):
        self.items, self.reader, self.labels, self.blocks = items, reader, labels, blocks

    @classmethod
    def of(cls, listing: Listing, limits: Limits, max_bad: float, workers: int | None = None) -> Lazy:
        """blocks number the shards; the files of a folder are one block: their order on disk is not known."""
        numbers: dict[str, int] = {}
        shards = (numbers.setdefault(i.path, len(numbers)) if i.length >= 0 else 0 for i in listing.items)
        blocks = np.fromiter(shards, dtype=np.int64, count=len(listing.items))
        return cls(listing.items, Reader(listing, limits, max_bad, workers), listing.labels, blocks)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, int):
            position = range(len(self))[index]
            image = self.read(position)
            return image if image is not None else self._stand_in(position)
        return self.squares(torch.arange(len(self))[index], self.side)

    @property
    def total(self) -> int:
        """All images of the source, good and bad: what is bad is only known once it was asked for."""
        return self.reader.total

    @cached_property
    def side(self) -> int:
        """The median of the shorter sides, of a sample."""
        count = min(SAMPLED, len(self))
        images = self.answer(self.ask(torch.arange(count) * len(self) // count))
        sides = sorted(min(image.shape[1:]) for image in images if image is not None)
        if not sides:
            raise DataError(f"none of {count} images tried in {self.reader.root} could be read: {self.reader.bad[-1]}")
        return sides[len(sides) // 2]

    def squares(self, indices: Tensor, side: int) -> Tensor:
        """uint8 [B,3,side,side]: the centre square of each image, resized."""
        out = torch.empty(len(indices), 3, side, side, dtype=torch.uint8)
        for row, image in enumerate(self.several(indices)):
            out[row] = square(image, side)
        return out

    def padded(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 [B,3,Hmax,Wmax], each image in the upper left corner, zero beyond; and sizes int64 [B,2]."""
        return pad(self.several(indices))

    def select(self, indices: Tensor) -> Lazy:
        rows = indices.numpy()
        labels = None if self.labels is None else self.labels[rows]
        return Lazy([self.items[i] for i in rows], self.reader, labels, self.blocks[rows])

    def read(self, position: int) -> Tensor | None:
        """uint8 [3,h,w], decoded here and now; None, and counted, where it can't be read."""
        item = self.items[position]
        if item.name in self.reader.known:
            return None
        try:
            pixels, _ = decode_file(item.path, item.offset, item.length, self.reader.limits)
        except BadImage as error:
            self.reader.judge(item, error.reason, error.errno is not None)
            return None
        self.reader.judge(item, "")
        return torch.from_numpy(pixels)

    def ask(self, indices: Tensor) -> Asked:
        """Start decoding in the background, in the order in which the bytes lie in their files."""
        items, decoders = [self.items[i] for i in indices.tolist()], self.reader.decoders
        rows = [row for row, item in enumerate(items) if item.name not in self.reader.known]
        rows.sort(key=lambda row: (items[row].path, items[row].offset))
        size = max(1, min(PIECE, -(-len(rows) // decoders.workers)))
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        return Asked(items, [(part, decoders.submit([items[row] for row in part])) for part in parts])

    def answer(self, asked: Asked) -> list[Tensor | None]:
        """The images, uint8 [3,h,w] each, in the order they were asked for; None where one can't be read."""
        images: list[Tensor | None] = [None] * len(asked.items)
        for rows, future in asked.pieces:
            chunk = answer(future, [asked.items[row] for row in rows], self.reader.decoders)
            flat, start = torch.frombuffer(bytearray(chunk.pixels or b"\0"), dtype=torch.uint8), 0
            for position, (height, width) in zip(chunk.kept, chunk.sizes, strict=True):
                images[rows[position]] = flat[start : start + 3 * height * width].view(3, height, width)
                start += 3 * height * width
            reasons = dict(chunk.bad)
            for position, row in enumerate(rows):
                self.reader.judge(asked.items[row], reasons.get(position, ""), position in chunk.lost)
        return images

    def several(self, indices: Tensor) -> list[Tensor]:
        """Each image as it is, [3,h,w], or what stands in for it."""
        found = zip(indices.tolist(), self.answer(self.ask(indices)), strict=True)
        return [self._stand_in(position) if image is None else image for position, image in found]

    def _stand_in(self, position: int) -> Tensor:
        """The next readable image of the same class, or of all where there are no labels or it has none."""
        after = np.roll(np.arange(len(self)), -position - 1)[:-1]
        if self.labels is not None:
            after = after[np.argsort(self.labels[after] != self.labels[position], kind="stable")]
        for other in after.tolist():
            image = self.read(other)
            if image is not None:
                return image
        raise DataError(f"none of {len(self)} images in {self.reader.root} can be read")
