"""From a spec to images: no spec, a name, a folder, shards or a packed store."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kontrast.data import official
from kontrast.data.decode import MAX_PIXELS, Limits, checked_range
from kontrast.data.digits import digits
from kontrast.data.imageset import ImageSet
from kontrast.data.lazy import Lazy
from kontrast.data.listing import TEST_NAMES, Listing, cache_home, held_out, scan_folder
from kontrast.data.packing import CHUNK, Progress, check_bad, pack_images, pack_listing
from kontrast.data.shards import is_shards, scan_shards
from kontrast.data.store import DamagedStore, is_store, open_store, refuse_place, shape_up
from kontrast.data.workers import decode_all, decode_chunk
from kontrast.registry import DataError, Registry, UsageError, nearest

SOURCES = Registry("data set")
for _name, _source in {
    "cifar10": official.cifar10,
    "cifar100": official.cifar100,
    "stl10": official.stl10,
    "mnist": official.mnist,
    "fashion-mnist": official.fashion_mnist,
    "imagenet": official.imagenet,
    "imagenet100": official.imagenet100,
}.items():
    SOURCES.register(_name)(_source)
SOURCES.register("digits")(lambda split="train", root=None: _embedded(split))

IN_MEMORY = 1024
"""Fewer files than this are decoded at every start; more go through a packed store."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How files are found, decoded and kept."""

    root: str | Path | None = None
    test_share: float = 0.2
    max_bad: float = 0.05
    follow_links: bool = False
    pack: bool = True
    progress: Progress | None = None
    workers: int | None = None
    limits: Limits = dataclasses.field(default_factory=Limits)


def open_data(
    spec: str | Path | None = None,
    split: str = "train",
    *,
    root: str | Path | None = None,
    size: int | None = None,
    test_share: float = 0.2,
    max_bad: float = 0.05,
    follow_links: bool = False,
    float_range: Sequence[float] | None = None,
    max_pixels: int = MAX_PIXELS,
    pack: bool = True,
    progress: Progress | None = None,
    workers: int | None = None,
) -> ImageSet:
    """The images of one split.

    spec: None or "digits" for the embedded set; a named set (looked for under root, KONTRAST_DATA, ./data); a folder;
    a tar, a folder of tars or a brace pattern; a packed store. split: "train", "test" (a folder's test or val), or
    "all" for a folder without parts, undivided. size bounds the shorter side. A labelled folder without a test part
    holds out `test_share` of each class by a hash of the names; an unlabelled one has no test part. Many files are
    decoded once, into a packed store in the cache (KONTRAST_CACHE, else ~/.cache/kontrast), unless pack=False: then
    shards, and folders too large for memory, are decoded as their images are asked for.
    """
    limits = Limits(size, max_pixels, checked_range(float_range))
    options = Options(root, test_share, max_bad, follow_links, pack, progress, workers, limits)
    spec = "digits" if spec is None else os.fspath(spec)
    path = Path(spec)
    if path.is_dir() and (is_store(path) or is_store(path / "train")):
        return _from_store(path, split, options)
    found, has_test = _find(spec, split, options)
    if isinstance(found, ImageSet):
        return found
    facts = {"name": spec, "split": split, "has_test": has_test}
    if not options.pack and (is_shards(spec) or _too_large(found, options)):
        return _undecoded(found, facts, options)
    if options.pack and len(found.items) >= IN_MEMORY:
        # Packing has checked every byte already, of a store that it wrote or of one that it found.
        return open_store(_pack_listing(found, _cache_place(found, options), facts, options), full=False)
    return _decoded(found, facts, options)


def pack(spec: str | Path | None, out: str | Path, *, size: int | None = None, progress: Progress | None = None,
         workers: int | None = None, **options: Any) -> list[Path]:  # fmt: skip
    """Decode a source once into the packed store OUT, a folder for each of its splits; goes on where it was cut."""
    spec = "digits" if spec is None else os.fspath(spec)
    refuse_place(spec, Path(out))
    limits = Limits(size, options.pop("max_pixels", MAX_PIXELS), checked_range(options.pop("float_range", None)))
    known = {f.name for f in dataclasses.fields(Options)} - {"limits", "progress", "workers"}
    for key in options:
        if key not in known:
            raise UsageError(f"pack has no option {key!r}: {nearest(key, known)}")
    chosen = Options(**options, progress=progress, workers=workers, limits=limits)
    made, split = [], "train"
    while True:
        found, has_test = _find(spec, split, chosen)
        facts = {"name": spec, "split": split, "has_test": has_test}
        place = Path(out) / split
        if isinstance(found, Listing):
            made.append(_pack_listing(found, place, facts, chosen))
        else:
            made.append(pack_images(found, place, facts, size, progress))
        if not has_test or split == "test":
            return made
        split = "test"


