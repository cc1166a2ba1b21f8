"""From a spec to images: no spec, a name, a folder, shards or a packed store."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kontrast.data import named_sets as official
from kontrast.data.decode import MAX_PIXELS, Limits, checked_range
from kontrast.data.decode_workers import decode_all, decode_chunk
from kontrast.data.digits import digits
from kontrast.data.image_set import ImageSet
from kontrast.data.lazy_images import Lazy
from kontrast.data.listing import TEST_NAMES, Listing, cache_home, class_folders, entries, held_out, scan_folder
from kontrast.data.shards import is_shards, scan_shards
from kontrast.data.store import DamagedStore, is_store, open_store, read_manifest, shape_up
from kontrast.data.store_writer import CHUNK, ProgressCallback, judge, pack_images, pack_listing
from kontrast.errors import DataError, UsageError
from kontrast.registry import Registry, nearest

if TYPE_CHECKING:
    from kontrast.data.store_writer import ProgressCallback


IN_MEMORY = 1024
"""Fewer files than this are decoded at every start; more go through a packed store."""
CHOICES = ("test_share", "max_bad", "follow_links")
"""Options, besides the limits of decoding, that decide which images of a source are in a store."""
MENDED = "packed again after damage"
"""The note of a store that was."""


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
    progress: ProgressCallback | None = None,
    workers: int | None = None,
    beside: Sequence[tuple[str, str]] = (),
    say: Callable[[str], None] | None = None,
) -> ImageSet:
    """The images of one split.

    spec: None or "digits" for the embedded set; a named set (looked for under root, KONTRAST_DATA, ./data); a folder;
    a tar, a folder of tars or a brace pattern; a packed store, or one split of it. split: "train", "test" (a folder's
    test or val), or "all" for a folder without parts, undivided, and for one split of a store. size bounds the shorter
    side. A labelled folder without a test part holds out `test_share` of each class by a hash of the names; an
    unlabelled one has no test part. Many files are decoded once, into a packed store in the cache (KONTRAST_CACHE, else
    ~/.cache/kontrast), unless pack=False: then shards, and folders too large for memory, are decoded as their images
    are asked for. max_bad is of all files where parts are held out by hash: beside is what is bad in the other part.
    say is told of a damaged store that was packed again.
    """
    limits = Limits(size, max_pixels, checked_range(float_range))
    options = Options(root, test_share, max_bad, follow_links, pack, progress, workers, limits, beside, say)
    return _opened("digits" if spec is None else os.fspath(spec), split, options)


def _opened(spec: str, split: str, options: Options) -> ImageSet:
    """A split by the shortest way to it: from a store, as it is found, when asked for, through the cache or decoded."""
    path = Path(spec)
    if path.is_dir() and (is_store(path) or is_store(path / "train")):
        return _from_store(path, split, options)
    found, has_test = find(spec, split, options)
    if isinstance(found, ImageSet):
        return found
    facts = {"name": spec, "split": split, "has_test": has_test}
    if not options.pack and ((spec not in SOURCES and is_shards(spec)) or _too_large(found, options)):
        images = _undecoded(found, facts, options)
    elif options.pack and len(found.items) >= IN_MEMORY:
        images = _through_cache(found, facts, options)
    else:
        images = _decoded(found, facts, options)
    return dataclasses.replace(images, place=_place(spec, split, found))


def _place(spec: str, split: str, found: ImageSet | Listing) -> str:
    """The folder in the source that names are relative to; "" for the source itself."""
    if isinstance(found, ImageSet) or spec in SOURCES:
        return split
    inner = os.path.relpath(found.root, spec)
    return "" if inner == "." else inner


def _packed(
    found: ImageSet | Listing, place: Path, facts: dict[str, Any], origin: dict[str, Any], options: Options
) -> Path:
    limits, progress = options.limits, options.progress
    if isinstance(found, ImageSet):
        return pack_images(found, place, facts, origin, limits.bound, progress)
    return pack_listing(found, place, facts, origin, limits, options.max_bad, progress, options.workers)


def _through_cache(found: Listing, facts: dict[str, Any], options: Options) -> ImageSet:
    """From a packed store in the cache, of which packing has checked every byte, whether it wrote or found it. It is
    one store however the same images are asked for: a run that is resumed or probed names them by their whole path."""
    origin = _origin(facts["name"], options)
    known = {"name": origin["spec"], "split": "all", "has_test": False}
    images = open_store(_packed(found, _cache_place(found, options), known, origin, options), full=False)
    judge(found, images.bad, options.max_bad)  # an earlier packing may have been allowed more
    return dataclasses.replace(images, **facts)


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
    judge(found, bad, options.max_bad)
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
    judge(found, found.bad, options.max_bad)
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
    """A split of a packed store; or the one that the path itself is, which has no test part: its neighbour may be gone
    or of other images."""
    if is_store(path):
        own = read_manifest(path)["split"]
        if split not in (own, "all"):
            raise DataError(
                f"{path} is the {own!r} split of a packed store and has no {split!r}: "
                f"give the whole store, or the split {own!r}"
            )
        return dataclasses.replace(_stored(path, options), has_test=False)
    if not is_store(path / split):
        has = [name for name in ("train", "test") if is_store(path / name)]
        raise DataError(f"the packed store {path} has no split {split!r}: {nearest(split, has)}")
    return _stored(path / split, options)


def _stored(place: Path, options: Options) -> ImageSet:
    """The images of a packed split. A damaged one is made again, which is said and noted, where the very images it was
    made of are still there; else the damage is the answer."""
    try:
        return open_store(place)
    except DamagedStore as error:
        what, damage = str(error).removesuffix(": pack again"), f"{error} (not done by itself: "
    manifest = read_manifest(place)
    origin = manifest.get("origin")
    if origin is None:
        raise DamagedStore(f"{damage}the store is of an older version and does not say what it was made of)")
    options = _as_packed(origin, options)
    try:
        found, _ = find(origin["spec"], manifest["split"], options)
    except (DataError, UsageError) as error:
        raise DamagedStore(f"{damage}{error})") from None
    if found.fingerprint != manifest["fingerprint"]:
        raise DamagedStore(f"{damage}{origin['spec']} has other images now)")
    facts = {key: manifest[key] for key in ("name", "split", "has_test")}
    images = open_store(_packed(found, place, facts, origin, options))
    if options.say:
        options.say(f"{what}; packed again from {origin['spec']}: {len(images):,} {manifest['split']} images")
    return dataclasses.replace(images, notes={**images.notes, MENDED: len(images)})


def _origin(spec: str, options: Options) -> dict[str, Any]:
    """All that decides which images a spec means and what is made of them, wherever it is read: for a manifest."""
    named = spec in SOURCES
    return {
        "spec": spec if named else os.path.abspath(spec),
        "root": os.path.abspath(official.data_root(options.root)) if named else None,
        **{key: getattr(options, key) for key in CHOICES},
        "limits": dataclasses.asdict(options.limits),
    }


def _as_packed(origin: dict[str, Any], options: Options) -> Options:
    """The options that a store was packed with, whatever is asked for today."""
    choices = {key: origin[key] for key in ("root", *CHOICES)}
    return dataclasses.replace(options, **choices, limits=Limits.of(origin["limits"]))


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


@dataclasses.dataclass(frozen=True)
class Options:
    """How files are found, decoded and kept. beside: what is bad in the other part of one source; say: for what a
    person should know."""

    root: str | Path | None = None
    test_share: float = 0.2
    max_bad: float = 0.05
    follow_links: bool = False
    pack: bool = True
    progress: ProgressCallback | None = None
    workers: int | None = None
    limits: Limits = dataclasses.field(default_factory=Limits)
    beside: Sequence[tuple[str, str]] = ()
    say: Callable[[str], None] | None = None


def _embedded(split: str) -> ImageSet:
    if split not in ("train", "test"):
        raise UsageError(f"digits has no split {split!r}: {nearest(split, ('train', 'test'))}")
    return digits(split)


def find(spec: str, split: str, options: Options) -> tuple[ImageSet | Listing, bool]:
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
        return _with_classes(listed, train, options.follow_links), True
    return _divided(scan_folder(str(train if train.is_dir() else path), options.follow_links), split, options)


def _with_classes(listed: Listing, train: Path, follow_links: bool) -> Listing:
    """The listing with the train part's class numbers, also where a part lacks a class."""
    names = class_folders(str(train), follow_links)
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
    if split == "test" and not held.any():
        raise DataError(
            f"{listed.root} has no test part: a test_share of {options.test_share:g} holds none of its "
            f"{len(listed.items)} images out; give a larger one, or the folders train and test"
        )
    part = listed.take(np.flatnonzero(held if split == "test" else ~held))
    whole = len(listed.items) + len(listed.bad)
    return dataclasses.replace(part, whole=whole, beside=options.beside), bool(held.any())


def _hint(path: Path) -> str:
    parent, beside = path.parent, []
    with contextlib.suppress(DataError):  # a folder that is not there, or may not be looked into, gives no hint
        beside = [entry.name for entry in entries(str(parent)) if entry.is_dir()][:200]
    close = difflib.get_close_matches(path.name, [*beside, *SOURCES], n=1)
    return f": did you mean {str(parent / close[0]) if close[0] in beside else close[0]!r}?" if close else ""
