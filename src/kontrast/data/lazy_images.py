"""Images that stay encoded in files or shards and are decoded for every batch: for sets larger than memory and disk.

Legend: N images of C channels and h x w pixels each, B images of a batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kontrast.data.bad_images import check_listing, none_readable
from kontrast.data.decode import ChangedFile, decode_file
from kontrast.data.decode_workers import Chunk, Decoders, wait_for
from kontrast.data.file_columns import Item, Items
from kontrast.data.image_set import VariedImages
from kontrast.data.limits import BadImage, Limits
from kontrast.data.listing import Listing
from kontrast.errors import DataError, EnvironmentFault, printable

PIECE = 32
"""A worker gets at most this many images at a time."""
MAX_READ_ERRORS = 3
"""After this many read errors in a row, the storage is taken to be gone rather than the files to be bad."""
SAMPLED = 33


class Reader:
    """The decoders of a source and the record of its bad images, shared by all selections of the source."""

    def __init__(self, listing: Listing, limits: Limits, max_bad: float, workers: int | None = None):
        self.listing, self.root, self.limits, self.max_bad = listing, listing.root, limits, max_bad
        self.total = len(listing.items) + len(listing.bad)
        self.compare = listing.unverified
        self.bad = list(listing.bad)
        self.known: set[str] = set()
        self.checked = len(self.bad)
        self.decoders = Decoders(limits, workers, compare=listing.unverified)
        self.failed: dict[int, list[str]] = {}
        shards = {os.path.dirname(path) for path in listing.items.shard_paths}
        self.mounts = {place: os.stat(place or ".").st_dev for place in shards}  # a folder counts as one mount, 0

    def record(self, item: Item, reason: str, lost: bool = False) -> None:
        """Record that an image was read ("") or why not; raise an error if too many are bad.

        lost: the operating system could not read the file. Such files are not held against `max_bad` until another file
        of the same mount can be read: the whole mount may be gone.
        """
        mount = self.mounts.get(os.path.dirname(item.path), 0)
        if reason and item.name not in self.known:
            self.known.add(item.name)
            self.bad.append((item.name, reason))
        if lost:
            names = self.failed.setdefault(mount, [])
            names.append(item.name)
            if len(names) >= MAX_READ_ERRORS:
                raise EnvironmentFault(
                    f"{len(names)} files in a row can't be read from {os.path.dirname(item.path)} ({reason}; "
                    f"{', '.join(printable(name) for name in names)}): storage gone? resume when it is back"
                )
            return
        self.failed.pop(mount, None)
        self.check()

    def refuse_changed(self, item: Item) -> None:
        """Raise `DataError` about a file that is not the one that was listed, and forget the stored list."""
        if self.listing.stored is not None:
            self.listing.stored.drop()
        raise DataError(
            f"{printable(item.name)} was modified after {self.root} was listed; repeat the command (pretrain: with "
            "--resume), which then lists the folder anew and says what changed"
        )

    def add_bad(self, bad: Iterable[tuple[str, str]]) -> None:
        """Add names and reasons of images that other ranks could not read."""
        there = {name for name, _ in self.bad}
        fresh = {name: reason for name, reason in bad if name not in there}
        self.known.update(fresh)
        self.bad += fresh.items()

    def check(self) -> None:
        """Raise `DataError` if too many images are bad."""
        if len(self.bad) > self.checked:
            self.checked = len(self.bad)
            check_listing(self.listing, self.bad, self.max_bad)


class PendingBatch(NamedTuple):
    """A batch that is being decoded: its items, and for each piece the rows of the batch and their future pixels."""

    items: list[Item]
    pieces: list[tuple[list[int], Future[Chunk]]]


class LazyImages(VariedImages):
    """Images that background processes decode at every access; indexed like `RaggedImages`.

    An image that can't be read is recorded and replaced by the next readable one of its class. (A `Feeder` instead
    replaces it by another image with that image's own label.)

    Args:
        items: where the N encoded images are.
        reader: decodes them; shared by all selections of one source.
        labels: int64 [N], or None.
        blocks: int64 [N], the number of the shard that holds each image.
    """

    def __init__(self, items: Items, reader: Reader, labels: np.ndarray | None, blocks: np.ndarray):
        self.items, self.reader, self.labels, self.blocks = items, reader, labels, blocks

    @classmethod
    def of(cls, listing: Listing, limits: Limits, max_bad: float, workers: int | None = None) -> LazyImages:
        """All images of a listing."""
        reader = Reader(listing, limits, max_bad, workers)
        return cls(listing.items, reader, listing.labels, listing.items.blocks)

    def __len__(self) -> int:
        return len(self.items)

    def image_at(self, index: int) -> Tensor:
        """[C,h,w]: the image, or its substitute."""
        image = self.read(index)
        return image if image is not None else self._substitute(index)

    @property
    def total(self) -> int:
        """How many images the source has, including bad ones."""
        return self.reader.total

    @cached_property
    def side(self) -> int:
        """The median of the shorter sides of a sample."""
        count = min(SAMPLED, len(self))
        images = self.collect(self.submit(torch.arange(count) * len(self) // count))
        sides = sorted(min(image.shape[1:]) for image in images if image is not None)
        if not sides:
            raise none_readable(self.reader.bad[-count:], self.reader.root)
        return sides[len(sides) // 2]

    def select(self, indices: Tensor) -> LazyImages:
        rows = indices.numpy()
        labels = None if self.labels is None else self.labels[rows]
        blocks = self.blocks[rows] if self.blocks.strides[0] else np.broadcast_to(self.blocks[:1], len(rows))
        return LazyImages(self.items[rows], self.reader, labels, blocks)

    def read(self, position: int) -> Tensor | None:
        """[C,h,w], decoded in this process; None if it can't be read, which is recorded."""
        item = self.items[position]
        if item.name in self.reader.known:
            return None
        try:
            stamp = (item.size, item.mtime) if self.reader.compare else None
            pixels, _ = decode_file(item.path, item.offset, item.length, self.reader.limits, stamp)
        except ChangedFile:
            self.reader.refuse_changed(item)
        except BadImage as error:
            self.reader.record(item, error.reason, error.errno is not None)
            return None
        self.reader.record(item, "")
        return torch.from_numpy(pixels)

    def submit(self, indices: Tensor) -> PendingBatch:
        """Start decoding in the background, in the order of the bytes in their files."""
        items, decoders = list(self.items[indices.numpy()]), self.reader.decoders
        rows = [row for row, item in enumerate(items) if item.name not in self.reader.known]
        rows.sort(key=lambda row: (items[row].path, items[row].offset))
        size = max(1, min(PIECE, -(-len(rows) // decoders.workers)))
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        return PendingBatch(items, [(part, decoders.submit([items[row] for row in part])) for part in parts])

    def collect(self, pending: PendingBatch) -> list[Tensor | None]:
        """The images of a pending batch in order, [C,h,w] each; None for those that can't be read."""
        images: list[Tensor | None] = [None] * len(pending.items)
        for rows, future in pending.pieces:
            chunk = wait_for(future, [pending.items[row] for row in rows], self.reader.decoders)
            for position, image in zip(chunk.kept, chunk.arrays(self.reader.limits.made), strict=True):
                images[rows[position]] = torch.from_numpy(image)
            if chunk.changed:
                self.reader.refuse_changed(pending.items[rows[chunk.changed[0]]])
            reasons = dict(chunk.bad)
            for position, row in enumerate(rows):
                self.reader.record(pending.items[row], reasons.get(position, ""), position in chunk.lost)
        return images

    def images_at(self, indices: Tensor) -> list[Tensor]:
        """Each image with its own size, [3,h,w], or its substitute."""
        found = zip(indices.tolist(), self.collect(self.submit(indices)), strict=True)
        return [self._substitute(position) if image is None else image for position, image in found]

    def _substitute(self, position: int) -> Tensor:
        """The next readable image of the same class, or of any class if there is none."""
        after = np.roll(np.arange(len(self)), -position - 1)[:-1]
        if self.labels is not None:
            after = after[np.argsort(self.labels[after] != self.labels[position], kind="stable")]
        for other in after.tolist():
            image = self.read(other)
            if image is not None:
                return image
        raise none_readable(self.reader.bad, self.reader.root)