def _embedded(split: str) -> ImageSet:
    if split not in ("train", "test"):
        raise UsageError(f"digits has no split {split!r}: {nearest(split, ('train', 'test'))}")
    return digits(split)


def _find(spec: str, split: str, options: Options) -> tuple[ImageSet | Listing, bool]:
    """What a spec's split holds, decoded or listed, and whether there is a test part."""
    if spec in SOURCES:
        found = SOURCES[spec](split, options.root)
        return (found, found.has_test) if isinstance(found, ImageSet) else (found, True)
    if is_shards(spec) or spec.startswith("pipe:"):
        return _divided(scan_shards(spec), split, options)
    path = Path(spec)
    if not path.is_dir():
        raise DataError(f"no folder {spec!r}{_hint(path)}; or a named set: {', '.join(SOURCES)}")
    train = path / "train"
    tests = [path / name for name in TEST_NAMES if (path / name).is_dir()]
    if train.is_dir() and tests:
        if split not in ("train", "test", *TEST_NAMES):
            raise UsageError(f"{spec} has no split {split!r}: {nearest(split, ('train', 'test'))}")
        part = train if split == "train" else (path / split if (path / split).is_dir() else tests[0])
        listed = scan_folder(str(part), options.follow_links)
        return _with_classes(listed, train, options), True
    return _divided(scan_folder(str(train if train.is_dir() else path), options.follow_links), split, options)


def _with_classes(listed: Listing, train: Path, options: Options) -> Listing:
    """The listing with the train part's class numbers, also where a part lacks a class."""
    names = sorted((e.name for e in os.scandir(train) if e.is_dir() and not e.name.startswith(".")), key=os.fsencode)
    heads = [item.name.split("/", 1)[0] for item in listed.items if "/" in item.name]
    if listed.labels is None and (len(heads) < len(listed.items) or len(names) < 2):
        return listed
    strange = sorted(set(heads) - set(names))
    if strange:
        raise DataError(
            f"{listed.root} has the class {strange[0]!r}, which {train} has not: {nearest(strange[0], names)}"
        )
    number = {name: i for i, name in enumerate(names)}
    return dataclasses.replace(listed, labels=np.array([number[h] for h in heads], dtype=np.int64), classes=names)


def _divided(listed: Listing, split: str, options: Options) -> tuple[Listing, bool]:
    """A listing without parts: train and test by hash where it has labels, else all of it for training."""
    if split not in ("train", "test", "all"):
        raise UsageError(f"{listed.root} has no split {split!r}: {nearest(split, ('train', 'test', 'all'))}")
    if listed.labels is None or split == "all" or options.test_share == 0:
        if split == "test":
            raise DataError(f"{listed.root} has no test part: give class sub-folders, or the folders train and test")
        return listed, False
    held = held_out([item.name for item in listed.items], listed.labels, options.test_share)
    return listed.take(np.flatnonzero(held if split == "test" else ~held)), bool(held.any())


def _hint(path: Path) -> str:
    parent = path.parent
    beside = [entry.name for entry in os.scandir(parent) if entry.is_dir()][:200] if parent.is_dir() else []
    import difflib

    close = difflib.get_close_matches(path.name, [*beside, *SOURCES], n=1)
    return f": did you mean {str(parent / close[0]) if close[0] in beside else close[0]!r}?" if close else ""


def _pack_listing(found: Listing, place: Path, facts: dict[str, Any], options: Options) -> Path:
    return pack_listing(found, place, facts, options.limits, options.max_bad, options.progress, options.workers)


