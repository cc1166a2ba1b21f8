"""Make batches, in an order that depends on (seed, epoch) alone: resumable at any step, with any number of ranks.

Legend: N images, B images of the whole batch, b = B / world of this rank, C channels, H x W pixels.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from kontrast.counters import block_permutation, permutation
from kontrast.data.added_features import add_features
from kontrast.data.bad_images import none_readable
from kontrast.data.decode_workers import run_ahead
from kontrast.data.image_set import ImageSet, pad
from kontrast.data.lazy_images import LazyImages, PendingBatch
from kontrast.errors import DataError, UsageError

_ORDER = 0x0FEED
RESIDENT_SHARE = 0.4
"""With resident="auto", images may take this share of the free device memory."""
AHEAD, PREFETCH = 2, 3
"""PREFETCH batches are prepared ahead, and the images of AHEAD further ones are being decoded."""
WAITING_SHARE, LEAST_BATCHES = 0.5, 10
"""Training that waits for images for this share of the time, over at least so many batches, is slowed by decoding."""
WINDOW_BLOCKS, WINDOW_IMAGES = 8, 16_384
"""Images are shuffled within a window of at least this many shards, with about this many images."""


class Batch(NamedTuple):
    """One batch of one rank.

    Attributes:
        step: its number in the epoch.
        images: [b,C,H,W] on the device, of the type of the set.
        sizes: int64 [b,2], heights and widths, if the images were padded.
        indices: int64 [b], the number of each image in its source.
        labels: int64 [b], or None.
    """

    step: int
    images: Tensor
    sizes: Tensor | None
    indices: Tensor
    labels: Tensor | None


class Feeder:
    """The batches of one rank: its slice of the batch that a single process would get.

    The last, smaller batch of an epoch is left out. Images that are decoded for every batch are not shuffled freely,
    because they may be in shards on slow storage: the shards come in random order, and images are shuffled within a
    window of a few shards.

    A bad image of a set that is decoded for every batch is replaced by the image that comes one batch later in the
    epoch (not by the next image, which is in the batch already and would become its own negative).

    Args:
        images: the images.
        batch: B, images per batch over all ranks.
        seed: decides the order.
        device: where batches are put; default "cpu".
        rank: number of this process; default 0.
        world: number of processes; default 1.
        allow_small: if there are fewer images than one batch, make the batch smaller instead of raising an error.
        resident: "yes" keeps all images on the device, "no" copies every batch; "auto" decides by the free memory.

    Example:
        >>> images = ImageSet(torch.zeros(10, 3, 8, 8, dtype=torch.uint8), [str(i) for i in range(10)])
        >>> [len(batch.images) for batch in Feeder(images, 4).batches(epoch=0)]
        [4, 4]
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
        allow_small: bool = False,
        resident: str = "auto",
    ):
        assert batch >= 1 and 0 <= rank < world and resident in ("auto", "yes", "no")
        if len(images) < batch:
            if len(images) < 2 or not allow_small:
                advice = "lower training.batch, or allow a smaller batch with data.allow_small=true"
                raise DataError(
                    f"{len(images)} images in {images.name or 'the data'} are fewer than one batch of {batch}: "
                    f"{'contrast needs at least 2' if len(images) < 2 else advice}"
                )
            batch = len(images) - len(images) % world
        if batch == 0 or batch % world:
            raise UsageError(f"a batch of {batch} can't be shared by {world} ranks: give a multiple of {world}")
        self.data, self.batch, self.seed, self.device = images, batch, seed, torch.device(device)
        self.rank, self.world = rank, world
        self.lazy: LazyImages | None = images.base if isinstance(images.base, LazyImages) else None
        self.resident = self._is_resident(resident)
        self.waited, self.served, self.watch, self.has_warned = 0.0, 0, 0.0, False
        if self.resident and self.device.type != "cpu":
            self.pixels = images.images.to(self.device)

    @property
    def steps_per_epoch(self) -> int:
        return len(self.data) // self.batch

    def order(self, epoch: int) -> Tensor:
        """int64 [N]: the order of an epoch, for all ranks together."""
        if self.lazy is not None:
            blocks = self.lazy.blocks
            window = max(WINDOW_BLOCKS, -(-WINDOW_IMAGES * (int(blocks.max()) + 1) // len(blocks)))
            return torch.from_numpy(block_permutation(blocks, window, self.seed, _ORDER, epoch))
        return torch.from_numpy(permutation(len(self.data), self.seed, _ORDER, epoch))

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Iterate over the batches of an epoch, from step `start`."""
        order = self.order(epoch)
        steps = range(start, self.steps_per_epoch)
        if self.resident:
            return (self._gather(step, order[self._slots(step)]) for step in steps)
        return self._prefetched(order, steps)

    def bottleneck(self) -> str:
        """A line, once, if training has mostly waited for images to be decoded since the last call; else "".

        Call it when the device has finished its work: until then, it may be computing while this process waits.
        """
        now, lazy = time.monotonic(), self.lazy
        elapsed, waited, served = now - self.watch, self.waited, self.served
        first, self.watch, self.waited, self.served = not self.watch, now, 0.0, 0
        if lazy is None or first or self.has_warned or served < LEAST_BATCHES or waited < WAITING_SHARE * elapsed:
            return ""
        self.has_warned = True
        rate, workers = served * self.batch / elapsed, lazy.reader.decoders.workers
        bound = lazy.reader.limits.bound
        return (
            f"decoding is the bottleneck: training waits {waited / elapsed:.0%} of the time for images ({rate:,.0f} a "
            f"second with {workers} decoding processes per rank); use more cores, or decode them once: kontrast pack "
            f"{self.data.name or lazy.reader.root} STORE{f' --size {bound}' if bound else ''}, then train on STORE"
        )

    def _slots(self, step: int) -> Tensor:
        """int64 [b]: which places in the epoch's order this rank takes in a step."""
        return torch.arange(step * self.batch, (step + 1) * self.batch).tensor_split(self.world)[self.rank]

    def _gather(self, step: int, positions: Tensor) -> Batch:
        """One batch of resident images."""
        if self.device.type == "cpu":
            return self._batch(step, positions, *self.data.batch(positions))
        return self._batch(step, positions, self.pixels[positions.to(self.device, non_blocking=True)], None)

    def _batch(self, step: int, positions: Tensor, images: Tensor, sizes: Tensor | None) -> Batch:
        """The images with their indices and labels, on the device."""
        labels = self.data.labels
        tensors = (images, sizes, self.data.numbers(positions), None if labels is None else labels[positions])
        return Batch(step, *(None if t is None else t.to(self.device, non_blocking=True) for t in tensors))  # type: ignore[arg-type]

    def _read(self, order: Tensor, step: int, pending: PendingBatch | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Positions, images (in pinned memory if the device is a GPU) and sizes of a step; bad images are replaced."""
        slots = self._slots(step)
        positions = order[slots]
        if self.lazy is None or pending is None:
            pixels, sizes = self.data.batch(positions)
        else:
            images = self.lazy.collect(pending)
            for row, slot in enumerate(slots.tolist()):
                if images[row] is None:
                    positions[row], images[row] = self._replacement(order, slot)
            pixels, sizes = pad(images)  # type: ignore[arg-type]
            pixels = add_features(self.data.images, pixels, positions, sizes)
        return positions, pixels.pin_memory() if self.device.type == "cuda" else pixels, sizes

    def _replacement(self, order: Tensor, slot: int) -> tuple[int, Tensor]:
        """The image that replaces a bad one; it depends only on the order and on which images are bad."""
        assert self.lazy is not None
        count = len(order)
        later = range(slot + self.batch, slot + count + 1, self.batch)
        for other in itertools.chain(later, range(slot + 1, slot + count)):
            position = int(order[other % count])
            image = self.lazy.read(position)
            if image is not None:
                return position, image
        raise none_readable(self.lazy.reader.bad, self.lazy.reader.root)

    def _is_resident(self, wanted: str) -> bool:
        base, on_cpu = self.data.base, self.device.type == "cpu"
        possible = isinstance(base, Tensor) or (on_cpu and self.lazy is None)
        if wanted == "yes" and not possible:
            raise UsageError(
                "data.resident=yes needs decoded images of one size: give data.pack=true, pack them to one size, or "
                "leave it auto"
            )
        if wanted != "auto" or on_cpu or not possible:
            return wanted != "no" and possible
        return base.nbytes <= RESIDENT_SHARE * free_device_memory(self.device)

    def _prefetched(self, order: Tensor, steps: range) -> Iterator[Batch]:
        """Iterate over batches that a thread prepares ahead; images are decoded even earlier."""
        pool = ThreadPoolExecutor(1, "kontrast-feeder")
        try:
            decoding = run_ahead(((step, self._start_decoding(order, step)) for step in steps), AHEAD)
            reading = ((step, pool.submit(self._read, order, step, pending)) for step, pending in decoding)
            for step, future in run_ahead(reading, PREFETCH):
                start = time.monotonic()
                ready = future.result()
                self.waited += time.monotonic() - start
                self.served += 1
                yield self._batch(step, *ready)
        finally:
            pool.shutdown(cancel_futures=True)

    def _start_decoding(self, order: Tensor, step: int) -> PendingBatch | None:
        return None if self.lazy is None else self.lazy.submit(order[self._slots(step)])


def free_device_memory(device: torch.device) -> int:
    """Return how many bytes of a GPU's memory are free. Apple's GPU shares the machine's."""
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return torch.cuda.mem_get_info(device)[0]
