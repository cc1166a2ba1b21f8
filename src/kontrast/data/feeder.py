"""Batches in an order that is a pure function of (seed, epoch): resumable at any step, the same on any number of ranks.

Legend: N images, B images of the whole batch, b = B / world of this rank, C channels, H x W pixels.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kontrast.counters import block_permutation, permutation
from kontrast.data.image_set import ImageSet, WithPlanes, pad
from kontrast.data.lazy_images import Asked, Lazy
from kontrast.errors import DataError, UsageError
from kontrast.registry import nearest

_ORDER = 0x0FEED
RESIDENT_SHARE = 0.4
"""The share of free device memory that images may take under resident="auto"."""
AHEAD = 2
"""Batches that are being decoded while one is put together."""
WINDOW_BLOCKS, WINDOW_IMAGES = 8, 16_384
"""A window of shards holds at least this many of them, and about this many images, to be well mixed."""


class Batch(NamedTuple):
    """images: uint8 [b,C,H,W] on the device; sizes: int64 [b,2] where they were padded; indices: int64 [b], stable."""

    step: int
    images: Tensor
    sizes: Tensor | None
    indices: Tensor
    labels: Tensor | None


class Feeder:
    """Feeds one rank. Every rank sees its slice of the same whole batch, so their union is the one-process batch.

    order: "shuffled", or "blocks" for shards on slow storage: shards in random order, images in random order within a
    window of several shards, so that only those are read from at a time; "auto" takes blocks where images are decoded
    as they are needed. An image of such a set that turns out bad is replaced by the one that stands a whole batch
    later in the epoch's order (not by the next, which is in the batch already and would be its own negative).
    """

    def __init__(
        self,
        images: ImageSet,
        batch: int,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world: int = 1,
        drop_last: bool = True,
        allow_small: bool = False,
        resident: str = "auto",
        prefetch: int = 3,
        order: str = "auto",
    ):
        if batch < 1:
            raise UsageError(f"batch is {batch}; allowed: 1 or more")
        if not 0 <= rank < world:
            raise UsageError(f"rank {rank} of {world} ranks; allowed: 0 to {world - 1}")
        if len(images) < batch:
            if len(images) < 2:
                raise DataError(f"{len(images)} image in {images.name or 'the data'}: contrast needs at least 2")
            if not allow_small:
                raise DataError(
                    f"{len(images)} images in {images.name or 'the data'} are fewer than one batch of {batch}: "
                    "lower training.batch, or allow a smaller batch with data.allow_small=true"
                )
            batch = len(images) - len(images) % world
        if batch == 0 or batch % world:
            raise UsageError(f"a batch of {batch} can't be shared by {world} ranks: give a multiple of {world}")
        self.data, self.batch, self.seed, self.device = images, batch, seed, torch.device(device)
        self.rank, self.world, self.drop_last, self.prefetch = rank, world, drop_last, prefetch
        self.lazy: Lazy | None = images.base if isinstance(images.base, Lazy) else None
        self.blocks = self._in_blocks(order)
        self.resident = self._is_resident(resident)
        if self.resident and self.device.type != "cpu":
            self.pixels = images.images.to(self.device)

    @property
    def steps_per_epoch(self) -> int:
        count = len(self.data)
        return count // self.batch if self.drop_last else -(-count // self.batch)

    def order(self, epoch: int) -> Tensor:
        """int64 [N]: the positions of the whole epoch, for all ranks together."""
        if self.blocks and self.lazy is not None:
            blocks = self.lazy.blocks
            window = max(WINDOW_BLOCKS, -(-WINDOW_IMAGES * (int(blocks.max()) + 1) // len(blocks)))
            return torch.from_numpy(block_permutation(blocks, window, self.seed, _ORDER, epoch))
        return torch.from_numpy(permutation(len(self.data), self.seed, _ORDER, epoch))

    def positions(self, epoch: int, step: int) -> Tensor:
        """int64 [b]: this rank's positions of one step."""
        if not 0 <= step < self.steps_per_epoch:
            raise UsageError(f"step {step} of an epoch of {self.steps_per_epoch} steps")
        return self.order(epoch)[self._slots(step)]

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from step `start` on."""
        order = self.order(epoch)
        steps = range(start, self.steps_per_epoch)
        if self.resident:
            return (self._gather(step, order[self._slots(step)]) for step in steps)
        return self._prefetched(order, steps)

    def _slots(self, step: int) -> Tensor:
        """int64 [b]: this rank's places in the order of the epoch."""
        whole = torch.arange(step * self.batch, min((step + 1) * self.batch, len(self.data)))
        return whole.tensor_split(self.world)[self.rank]

    def _gather(self, step: int, positions: Tensor) -> Batch:
        indices, labels = self._about(positions)
        if self.device.type == "cpu":
            images, sizes = self.data.batch(positions)
        else:
            images, sizes = self.pixels[positions.to(self.device, non_blocking=True)], None
        return Batch(step, images, sizes, self._here(indices), self._here(labels))  # type: ignore[arg-type]

    def _read(self, order: Tensor, slots: Tensor, asked: Asked | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """positions, images and sizes of these places in the order, others in the place of bad ones."""
        positions = order[slots]
        if self.lazy is None or asked is None:
            return positions, *self.data.batch(positions)
        images = self.lazy.answer(asked)
        for row, slot in enumerate(slots.tolist()):
            if images[row] is None:
                positions[row], images[row] = self._spare(order, slot)
        pixels, sizes = pad(images)  # type: ignore[arg-type]
        if isinstance(self.data.images, WithPlanes):
            pixels = self.data.images.joined(pixels, positions)
        return positions, pixels, sizes

    def _spare(self, order: Tensor, slot: int) -> tuple[int, Tensor]:
        """What stands in for a bad image: a function of the order and of which images are bad, nothing else."""
        assert self.lazy is not None
        count = len(order)
        later = range(slot + self.batch, slot + count + 1, self.batch)
        for other in itertools.chain(later, range(slot + 1, slot + count)):
            position = int(order[other % count])
            image = self.lazy.read(position)
            if image is not None:
                return position, image
        raise DataError(f"no image in {self.data.name or 'the data'} can be read")

    def _in_blocks(self, wanted: str) -> bool:
        if wanted not in ("auto", "shuffled", "blocks"):
            raise UsageError(f"unknown order {wanted!r}: {nearest(wanted, ('auto', 'shuffled', 'blocks'))}")
        if wanted == "blocks" and self.lazy is None:
            raise UsageError("order=blocks is for images that are decoded as needed: open shards with data.pack=false")
        return wanted != "shuffled" and self.lazy is not None

    def _about(self, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        labels = self.data.labels
        return self.data.index[positions], None if labels is None else labels[positions]  # type: ignore[index]

    def _here(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(self.device, non_blocking=True)

    def _is_resident(self, wanted: str) -> bool:
        if wanted not in ("auto", "yes", "no"):
            raise UsageError(f"unknown resident {wanted!r}: {nearest(wanted, ('auto', 'yes', 'no'))}")
        base = self.data.base
        whole = isinstance(base, Tensor)
        if self.lazy is not None:
            if wanted == "yes":
                raise UsageError("data.resident=yes needs decoded images: give data.pack=true, or leave it auto")
            return False
        if wanted == "yes" and not whole and self.device.type != "cpu":
            raise UsageError("data.resident=yes needs images of one size: pack them to one, or leave it auto")
        if wanted != "auto" or self.device.type == "cpu":
            return wanted != "no"
        if not whole:
            return False
        free, _ = torch.cuda.mem_get_info(self.device)
        return base.numel() <= RESIDENT_SHARE * free

    def _gathered(self, order: Tensor, steps: range) -> Iterator[tuple[int, Tensor, Tensor, Tensor | None]]:
        """Step, positions, images and sizes; decoders work on the next batches while this one is put together."""
        asked: deque[tuple[int, Asked | None]] = deque()
        for step in itertools.chain(steps, [None] * AHEAD):
            if step is not None:
                asked.append((step, None if self.lazy is None else self.lazy.ask(order[self._slots(step)])))
            if asked and (step is None or len(asked) > AHEAD):
                ready, ask = asked.popleft()
                yield ready, *self._read(order, self._slots(ready), ask)

    def _prefetched(self, order: Tensor, steps: range) -> Iterator[Batch]:
        """A thread gathers the next batches into pinned memory while the device works on this one."""
        ready: queue.Queue = queue.Queue(self.prefetch)
        stop = threading.Event()
        pin = self.device.type == "cuda"

        def put(thing: object) -> None:
            while not stop.is_set():
                try:
                    return ready.put(thing, timeout=0.1)
                except queue.Full:
                    continue

        def fill() -> None:
            try:
                for step, positions, images, sizes in self._gathered(order, steps):
                    if stop.is_set():
                        return
                    put((step, positions, images.pin_memory() if pin else images, sizes))
                put(None)
            except Exception as error:
                put(error)

        thread = threading.Thread(target=fill, daemon=True, name="kontrast-feeder")
        thread.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                step, positions, images, sizes = item
                indices, labels = self._about(positions)
                yield Batch(step, self._here(images), self._here(sizes), self._here(indices), self._here(labels))  # type: ignore[arg-type]
        finally:
            stop.set()
            thread.join()
