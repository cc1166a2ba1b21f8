"""Stream the images of any source in batches, in a stable order; files are decoded batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kontrast.data import ImageSet, LazyImages, open_data
from kontrast.data.added_features import DigitOverlay, ExtraChannels
from kontrast.data.decode_workers import Chunk, decode_all
from kontrast.data.listing import Listing, check_split, scan_folder
from kontrast.data.paths import Source, describe_source, is_folder
from kontrast.data.shards import scan_shards
from kontrast.data.store import shape_images
from kontrast.data.table_listing import scan_tables, table_files
from kontrast.errors import UsageError
from kontrast.runs.run import Run
from kontrast.training.progress import tell

BATCH = 256
SPLITS = ("all", "train", "test")


class StreamBatch(NamedTuple):
    """One batch of a stream.

    Attributes:
        number: the number of the batch.
        ids: the numbers of the images in the source.
        images: the images that could be read.
        bad: (name, reason) of those that could not.
    """

    number: int
    ids: list[int]
    images: ImageSet
    bad: list[tuple[str, str]]


@dataclass(frozen=True)
class Stream:
    """The images of a source.

    Attributes:
        name: the source as the user wrote it.
        total: number of images.
        steps: number of batches.
        fingerprint: changes if the images change.
        batches: `batches(first, last)` iterates over the batches from `first` to `last - 1`.
        bad: (name, reason) of files that are known to be unreadable before any is decoded.
    """

    name: str
    total: int
    steps: int
    fingerprint: str
    batches: Callable[[int, int], Iterator[StreamBatch]]
    bad: list[tuple[str, str]] = field(default_factory=list)


def open_stream(
    run: Run,
    data: str | Path | ImageSet,
    split: str = "all",
    say: Callable[[str], None] = tell,
    max_bad: float | None = None,
    decoders: int | None = None,
) -> Stream:
    """Open a source as a stream of images that are prepared for a run.

    Args:
        run: the run, whose recipe decides how images are decoded.
        data: a source as for `open_data`, or images.
        split: "all" for every image; "train" or "test" for a split of a named set or a store, or a sub-folder.
        say: called with a line if a damaged store was packed again.
        max_bad: share of the images of a named set that may be unreadable; default: the run's.
        decoders: how many processes decode files; default: one per core.
    """
    if isinstance(data, ImageSet):
        return _of_images(run, [data])
    source = describe_source(data)
    check_split(source.spec, split, SPLITS)
    listed = _list_files(run, source, split)
    if listed is not None:
        return _of_listing(run, listed, source.spec, decoders)
    own = run.recipe.data
    options: dict[str, Any] = {"root": own.root or None, "size": own.size or None, "say": say}
    options |= {"max_bad": own.max_bad if max_bad is None else max_bad, "follow_links": own.follow_links}
    if split != "all" or source.kind == "store split":
        return _of_images(run, [open_data(data, split, **options)])
    train = open_data(data, "train", **options)
    return _of_images(run, [train, open_data(data, "test", **options)] if train.has_test else [train])


def _list_files(run: Run, source: Source, split: str) -> Listing | None:
    """The files of a folder (a split is a sub-folder) or of shards; None for a named set or a packed store."""
    if source.kind in ("named", "store", "store split", "missing", "dataset"):
        return None
    if source.kind == "tables":
        return scan_tables(source.spec, table_files(source.spec)) if split == "all" else None
    if split == "all" and source.kind == "shards":
        return scan_shards(source.spec)
    folder = source.spec if split == "all" else source.inner(split)
    if not is_folder(folder):
        raise UsageError(f"{source.spec} has no folder {split!r}: leave --split out to embed all of it")
    own = run.recipe.data
    return scan_folder(folder, own.follow_links, files=own.files, every=own.every)


def _of_listing(run: Run, listed: Listing, spec: str, decoders: int | None) -> Stream:
    def batches(first: int, last: int) -> Iterator[StreamBatch]:
        items = listed.items[: last * BATCH]
        for number, chunk in decode_all(items, run.limits, BATCH, decoders, first):
            start = number * BATCH
            bad = [(listed.items[start + place].name, reason) for place, reason in chunk.bad]
            ids = [start + place for place in chunk.kept]
            yield StreamBatch(number, ids, _image_set(run, chunk, [listed.items[i].name for i in ids], spec), bad)

    steps = -(-len(listed.items) // BATCH)
    return Stream(spec, len(listed.items), steps, listed.fingerprint, batches, list(listed.bad))


def _image_set(run: Run, chunk: Chunk, names: list[str], spec: str) -> ImageSet:
    if not names:
        return ImageSet(torch.empty(0, 3, 1, 1, dtype=torch.uint8), [])
    form = run.limits.made
    flat = torch.from_numpy(np.frombuffer(bytearray(chunk.pixels), form.dtype))
    return run.check_channels(ImageSet(shape_images(flat, torch.tensor(chunk.sizes), form.channels), names), spec)


def _of_images(run: Run, sets: list[ImageSet]) -> Stream:
    plan: list[tuple[ImageSet, int, int]] = []  # for each batch: its set, its first position there, and that image's id
    total = 0
    for one in [run.check_channels(one, one.name) for one in sets]:
        plan += [(one, start, total + start) for start in range(0, len(one), BATCH)]
        total += len(one)

    def batches(first: int, last: int) -> Iterator[StreamBatch]:
        for number, (one, start, first_id) in enumerate(plan[first:last], first):
            positions, images, bad = _readable(one, torch.arange(start, min(start + BATCH, len(one))))
            yield StreamBatch(number, (positions - start + first_id).tolist(), images, bad)

    return Stream(sets[0].name, total, len(plan), "+".join(s.fingerprint for s in sets), batches)


def _readable(images: ImageSet, positions: Tensor) -> tuple[Tensor, ImageSet, list[tuple[str, str]]]:
    """The images at these positions that can be read, their positions, and the bad ones.

    Bad images are left out here, not replaced as `LazyImages` does: a replacement would appear twice.
    """
    lazy = images.base
    if not isinstance(lazy, LazyImages):
        return positions, images.subset(positions), []
    decoded = list(zip(positions.tolist(), lazy.collect(lazy.submit(positions))))
    reasons = dict(lazy.reader.bad)
    bad = [(images.names[place], reasons[images.names[place]]) for place, image in decoded if image is None]
    good = [(place, image) for place, image in decoded if image is not None]
    if not good:
        return positions[:0], ImageSet(torch.empty(0, 3, 1, 1, dtype=torch.uint8), []), bad
    sizes = torch.tensor([image.shape[1:] for _, image in good])
    pixels: Any = shape_images(torch.cat([image.flatten() for _, image in good]), sizes, len(good[0][1]))
    positions = torch.tensor([place for place, _ in good])
    if isinstance(images.pictures, DigitOverlay):
        scans = images.pictures.scans[images.pictures.which[positions]]
        pixels = DigitOverlay(pixels, scans, torch.arange(len(scans)))
    if isinstance(images.images, ExtraChannels):
        pixels = ExtraChannels(pixels, images.images.planes[positions])
    return positions, replace(images.subset(positions), images=pixels), bad
