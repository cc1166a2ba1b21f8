"""List the images of tar shards in WebDataset's layout, in which the members of a sample share a key: `000042.jpg` and
`000042.cls`, and if captions are wanted `000042.txt` or `000042.json`.

A shard is indexed once, in the cache, and read by offset. Nothing is extracted or unpickled, no member's name becomes a
path, and shards are files or objects at addresses, never commands.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import json
import math
import os
import re
import tarfile
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import BinaryIO, cast

import numpy as np

from kontrast.addresses import absolute, is_address
from kontrast.data.cache_folder import cache_home
from kontrast.data.captions import TEXT_COLUMNS, Pair, clean, with_captions
from kontrast.data.decode import SUFFIXES
from kontrast.data.file_columns import Columns, Items, Shards, Texts
from kontrast.data.folder_walk import entries, first_image
from kontrast.data.listing import Listing
from kontrast.data.remote_files import HeaderFile, Refused, State, state_of
from kontrast.data.remote_listing import list_objects
from kontrast.errors import DataError, EnvironmentFault, UsageError, printable
from kontrast.files import write_atomic

LABEL_SUFFIXES = (".cls", ".txt")
IGNORED_SUFFIXES = (".json",)
CAPTION_SUFFIXES = (".txt", ".json")
MAX_LABEL, MAX_JSON = 4096, 1 << 20
MAX_SHARDS = 1_000_000
SCANNERS = 8
VERSION = 2
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


@dataclass
class ShardIndex:
    """The content of a shard: (name, offset, length) of its images, labels by key, bad members, what was skipped, and
    captions by key, each with the reason if it is bad."""

    items: list[tuple[str, int, int]] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    bad: list[tuple[str, str]] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    captions: dict[str, list[tuple[str | None, str]]] = field(default_factory=dict)


def is_shards(spec: str) -> bool:
    """Whether a source is tar files. A folder with tar files and images is refused: it may be a set of images beside
    the archive that they came in."""
    if os.path.isdir(spec):
        tar = next((entry.name for entry in entries(spec) if entry.name.endswith(".tar")), None)
        if tar is not None and (picture := first_image(spec)) is not None:
            raise both_kinds(spec, tar, picture)
        return tar is not None
    return names_shards(spec)


def names_shards(spec: str) -> bool:
    """Whether a source that is no folder names tar files."""
    return spec.endswith(".tar") or spec.startswith("pipe:") or bool(_BRACES.search(spec))


def both_kinds(spec: str, tar: str, picture: str) -> DataError:
    """The error about a folder with a tar file and a picture."""
    return DataError(
        f"{spec} contains both shards ({printable(tar)}) and images ({printable(picture)}): name the shards "
        f"themselves ({spec}/NAME-{{000..099}}.tar), or move the .tar files elsewhere"
    )


def expand(spec: str) -> list[str]:
    """The shards that a tar file, a folder of tar files or `train-{0000..0099}.tar` means, in order."""
    if spec.startswith("pipe:"):
        raise UsageError(f"{spec!r}: shards are files or addresses; commands are not run")
    if os.path.isdir(spec):
        return sorted(entry.path for entry in entries(spec) if entry.name.endswith(".tar") and entry.is_file())
    if is_address(spec) and not names_shards(spec):
        return [f"{spec}/{name}" for name in list_objects(spec).names if name.endswith(".tar") and "/" not in name]
    return expand_braces(spec)


def expand_braces(spec: str) -> list[str]:
    """What a pattern such as `train-{0000..0099}.tar` means, in order."""
    total = math.prod(max(0, int(high) - int(low) + 1) for low, high in _BRACES.findall(spec))
    if not 0 < total <= MAX_SHARDS:
        raise UsageError(f"the ranges in {spec!r}: give increasing ones, and at most {MAX_SHARDS:,} shards in all")
    paths = [spec]
    while match := _BRACES.search(paths[0]):
        low, high = match.groups()
        numbers = [str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)]
        paths = [_BRACES.sub(n, path, count=1) for path in paths for n in numbers]
    return paths


def scan_shards(spec: str, captions: bool = False) -> Listing:
    """List all images of all shards with their labels, and with their captions if they are wanted."""
    shards = expand(spec)
    with ThreadPoolExecutor(SCANNERS) as pool:  # they mostly wait for storage
        states = list(pool.map(_state, shards))
        missing = [shard for shard, state in zip(shards, states) if state is None]
        if missing:
            raise DataError(f"{len(missing)} of {len(shards)} shards of {spec} are missing, the first {missing[0]}")
        indexed = list(pool.map(partial(_load_index, captions=captions), shards, cast(list[State], states)))
    prefixes = _name_prefixes(shards)
    pairs: list[Pair] = []
    labels: list[str | None] = []
    bad: list[tuple[str, str]] = []
    notes: Counter[str] = Counter()
    for shard, prefix, (_, found) in zip(shards, prefixes, indexed, strict=True):
        stem = len(os.path.basename(shard))
        for name, _, _ in found.items:
            labels.append(found.labels.get(_key(name)))
            pairs += [(prefix + name[stem:], text, why) for text, why in found.captions.get(_key(name), [])]
        bad += [(prefix + name[stem:], reason) for name, reason in found.bad]
        notes.update(found.notes)
    if not labels:
        raise DataError(f"no images in the {len(shards)} shards of {spec}: {dict(notes) or bad or 'they are empty'}")
    listing = Listing(spec, Items(_columns(shards, prefixes, indexed)), *number_labels(labels), bad, notes)
    return with_captions(listing, pairs) if captions else listing


def _columns(shards: list[str], prefixes: list[str], indexed: list[tuple[State, ShardIndex]]) -> Columns:
    """Where the members that are images lie."""
    stems = [len(os.path.basename(shard)) for shard in shards]
    base = Texts.of(name[stem:] for stem, (_, found) in zip(stems, indexed) for name, _, _ in found.items)
    counts = [len(found.items) for _, found in indexed]
    folder = np.repeat(np.arange(len(shards), dtype=np.int32), counts)
    places = np.array([member[1:] for _, found in indexed for member in found.items], np.int64)
    states = np.array([state for state, _ in indexed], np.int64)
    archives = Shards(shards, states[:, 0], states[:, 1])
    return Columns(base, folder, places[:, 0].copy(), places[:, 1].copy(), prefixes, shards=archives)


def _name_prefixes(shards: list[str]) -> list[str]:
    """The beginning of the image names of each shard: its file name or, if two shards share one (a/0.tar and b/0.tar),
    its path relative to their common folder."""
    names = [os.path.basename(shard) for shard in shards]
    if len(set(names)) == len(names):
        return names
    places = [os.path.abspath(shard.rpartition("://")[2]) for shard in shards]
    top = os.path.commonpath(places)
    return [os.path.relpath(place, top).replace(os.sep, "/") for place in places]


def _state(shard: str) -> State | None:
    """The size and date of a shard, or the version of one at an address; None if there is no such file."""
    if not is_address(shard):
        status = os.stat(shard) if os.path.isfile(shard) else None
        return None if status is None else State(status.st_size, status.st_mtime_ns)
    try:
        return state_of(shard)
    except Refused as error:
        if error.errno == errno.ENOENT:
            return None
        raise DataError(f"can't read {shard}: {error.reason}") from None


def _load_index(shard: str, state: State, captions: bool) -> tuple[State, ShardIndex]:
    """The index of a shard, from the cache if the shard has not changed since; else it is made and cached."""
    digest = hashlib.sha256(absolute(shard).encode("utf-8", "surrogatepass")).hexdigest()[:16]
    place = cache_home() / "indexes" / f"{digest}{'-captions' * captions}.json.gz"
    stamp = [VERSION, *state]
    try:
        with gzip.open(place, "rb") as file:
            cached = json.load(file)
        if cached["stamp"] == stamp:
            bad = [(name, reason) for name, reason in cached["bad"]]
            texts = {key: [(text, why) for text, why in all_of] for key, all_of in cached.get("captions", {}).items()}
            return state, ShardIndex(cached["items"], cached["labels"], bad, cached["notes"], texts)
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError):
        pass  # there is none yet, or it is damaged
    with _open_shard(shard, state) as file:
        found = _index(os.path.basename(shard), file, state.size, captions)
    with contextlib.suppress(OSError, EnvironmentFault):  # without a cache, shards are only indexed every time
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(place, gzip.compress(json.dumps({"stamp": stamp, **vars(found)}).encode(), 1))
    return state, found


def _open_shard(shard: str, state: State) -> BinaryIO:
    return cast(BinaryIO, HeaderFile(shard, state)) if is_address(shard) else open(shard, "rb")


def _index(stem: str, file: BinaryIO, whole: int, captions: bool) -> ShardIndex:
    """Index the members of a shard from its headers and labels alone; their names begin with `stem`.

    An archive that is cut short gives what comes before the cut, and one bad entry.
    """
    found = ShardIndex()
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # otherwise it keeps every header in memory
                suffix = os.path.splitext(member.name)[1].lower()
                if not member.isreg() or member.issparse():
                    found.notes["members that are no plain files"] += 1
                elif member.name.startswith("/") or ".." in member.name.split("/"):
                    found.notes["members that point outside"] += 1
                elif member.offset_data + member.size > whole:
                    found.bad.append((f"{stem}/{member.name}", "the archive ends before the file does"))
                elif suffix in SUFFIXES:
                    found.items.append((f"{stem}/{member.name}", member.offset_data, member.size))
                elif captions and suffix in CAPTION_SUFFIXES and member.size <= MAX_JSON:
                    content, key = tar.extractfile(member), f"{stem}/{_key(member.name)}"
                    found.captions.setdefault(key, []).extend(_captions(content.read() if content else b"", suffix))
                elif suffix in LABEL_SUFFIXES and member.size <= MAX_LABEL:
                    content, key = tar.extractfile(member), f"{stem}/{_key(member.name)}"
                    if content is not None and (suffix == ".cls" or key not in found.labels):
                        found.labels[key] = content.read().decode("utf-8", "replace").strip()
                elif suffix not in IGNORED_SUFFIXES:
                    found.notes["members of other kinds"] += 1
            # tarfile takes a damaged header for the end of the archive; the real end is a block of zeros.
            file.seek(tar.offset)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                found.bad.append((stem, "the archive is cut or damaged: it has no end"))
    except (tarfile.TarError, OSError, EOFError) as error:
        found.bad.append((stem, f"the archive is cut or damaged: {error}"))
    return found


def _captions(content: bytes, suffix: str) -> list[tuple[str | None, str]]:
    """The captions of a member: each line of a .txt, or "caption" (text or a list) of a .json; with why one is bad."""
    text = content.decode("utf-8", "replace")
    if suffix == ".txt":
        return [clean(line) for line in text.splitlines() if line.strip()] or [clean(text)]
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return [(None, "its .json can't be read")]
    known = tree if isinstance(tree, dict) else {}
    found = next((known[key] for key in TEXT_COLUMNS if known.get(key) is not None), None)
    return [] if found is None else [clean(one) for one in (found if isinstance(found, list) else [found])]


def _key(name: str) -> str:
    """WebDataset's key: the name up to the first dot after the last slash."""
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.split(".", 1)[0]


def number_labels(given: list[str | None]) -> tuple[np.ndarray | None, list[str] | None]:
    """Labels and class names, if every image has a label: numbers stay, words are numbered alphabetically."""
    if any(label is None for label in given) or len(set(given)) < 2:
        return None, None
    words = [str(label) for label in given]
    if all(word.isdecimal() and int(word) < 1_000_000 for word in words):
        numbers = np.array([int(word) for word in words], dtype=np.int64)
        return numbers, [str(i) for i in range(int(numbers.max()) + 1)]
    classes = sorted(set(words))
    position = {word: i for i, word in enumerate(classes)}
    return np.array([position[word] for word in words], dtype=np.int64), classes
