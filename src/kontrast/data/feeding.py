"""Batches in an order that is a pure function of (seed, epoch): resumable at any step, the same on any number of ranks.

Legend: N images, B images of the whole batch, b = B / world of this rank, C channels, H x W pixels.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kontrast.data.counters import permutation
from kontrast.data.imageset import ImageSet, WithPlanes
from kontrast.registry import DataError, UsageError, nearest

_ORDER = 0x0FEED
RESIDENT_SHARE = 0.4
"""The share of free device memory that images may take under resident="auto"."""


class Batch(NamedTuple):
    """images: uint8 [b,C,H,W] on the device; sizes: int64 [b,2] where they were padded; indices: int64 [b], stable."""

    step: int
    images: Tensor
    sizes: Tensor | None
    indices: Tensor
    labels: Tensor | None


class Feeder:
    """Feeds one rank. Every rank sees its slice of the same whole batch, so their union is the one-process batch."""

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
    ):
        if batch < 1:
            raise UsageError(f"batch is {batch}; allowed: 1 or more")
        if not 0 <= rank < world:
            raise UsageError(f"rank {rank} of {world} ranks; allowed: 0 to {world - 1}")
        if len(images) < batch:
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
        self.resident = self._is_resident(resident)
        if self.resident and self.device.type != "cpu":
            self.pixels = images.images.to(self.device)

    @property
    def steps_per_epoch(self) -> int:
        count = len(self.data)
        return count // self.batch if self.drop_last else -(-count // self.batch)

    def order(self, epoch: int) -> Tensor:
        """int64 [N]: the positions of the whole epoch, for all ranks together."""
        return torch.from_numpy(permutation(len(self.data), self.seed, _ORDER, epoch))

    def positions(self, epoch: int, step: int) -> Tensor:
        """int64 [b]: this rank's positions of one step."""
        if not 0 <= step < self.steps_per_epoch:
            raise UsageError(f"step {step} of an epoch of {self.steps_per_epoch} steps")
        return self._share(self.order(epoch), step)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from step `start` on."""
        order = self.order(epoch)
        steps = range(start, self.steps_per_epoch)
        if self.resident:
            return (self._gather(step, self._share(order, step)) for step in steps)
        return self._prefetched(order, steps)

    def _share(self, order: Tensor, step: int) -> Tensor:
        whole = order[step * self.batch : (step + 1) * self.batch]
        return whole.tensor_split(self.world)[self.rank]

    def _gather(self, step: int, positions: Tensor) -> Batch:
        indices, labels = self._about(positions)
        if self.device.type == "cpu":
            images, sizes = self.data.batch(positions)
        else:
            images, sizes = self.pixels[positions.to(self.device, non_blocking=True)], None
        return Batch(step, images, sizes, self._here(indices), self._here(labels))

    def _about(self, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        labels = self.data.labels
        return self.data.index[positions], None if labels is None else labels[positions]  # type: ignore[index]

    def _here(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(self.device, non_blocking=True)

    def _is_resident(self, wanted: str) -> bool:
        if wanted not in ("auto", "yes", "no"):
            raise UsageError(f"unknown resident {wanted!r}: {nearest(wanted, ('auto', 'yes', 'no'))}")
        pictures = self.data.images
        base = pictures.base if isinstance(pictures, WithPlanes) else pictures
        whole = isinstance(base, Tensor)
        if wanted == "yes" and not whole and self.device.type != "cpu":
            raise UsageError("data.resident=yes needs images of one size: pack them to one, or leave it auto")
        if wanted != "auto" or self.device.type == "cpu":
            return wanted != "no"
        if not whole:
            return False
        free, _ = torch.cuda.mem_get_info(self.device)
        return base.numel() <= RESIDENT_SHARE * free

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
                for step in steps:
                    positions = self._share(order, step)
                    images, sizes = self.data.batch(positions)
                    put((step, positions, images.pin_memory() if pin else images, sizes))
                    if stop.is_set():
                        return
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
