"""Open a data source: a named data set, a folder, shards or a packed store becomes an `ImageSet`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch

from kontrast.addresses import absolute, is_address
from kontrast.data.bad_images import check_listing, none_readable
from kontrast.data.cache_folder import cache_home
from kontrast.data.captions import NoCaptions
from kontrast.data.decode import ChangedFile, read_sides
from kontrast.data.decode_workers import decode_all
from kontrast.data.depth import with_form
from kontrast.data.file_columns import Item
from kontrast.data.image_set import ImageSet
from kontrast.data.lazy_images import LazyImages
from kontrast.data.limits import BadImage, Form, Limits
from kontrast.data.listing import Listing
from kontrast.data.named_sets import SOURCES as SOURCES
from kontrast.data.packing_estimate import announce_packing
from kontrast.data.paths import Source, describe_source
from kontrast.data.remote_files import readers
from kontrast.data.source_files import Options, ProgressCallback, find_images, names_folder, options_of, origin_of
from kontrast.data.store import MANIFEST, DamagedStore, is_store, open_store, read_manifest, shape_images
from kontrast.data.store_writer import CHUNK, pack_split
from kontrast.errors import DataError, UsageError
from kontrast.operating_system import free_memory as _free_memory
from kontrast.registry import nearest

T = TypeVar("T")
IN_MEMORY = 1024
"""Fewer files than this are decoded into memory; more are decoded once, into a packed store."""
ANNOUNCED = 20_000
"""Before at least so many images are packed, the user learns how long that will take."""
HEADERS = 1024
"""At most this many image headers are read to learn the typical size."""
MENDED = "packed again after damage"
"""The note of a store that was repaired. run.json has it."""


def open_data(
    spec: str | os.PathLike[str] | None = None,
    split: str = "train",
    *,
    root: str | Path | None = None,
    size: int | None = None,
    longest: int | None = None,
    test_share: float = 0.2,
    max_bad: float = 0.05,
    follow_links: bool = False,
    float_range: Sequence[float] | None = None,
    pack: bool = True,
    progress: ProgressCallback | None = None,
    workers: int | None = None,
    other_bad: Sequence[tuple[str, str]] = (),
    say: Callable[[str], None] | None = None,
    verify: bool = False,
    listed: Callable[[int], None] = lambda count: None,
    captions: str = "",
    depth: str = "auto",
    files: str = "auto",
    every: float = 1.0,
    layout: str = "auto",
    pages: str = "first",
) -> ImageSet:
    """Open one split of a data source.

    Args:
        spec: a named set, a folder, a tar file, a folder of tar files, a brace pattern such as `train-{000..099}.tar`,
            a packed store or one split of it; None for the embedded digits.
        split: "train", "test" (also finds a folder's `val`), or "all" for a folder without splits.
        root: where named sets are looked for; default KONTRAST_DATA, then ./data.
        size: larger images are reduced until their shorter side has this many pixels; default: not reduced.
        longest: images that are then longer are reduced until their longer side has this many pixels.
        test_share: share of each class that is held out for testing, by a hash of the names, if a labelled source has
            no test split of its own; 0 for none. An unlabelled source has no test split.
        max_bad: share of images that may be unreadable, from 0 to 1, counted over both splits of a divided source.
        follow_links: whether symbolic links are followed.
        float_range: (low, high), the values that become 0 and 255, for images of floats or 32-bit integers.
        pack: decode many files once into a packed store in the cache (KONTRAST_CACHE, default ~/.cache/kontrast). With
            False, shards and folders that do not fit into memory are decoded anew for every batch.
        progress: called with the number of decoded images and of all images.
        workers: decoding processes; default: one per core.
        other_bad: (name, reason) of bad images in the other split of a divided source.
        say: called with a line if a damaged store was packed again.
        verify: with `pack=False`, compare all files of a large folder with its stored list at once, not each when it
            is read. A file that differs raises `DataError` either way.
        listed: called now and then with the number of images that were found so far while a large folder is listed.
        captions: "auto" reads captions: those of shards and stores, or the file captions.csv, .jsonl, ... of a folder;
            or the path of such a file, inside the folder. Images without a caption are bad. Default: none.
        depth: "own" keeps the type and the channels that the images have, "8-bit" makes ordinary pictures of them;
            "auto" keeps them if none of a sample is an ordinary picture and `float_range` is not given.
        files: the kind of files in a folder that are images: "pictures", "arrays", "dicom" or "video"; "auto": the
            first of these of which there is one.
        every: seconds between two frames of a video.
        layout: the order of the axes of arrays, "HWC" or "CHW"; "auto": the one short axis counts the channels.
        pages: "channels" makes each page of a TIFF file a channel, "first" reads only the first.

    Returns:
        The images with their names, labels and class names.

    Example:
        >>> images = open_data("digits", "test")
        >>> len(images), images[0].shape
        (1536, torch.Size([3, 32, 32]))
    """
    limits = Limits(size, float_range=float_range, longest=longest, layout=layout, pages=pages)
    options = Options(root, test_share, max_bad, follow_links, pack, progress, workers, limits, other_bad, say,
                      pack or verify, listed, captions, depth, files, every)  # fmt: skip
    source = describe_source(spec)
    if source.kind in ("store", "store split"):
        return _require_captions(_open_store(source, split, options), options)
    found, has_test = find_images(source, split, options)
    if isinstance(found, ImageSet):
        return _require_captions(found, options)
    options = with_form(found, options)
    if not pack and (source.kind == "shards" or _exceeds_memory(found, options.limits)):
        images = _open_lazily(found, options)
    elif pack and len(found.items) >= IN_MEMORY:
        images = _open_cached(source, found, options)
    else:
        if found.unverified:
            found = cast(Listing, find_images(source, split, dataclasses.replace(options, verify=True))[0])
        images = _open_in_memory(found, options)
    place = names_folder(source, split, found)
    return dataclasses.replace(images, name=source.spec, split=split, has_test=has_test, place=place)


def _require_captions(images: ImageSet, options: Options) -> ImageSet:
    if options.captions and images.captions is None:
        raise NoCaptions(f"{images.name} has no captions: train without [text], or on images with captions")
    return images


@dataclasses.dataclass(frozen=True)
class Preview:
    """What is known about a split before it is decoded.

    Attributes:
        count: number of images, including those that may turn out to be unreadable.
        side: median of the shorter sides, in pixels.
        images: the opened images, if opening them did not need any decoding.
    """

    count: int
    side: int
    images: ImageSet | None


def preview_data(spec: str | os.PathLike[str] | None, split: str = "train", *, size: int | None = None,
                 longest: int | None = None, float_range: Sequence[float] | None = None, layout: str = "auto",
                 pages: str = "first", **options: Any) -> Preview:  # fmt: skip
    """Count the images of a split and learn their typical size from file headers. Options as for `open_data`."""
    limits = Limits(size, float_range=float_range, longest=longest, layout=layout, pages=pages)
    chosen, source = Options(**{**options, "verify": False}, limits=limits), describe_source(spec)
    if source.kind in ("store", "store split"):
        found: ImageSet | Listing = _open_store(source, split, chosen)
    else:
        found, _ = find_images(source, split, chosen)
    if isinstance(found, ImageSet):
        return Preview(len(found), found.typical_side, found)
    sides = sorted(shorter for shorter, _ in _sample_sides(found, with_form(found, chosen).limits, HEADERS))
    return Preview(len(found.items), sides[(len(sides) - 1) // 2], None)


def _sample_sides(found: Listing, limits: Limits, count: int) -> list[tuple[int, int]]:
    """The shorter and longer sides of at most `count` images, evenly spaced over the listing, from their headers."""
    count, sides, bad = min(count, len(found.items)), [], []
    items = [found.items[number * len(found.items) // count] for number in range(count)]

    def look(item: Item) -> tuple[int, int] | BadImage:
        try:
            return read_sides(item.path, item.offset, item.length, limits, item.stamp_to_check())
        except BadImage as error:
            return error
        except ChangedFile:
            return BadImage("it was modified after it was listed")

    look_at = readers().map if any(item.is_remote for item in items) else map
    for item, result in zip(items, look_at(look, items)):
        if isinstance(result, BadImage):
            bad.append((item.name, result.reason))
        else:
            sides.append(result)
    if not sides:
        raise none_readable(bad, found.root)
    return sides


def _exceeds_memory(found: Listing, limits: Limits) -> bool:
    """Whether the decoded images would fill more than half of the free memory."""
    sides = _sample_sides(found, limits, 16)
    each = sum(limits.made.pixel_bytes * shorter * longer for shorter, longer in sides) / len(sides)
    return each * len(found.items) > 0.5 * _free_memory()


def _open_cached(source: Source, found: Listing, options: Options) -> ImageSet:
    """Open a listing from its packed store in the cache, which is written if it does not exist or is not up to date.

    The facts in the manifest do not depend on how the source was named, so that a relative and an absolute path share
    one store.
    """
    origin = origin_of(source, options)
    facts = {"name": origin["spec"], "split": "all", "has_test": False}
    folder = _cache_folder(found, options.limits)
    if len(found.items) >= ANNOUNCED and not is_store(folder):
        announce_packing(found, folder, options)
    place = pack_split(found, folder, facts, origin, options)
    images = open_store(place, full=False)  # packing verified every byte
    check_listing(found, images.bad, options.max_bad)  # the store may have been packed with a larger max_bad
    return images


def _cache_folder(found: Listing, limits: Limits) -> Path:
    root, first = absolute(found.root), [item.name for item in found.items[:1]]
    captioned = ["captions"] if found.captions is not None else []
    key = json.dumps([root, first, len(found.items), list(limits.facts().values()), *captioned])
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    stem = "".join(c if c.isalnum() else "-" for c in os.path.basename(root))[:40]
    return cache_home() / "stores" / f"{stem}-{digest}"


RECENT_BYTES = 1 << 28
_recent: OrderedDict[tuple[str, str, Limits], ImageSet] = OrderedDict()
"""Listings that this process decoded last: `pretrain` opens the same small folder for training and for its probes."""


def _open_in_memory(found: Listing, options: Options) -> ImageSet:
    """Decode a listing into memory, unless this process has just done so."""
    key = (absolute(found.root), found.fingerprint, options.limits)
    images = _recent.pop(key) if key in _recent else _decode(found, options)
    _recent[key] = images
    while sum(one.images.nbytes for one in _recent.values()) > RECENT_BYTES:
        _recent.popitem(last=False)
    bad = found.bad + images.bad
    check_listing(found, bad, options.max_bad)
    return dataclasses.replace(images, bad=bad, notes=Counter(found.notes) + Counter(images.notes))


def _decode(found: Listing, options: Options) -> ImageSet:
    """The readable images of a listing. Its `bad` and `notes` are about decoding alone."""
    pixels, sizes, total = [], [], len(found.items)
    kept: list[int] = []
    bad: list[tuple[str, str]] = []
    notes: Counter[str] = Counter()
    for number, chunk in decode_all(found.items, options.limits, CHUNK, options.workers):
        start = number * CHUNK
        pixels.append(np.frombuffer(chunk.pixels, dtype=options.limits.made.dtype))
        sizes += chunk.sizes
        kept += [start + position for position in chunk.kept]
        bad += [(found.items[start + position].name, reason) for position, reason in chunk.bad]
        notes.update(chunk.notes)
        if options.progress:
            options.progress(min(start + CHUNK, total), total)
    if not kept:
        raise none_readable(bad, found.root)
    form = options.limits.made
    images = shape_images(torch.from_numpy(np.concatenate(pixels)), torch.tensor(sizes), form.channels)
    readable = _from_listing(found.take(np.array(kept)), images, bad, notes, form)
    return dataclasses.replace(readable, fingerprint=found.fingerprint)


def _open_lazily(found: Listing, options: Options) -> ImageSet:
    """A listing whose images are decoded for every batch; which of them are bad is only found out then."""
    check_listing(found, found.bad, options.max_bad)
    images = LazyImages.of(found, options.limits, options.max_bad, options.workers)
    return _from_listing(found, images, images.reader.bad, dict(found.notes), options.limits.made)


def _from_listing(
    found: Listing, images: Any, bad: list[tuple[str, str]], notes: dict[str, int], form: Form
) -> ImageSet:
    return ImageSet(
        images=images,
        names=found.items.names,
        labels=None if found.labels is None else torch.from_numpy(found.labels),
        classes=found.classes,
        stamps=found.items.stamps,
        fingerprint=found.fingerprint,
        bad=bad,
        notes=notes,
        captions=found.captions,
        color=form.color,
    )


def _open_store(source: Source, split: str, options: Options) -> ImageSet:
    """Open a split of a packed store. A path to a single split has no test split, whatever lies beside it."""
    if is_address(source.spec):
        return _open_remote_store(source, split)
    if source.kind == "store":
        folders = {name: source.path / name for name in ("train", "test") if is_store(source.path / name)}
    else:
        folders = dict.fromkeys((read_manifest(source.path)["split"], "all"), source.path)
    images = _open_or_repair(_split_of(source, split, folders), options)
    return dataclasses.replace(images, has_test=False) if source.kind == "store split" else images


def _open_remote_store(source: Source, split: str) -> ImageSet:
    """Open a copy of a split of a packed store that is at an address."""
    from kontrast.data.remote_copies import copy_store
    from kontrast.data.remote_listing import list_objects

    if source.kind == "store split":
        folder = copy_store(source.spec)
        _split_of(source, split, dict.fromkeys((read_manifest(folder)["split"], "all"), folder))
        return dataclasses.replace(open_store(folder), has_test=False)
    names = list_objects(source.spec).names
    folders = {name: source.inner(name) for name in ("train", "test") if f"{name}/{MANIFEST}" in names}
    return open_store(copy_store(_split_of(source, split, folders)))


def _split_of(source: Source, split: str, folders: Mapping[str, T]) -> T:
    if split not in folders:
        raise DataError(f"the packed store {source.spec} has no split {split!r}: {nearest(split, folders)}")
    return folders[split]


def _open_or_repair(folder: Path, options: Options) -> ImageSet:
    """Open a split of a store. If it is damaged, pack it again, provided that its source still has the same images."""
    try:
        return open_store(folder)
    except DamagedStore as error:
        damage = error
    manifest = read_manifest(folder)
    try:
        found, options = _find_origin(manifest, options)
    except (DataError, UsageError) as error:
        raise DamagedStore(f"{damage} (not repaired: {error})") from None
    facts, origin = {key: manifest[key] for key in ("name", "split", "has_test")}, manifest["origin"]
    images = open_store(pack_split(found, folder, facts, origin, options))
    if options.say:
        what = str(damage).removesuffix(": pack again")
        options.say(f"{what}; packed again from {origin['spec']}: {len(images):,} {manifest['split']} images")
    return dataclasses.replace(images, notes={**images.notes, MENDED: len(images)})


def _find_origin(manifest: dict[str, Any], options: Options) -> tuple[ImageSet | Listing, Options]:
    """The images that a store was packed from, and the options that it was packed with."""
    origin = manifest.get("origin")
    if origin is None:
        raise DataError("the store does not say what it was made of")
    options, spec = options_of(origin, options), origin["spec"]
    source = describe_source(spec) if origin["root"] is None else Source(spec, "named")
    found, _ = find_images(source, manifest["split"], options)
    if found.fingerprint != manifest["fingerprint"]:
        raise DataError(f"{spec} has other images now")
    return found, options