def _cache_place(found: Listing, options: Options) -> Path:
    key = json.dumps(
        [
            os.path.abspath(found.root),
            [i.name for i in found.items[:1]],
            len(found.items),
            dataclasses.astuple(options.limits),
        ]
    )
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    stem = "".join(c if c.isalnum() else "-" for c in os.path.basename(os.path.abspath(found.root)))[:40]
    return cache_home() / "stores" / f"{stem}-{digest}"


def _decoded(found: Listing, facts: dict[str, Any], options: Options) -> ImageSet:
    """A listing decoded into memory."""
    pixels, sizes, kept, bad = [], [], [], list(found.bad)
    notes, total = dict(found.notes), len(found.items)
    for number, chunk in decode_all(found.items, options.limits, CHUNK, options.workers):
        start = number * CHUNK
        pixels.append(np.frombuffer(chunk.pixels, dtype=np.uint8))
        sizes += chunk.sizes
        kept += [start + position for position in chunk.kept]
        bad += [(found.items[start + position].name, reason) for position, reason in chunk.bad]
        for what, count in chunk.notes.items():
            notes[what] = notes.get(what, 0) + count
        if options.progress:
            options.progress(min(start + CHUNK, total), total)
    if not kept:
        raise DataError(f"none of the {total} images in {found.root} could be read: {bad[0][0]} ({bad[0][1]}), ...")
    check_bad(bad, total + len(found.bad), options.max_bad, found.root)
    return ImageSet(
        images=shape_up(torch.from_numpy(np.concatenate(pixels)), torch.tensor(sizes), 3),
        names=[found.items[i].name for i in kept],
        stamps=torch.from_numpy(found.stamps[kept]),
        labels=None if found.labels is None else torch.from_numpy(found.labels[kept]),
        classes=found.classes,
        fingerprint=found.fingerprint,
        bad=bad,
        notes=notes,
        **facts,
    )


def _undecoded(found: Listing, facts: dict[str, Any], options: Options) -> ImageSet:
    """A listing whose images are decoded when they are asked for; bad ones are found out, and counted, then."""
    check_bad(found.bad, len(found.items) + len(found.bad), options.max_bad, found.root)
    images = Lazy.of(found, options.limits, options.max_bad, options.workers)
    return ImageSet(
        images=images,
        names=[item.name for item in found.items],
        stamps=torch.from_numpy(found.stamps),
        labels=None if found.labels is None else torch.from_numpy(found.labels),
        classes=found.classes,
        fingerprint=found.fingerprint,
        bad=images.reader.bad,
        notes=dict(found.notes),
        **facts,
    )


def _too_large(found: Listing, options: Options) -> bool:
    """Whether the decoded images would fill more than half of the memory that is free."""
    sampled = [found.items[i] for i in range(0, len(found.items), -(-len(found.items) // 16))]
    chunk = decode_chunk(sampled, options.limits)
    each = len(chunk.pixels) / max(1, len(chunk.kept))
    return each * len(found.items) > 0.5 * _free_memory()


def _free_memory() -> int:
    """Bytes that can be had without swapping; where the system does not tell, all that is not in use."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _from_store(path: Path, split: str, options: Options) -> ImageSet:
    """A split of a packed store; a damaged one is made again where its source is still there."""
    place = path if is_store(path) else path / split
    if not is_store(place):
        has = [name for name in ("train", "test") if is_store(path / name)]
        raise DataError(f"the packed store {path} has no split {split!r}: {nearest(split, has)}")
    try:
        return open_store(place)
    except DamagedStore as damage:
        origin = _origin(place)
        if origin is None or not (origin in SOURCES or os.path.exists(origin)):
            raise
        try:
            found, has_test = _find(origin, split, options)
        except DataError:
            raise damage from None
        facts = {"name": origin, "split": split, "has_test": has_test}
        if isinstance(found, ImageSet):
            return open_store(pack_images(found, place, facts, options.limits.bound, options.progress))
        return open_store(_pack_listing(found, place, facts, options))


def _origin(place: Path) -> str | None:
    """Where a store says it came from, read from a manifest that may be damaged."""
    try:
        name = json.loads((place / "store.json").read_text(encoding="utf-8")).get("name")
    except (OSError, ValueError, AttributeError):
        return None
    return name if isinstance(name, str) else None
