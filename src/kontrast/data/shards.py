"""Tar shards in WebDataset's layout: members of one sample share a key, `000042.jpg` and `000042.cls`.

A shard is indexed once, in the cache, and read by offset. Nothing is extracted or unpickled, no member's name becomes a
path, and a spec is a file, a folder of tars or a brace pattern, never a command.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
import tarfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from kontrast.data.decode import SUFFIXES
from kontrast.data.listing import Item, Listing, cache_home, entries, first_image
from kontrast.errors import DataError, UsageError, printable

LABEL_SUFFIXES = (".cls", ".txt")
IGNORED_SUFFIXES = (".json",)
MAX_LABEL = 4096
MAX_SHARDS = 1_000_000
SCANNERS = 8
VERSION = 2
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


@dataclass
class _Found:
    """What a shard holds: (name, offset, length) of its images, labels by key, and what was passed over."""

    items: list[tuple[str, int, int]] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    bad: list[tuple[str, str]] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)

    def count(self, what: str) -> None:
        self.notes[what] = self.notes.get(what, 0) + 1


def is_shards(spec: str) -> bool:
    """Whether a spec means tars. A folder with tars and pictures may mean either (a set beside the archive it came in),
    and which is not for us to guess."""
    path = Path(spec)
    if path.is_dir():
        tar = next((entry.name for entry in entries(spec) if entry.name.endswith(".tar")), None)
        if tar is not None and (picture := first_image(spec)) is not None:
            raise DataError(
                f"{spec} holds shards ({printable(tar)}) and images ({printable(picture)}) alike: name the shards "
                f"themselves ({spec}/NAME-{{000..099}}.tar), or move the .tar files elsewhere"
            )
        return tar is not None
    return spec.endswith(".tar") or bool(_BRACES.search(spec))


def expand(spec: str) -> list[str]:
    """The shards of a spec, in order: a tar, a folder of tars, or `train-{0000..0099}.tar`."""
    if spec.startswith("pipe:") or "://" in spec:
        raise UsageError(f"{spec!r}: shards are files; commands and addresses are not run or fetched")
    if os.path.isdir(spec):
        return sorted(entry.path for entry in entries(spec) if entry.name.endswith(".tar") and entry.is_file())
    total = 1
    for low, high in _BRACES.findall(spec):
        total *= max(0, int(high) - int(low) + 1)
        if not 0 < total <= MAX_SHARDS:
            raise UsageError(f"{{{low}..{high}}} in {spec!r}: give a rising range of at most {MAX_SHARDS:,} shards")
    paths = [spec]
    while match := _BRACES.search(paths[0]):
        low, high = match.groups()
        numbers = [str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)]
        paths = [_BRACES.sub(n, path, count=1) for path in paths for n in numbers]
    return paths


def scan_shards(spec: str) -> Listing:
    """All images of all shards with their labels, before any pixel is read."""
    shards = expand(spec)
    absent = [shard for shard in shards if not os.path.isfile(shard)]
    if absent or not shards:
        raise DataError(
            f"{len(absent)} of {len(shards)} shards of {spec} are missing, the first {absent[0] if absent else spec}"
        )
    with ThreadPoolExecutor(SCANNERS) as pool:  # they wait for storage, not for each other
        indexed = list(pool.map(_indexed, shards))
    items: list[Item] = []
    labels: list[str | None] = []
    bad: list[tuple[str, str]] = []
    notes: dict[str, int] = {}
    for shard, called, (status, found) in zip(shards, _called(shards), indexed, strict=True):
        own = len(os.path.basename(shard))
        for name, offset, length in found.items:
            items.append(Item(called + name[own:], shard, offset, length, status.st_size, status.st_mtime_ns))
            labels.append(found.labels.get(_key(name)))
        bad += [(called + name[own:], reason) for name, reason in found.bad]
        for what, count in found.notes.items():
            notes[what] = notes.get(what, 0) + count
    if not items:
        raise DataError(f"no images in the {len(shards)} shards of {spec}: {notes or bad or 'they are empty'}")
    return Listing(spec, items, *_labelled(labels), bad, notes)


def _called(shards: list[str]) -> list[str]:
    """What the names of each shard's members begin with: its own name, or, where two shards share one (a/0.tar and
    b/0.tar), its path from the folder that holds them all."""
    names = [os.path.basename(shard) for shard in shards]
    if len(set(names)) == len(names):
        return names
    places = [os.path.abspath(shard) for shard in shards]
    top = os.path.commonpath(places)
    return [os.path.relpath(place, top).replace(os.sep, "/") for place in places]


def _indexed(shard: str) -> tuple[os.stat_result, _Found]:
    """The index of one shard: from the cache where the shard is as it was then, else made and kept there."""
    status = os.stat(shard)
    digest = hashlib.sha256(os.path.abspath(shard).encode("utf-8", "surrogatepass")).hexdigest()[:16]
    place = cache_home() / "indexes" / f"{digest}.json.gz"
    stamp = [VERSION, status.st_size, status.st_mtime_ns]
    try:
        with gzip.open(place, "rb") as file:
            kept = json.load(file)
        if kept["stamp"] == stamp:
            bad = [(name, reason) for name, reason in kept["bad"]]
            return status, _Found([(n, o, c) for n, o, c in kept["items"]], kept["labels"], bad, kept["notes"])
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError):
        pass  # none yet, or a damaged one
    found = _index(shard)
    with contextlib.suppress(OSError):  # the index is a convenience: a cache that can't be written costs time alone
        place.parent.mkdir(parents=True, exist_ok=True)
        made = place.with_name(f"{place.name}.{os.getpid()}")
        made.write_bytes(gzip.compress(json.dumps({"stamp": stamp, **asdict(found)}).encode(), 1))
        os.replace(made, place)
    return status, found


def _index(shard: str) -> _Found:
    """The members of one shard. A cut archive gives what lies before the cut, and one bad entry."""
    found, stem, whole = _Found(), os.path.basename(shard), os.path.getsize(shard)
    try:
        with tarfile.open(shard, "r:") as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # it would keep every header it has seen
                suffix = os.path.splitext(member.name)[1].lower()
                if not member.isreg() or member.issparse():
                    found.count("members that are no plain files")
                elif member.name.startswith("/") or ".." in member.name.split("/"):
                    found.count("members that point outside")
                elif member.offset_data + member.size > whole:
                    found.bad.append((f"{stem}/{member.name}", "the archive ends before the file does"))
                elif suffix in SUFFIXES:
                    found.items.append((f"{stem}/{member.name}", member.offset_data, member.size))
                elif suffix in LABEL_SUFFIXES and member.size <= MAX_LABEL:
                    content, key = tar.extractfile(member), f"{stem}/{_key(member.name)}"
                    if content is not None and (suffix == ".cls" or key not in found.labels):
                        found.labels[key] = content.read().decode("utf-8", "replace").strip()
                elif suffix not in IGNORED_SUFFIXES:
                    found.count("members of other kinds")
            # tarfile takes a cut or damaged header for the end: the end is a block of zeros.
            if not _is_end(shard, tar.offset):
                found.bad.append((stem, "the archive is cut or damaged: it has no end"))
    except (tarfile.TarError, OSError, EOFError) as error:
        found.bad.append((stem, f"the archive is cut or damaged: {error}"))
    return found


def _is_end(shard: str, offset: int) -> bool:
    with open(shard, "rb") as file:
        file.seek(offset)
        return file.read(tarfile.BLOCKSIZE) == b"\0" * tarfile.BLOCKSIZE


def _key(name: str) -> str:
    """WebDataset's key: up to the first dot of the last part of the name."""
    folder, _, last = name.rpartition("/")
    return f"{folder}/{last.split('.', 1)[0]}" if folder else last.split(".", 1)[0]


def _labelled(given: list[str | None]) -> tuple[np.ndarray | None, list[str] | None]:
    """Labels where every image has one, whole numbers as they are, words in alphabetical order."""
    if any(label is None for label in given) or len(set(given)) < 2:
        return None, None
    words = [str(label) for label in given]
    if all(word.isdecimal() and int(word) < 1_000_000 for word in words):
        numbers = np.array([int(word) for word in words], dtype=np.int64)
        return numbers, [str(i) for i in range(int(numbers.max()) + 1)]
    classes = sorted(set(words))
    position = {word: i for i, word in enumerate(classes)}
    return np.array([position[word] for word in words], dtype=np.int64), classes
