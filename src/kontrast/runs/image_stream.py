"""Images of any source in batches, in a stable order, never all at once: files are decoded as they are needed.

B images of a batch; the last one of a source may be smaller, and so may one with images that can't be read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kontrast.data import ImageSet, Lazy, open_data
from kontrast.data.decode import BadImage, Limits, checked_range, decode_file
from kontrast.data.decode_workers import Chunk, decode_all
from kontrast.data.image_set import WithPlanes
from kontrast.data.listing import Listing, scan_folder
from kontrast.data.shards import is_shards, scan_shards
from kontrast.data.sources import SOURCES
from kontrast.data.store import is_store, shape_up
from kontrast.errors import DataError, UsageError
from kontrast.registry import nearest
from kontrast.runs.run import Run
from kontrast.training.progress import tell

BATCH = 256
SPLITS = ("all", "train", "test")


class StreamBatch(NamedTuple):
    """number: its place in the source; ids: the images' places in the source; bad: (name, reason) of those left out."""

    number: int
    ids: list[int]
    images: ImageSet
    bad: list[tuple[str, str]]


@dataclass(frozen=True)
class Stream:
    """A source of `total` images in `steps` batches; `batches(first, last)` gives those from first to last - 1.
    bad: images that are left out already."""

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
) -> Stream:
    """All images of a folder or of shards as they lie there, or the parts of a named set or a packed store. say: told
    of a damaged store that was packed again. max_bad: of a named set, the share of damaged images, where not the run's.
    """
    if split not in SPLITS:
        raise UsageError(f"unknown split {split!r}: {nearest(split, SPLITS)}")
    if isinstance(data, ImageSet):
        return _of_images(run, [data])
    spec = os.fspath(data)
    listed = _listed(run, spec, split)
    if listed is not None:
        return _of_listing(run, listed, spec)
    own = run.recipe.data
    options: dict[str, Any] = {"root": own.root or None, "size": own.size or None, "say": say}
    options |= {"max_bad": own.max_bad if max_bad is None else max_bad, "follow_links": own.follow_links}
    if split != "all" or is_store(Path(spec)):  # itself one split of a store
        return _of_images(run, [open_data(spec, split, **options)])
    train = open_data(spec, "train", **options)
    return _of_images(run, [train, open_data(spec, "test", **options)] if train.has_test else [train])


def one_image(run: Run, path: str | Path, float_range: tuple[float, float] | None = None) -> ImageSet:
    """A single picture file as a set of one."""
    try:
        pixels, _ = decode_file(os.fspath(path), limits=_limits(run, float_range))
    except BadImage as error:
        raise DataError(f"can't read the image {path}: {error.reason}") from None
    return run.check_channels(ImageSet(torch.from_numpy(pixels)[None], [os.fspath(path)]), os.fspath(path))


def _limits(run: Run, float_range: tuple[float, float] | None = None) -> Limits:
    data = run.recipe.data
    return Limits(data.size or None, float_range=checked_range(float_range or data.float_range))


def _listed(run: Run, spec: str, split: str) -> Listing | None:
    """The files of a folder or shards, undecoded; None for a named set or a packed store. A split is a sub-folder."""
    path = Path(spec)
    if spec in SOURCES or (path.is_dir() and (is_store(path) or is_store(path / "train"))):
        return None
    if is_shards(spec) or not path.is_dir():
        if split != "all" and path.exists():
            raise UsageError(f"{spec} has no split {split!r}: leave --split out")
        return scan_shards(spec) if is_shards(spec) or spec.startswith("pipe:") else None
    if split != "all" and not (path / split).is_dir():
        raise UsageError(f"{spec} has no folder {split!r}: leave --split out to embed all of it")
    return scan_folder(str(path if split == "all" else path / split), run.recipe.data.follow_links)


def _of_listing(run: Run, listed: Listing, spec: str) -> Stream:
    def batches(first: int, last: int) -> Iterator[StreamBatch]:
        items = listed.items[: last * BATCH]
        for number, chunk in decode_all(items, _limits(run), BATCH, start=first):
            start = number * BATCH
            bad = [(listed.items[start + place].name, reason) for place, reason in chunk.bad]
            ids = [start + place for place in chunk.kept]
            yield StreamBatch(number, ids, _decoded(run, chunk, [listed.items[i].name for i in ids], spec), bad)

    steps = -(-len(listed.items) // BATCH)
    return Stream(spec, len(listed.items), steps, listed.fingerprint, batches, list(listed.bad))


def _decoded(run: Run, chunk: Chunk, names: list[str], spec: str) -> ImageSet:
    if not names:
        return ImageSet(torch.empty(0, 3, 1, 1, dtype=torch.uint8), [])
    flat = torch.from_numpy(np.frombuffer(chunk.pixels, dtype=np.uint8).copy())
    return run.check_channels(ImageSet(shape_up(flat, torch.tensor(chunk.sizes), 3), names), spec)


def _of_images(run: Run, sets: list[ImageSet]) -> Stream:
    plan: list[tuple[ImageSet, int, int]] = []  # a batch's set, its first image there and that image's id
    total = 0
    for one in sets:
        run.check_channels(one, one.name)
        plan += [(one, start, total + start) for start in range(0, len(one), BATCH)]
        total += len(one)

    def batches(first: int, last: int) -> Iterator[StreamBatch]:
        for number, (one, start, number_of_first) in enumerate(plan[first:last], first):
            inside, images, bad = _readable(one, torch.arange(start, min(start + BATCH, len(one))))
            yield StreamBatch(number, (inside - start + number_of_first).tolist(), images, bad)

    return Stream(sets[0].name, total, len(plan), "+".join(s.fingerprint for s in sets), batches)


def _readable(one: ImageSet, inside: Tensor) -> tuple[Tensor, ImageSet, list[tuple[str, str]]]:
    """These positions, their images, and what is bad. Of images that are decoded as they are asked for, those that
    can be read: another that stood in for a bad one would be its duplicate."""
    lazy = one.base
    if not isinstance(lazy, Lazy):
        return inside, one.subset(inside), []
    found = list(zip(inside.tolist(), lazy.answer(lazy.ask(inside))))
    reasons = dict(lazy.reader.bad)
    bad = [(one.names[place], reasons[one.names[place]]) for place, image in found if image is None]
    good = [(place, image) for place, image in found if image is not None]
    if not good:
        return inside[:0], ImageSet(torch.empty(0, 3, 1, 1, dtype=torch.uint8), []), bad
    sizes = torch.tensor([image.shape[1:] for _, image in good])
    pixels: Any = shape_up(torch.cat([image.flatten() for _, image in good]), sizes, 3)
    inside = torch.tensor([place for place, _ in good])
    if isinstance(one.images, WithPlanes):
        pixels = WithPlanes(pixels, one.images.planes[inside])
    return inside, replace(one.subset(inside), images=pixels), bad
