"""Decode once: a listing or an image set into a packed store, with all cores; a cut packing goes on where it ended.

Pixels are appended chunk by chunk to one file; after each chunk a line in the journal says how far it reaches and what
its SHA-256 is. A second run reads the journal, checks the pixels, drops what follows the last whole chunk, and goes on.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kontrast.data.decode import PLAIN, Limits
from kontrast.data.listing import Listing
from kontrast.data.store import MANIFEST, VERSION, DamagedStore, digest_of, is_store, open_store, read_manifest
from kontrast.data.workers import Chunk, decode_all
from kontrast.registry import DataError, EnvironmentFault, printable

Progress = Callable[[int, int], None]
"""Called with images done and images in all."""
CHUNK = 256


def skipped(bad: list[tuple[str, str]], total: int, what: str = "images") -> str:
    """How many were left out, and the first of them."""
    shown = ", ".join(f"{printable(name)} ({reason})" for name, reason in bad[:3])
    return f"skipped {len(bad)} of {total} {what}: {shown}{' ...' if len(bad) > 3 else ''}"


def check_bad(bad: list[tuple[str, str]], total: int, max_bad: float, where: str) -> None:
    """Stop where more than the share `max_bad` of all images is bad, with the list.

    A mixed handful passes up to three times the share, as long as no one reason is behind more than the share: a few
    unrelated strays in a small folder are no fault of the folder, many files that fail alike are.
    """
    share, handful = (int(times * max_bad * total + 1e-9) for times in (1, 3))  # 0.29 x 100 is 28.999...
    if len(bad) <= share:
        return
    reason, alike = Counter(_kind(reason) for _, reason in bad).most_common(1)[0]
    if len(bad) <= handful and alike <= share:
        return
    shown = "; ".join(f"{printable(name)} ({reason})" for name, reason in bad[:10])
    more = f"; and {len(bad) - 10} more" if len(bad) > 10 else ""
    enough = math.ceil(100 * len(bad) / total) / 100
    raise DataError(
        f"{len(bad)} of {total} images in {where} are bad, over the {max_bad:.0%} allowed ({share} images, "
        f"or {handful} of mixed kinds; {alike} are '{reason}'): {shown}{more}. "
        f"Repair or remove them, or allow as many with --max-bad {enough:g} (in a recipe: data.max_bad={enough:g})"
    )


def _kind(reason: str) -> str:
    """A reason without what differs from file to file: numbers, and names in quotes or brackets."""
    return re.sub(r"\d+", "N", re.sub(r"\(.*\)|<.*>|'.*'|b'.*", "", reason)).strip()


def pack_listing(
    listing: Listing,
    out: Path,
    facts: dict[str, Any],
    limits: Limits = PLAIN,
    max_bad: float = 0.05,
    progress: Progress | None = None,
    workers: int | None = None,
) -> Path:
    """Pack what is listed into the folder `out`, or keep it where it is whole and made from the same files."""
    key = digest_of({"version": VERSION, "files": listing.fingerprint, "limits": asdict(limits), "facts": facts})
    with _locked(out), _disk_faults(out):
        if _is_done(out, key):
            return out
        work = out.with_name(out.name + ".part")
        journal = Journal(work, key)
        total = len(listing.items)
        with journal:
            for number, chunk in decode_all(listing.items, limits, CHUNK, workers, start=len(journal.lines)):
                journal.append(chunk)
                if chunk.bad:
                    check_bad(journal.bad(listing, CHUNK), total + len(listing.bad), max_bad, listing.root)
                if progress:
                    progress(min((number + 1) * CHUNK, total), total)
        bad = journal.bad(listing, CHUNK)
        check_bad(bad, total + len(listing.bad), max_bad, listing.root)
        kept = journal.kept(CHUNK)
        if not kept:
            raise DataError(
                f"none of the {total} images in {listing.root} could be read: {bad[0][0]} ({bad[0][1]}), ..."
            )
        names = [listing.items[i].name for i in kept]
        labels = None if listing.labels is None else listing.labels[kept]
        sizes = np.array([s for line in journal.lines for s in line["sizes"]], dtype="<i8")
        facts = {**facts, "classes": listing.classes, "notes": journal.notes(listing), "channels": 3, "key": key}
        facts["fingerprint"] = listing.fingerprint
        stamps = {"stamps.i64": listing.stamps[kept].astype("<i8").tobytes()}
        _finish(work, out, facts, journal.chunks(), sizes, names, labels, bad, stamps)
    return out


class Journal:
    """The pixels so far and what is known of them; opening it goes on with a cut packing of the same files."""

    def __init__(self, work: Path, key: str):
        self.work, self.key = work, key
        self.pixels: BinaryIO
        self.lines: list[dict[str, Any]] = []
        work.parent.mkdir(parents=True, exist_ok=True)
        if work.is_dir():
            self.lines = self._read()
            if not self.lines:
                shutil.rmtree(work)
        work.mkdir(exist_ok=True)

    def _read(self) -> list[dict[str, Any]]:
        """The lines whose pixels are there, whole and unchanged, up to the first that are not."""
        good: list[dict[str, Any]] = []
        try:
            text = (self.work / "journal.jsonl").read_text().splitlines()
            if not text or json.loads(text[0]) != {"key": self.key}:
                return []
            with open(self.work / "images.u8", "rb") as file:
                for line in map(json.loads, text[1:]):
                    if hashlib.sha256(file.read(line["bytes"])).hexdigest() != line["sha256"]:
                        break
                    good.append(line)
        except (OSError, ValueError, KeyError):
            pass  # a line that was cut: the chunks before it count
        return good

    def __enter__(self) -> Journal:
        end = sum(line["bytes"] for line in self.lines)
        images = self.work / "images.u8"
        images.touch()
        os.truncate(images, end)
        self.pixels = open(images, "ab")
        self.text = open(self.work / "journal.jsonl", "w")
        self.text.write(json.dumps({"key": self.key}) + "\n")
        for line in self.lines:
            self.text.write(json.dumps(line) + "\n")
        self.text.flush()
        return self

    def append(self, chunk: Chunk) -> None:
        self.pixels.write(chunk.pixels)
        self.pixels.flush()
        line = {
            "bytes": len(chunk.pixels),
            "sha256": hashlib.sha256(chunk.pixels).hexdigest(),
            "sizes": chunk.sizes,
            "kept": chunk.kept,
            "bad": chunk.bad,
            "notes": chunk.notes,
        }
        self.lines.append(line)
        self.text.write(json.dumps(line) + "\n")
        self.text.flush()

    def __exit__(self, *_: object) -> None:
        for file in (self.pixels, self.text):
            os.fsync(file.fileno())
            file.close()

    def bad(self, listing: Listing, chunk: int) -> list[tuple[str, str]]:
        found = [
            (listing.items[n * chunk + position].name, reason)
            for n, line in enumerate(self.lines)
            for position, reason in line["bad"]
        ]
        return listing.bad + found

    def notes(self, listing: Listing) -> dict[str, int]:
        counts = dict(listing.notes)
        for line in self.lines:
            for what, count in line["notes"].items():
                counts[what] = counts.get(what, 0) + count
        return counts

    def kept(self, chunk: int) -> list[int]:
        return [n * chunk + position for n, line in enumerate(self.lines) for position in line["kept"]]

    def chunks(self) -> list[tuple[int, str]]:
        return [(line["bytes"], line["sha256"]) for line in self.lines]


def _is_done(out: Path, key: str) -> bool:
    """Whether a whole store of the same files and limits is there; another or a damaged one is moved out of the way."""
    if not out.exists():
        return False
    if not is_store(out):
        raise EnvironmentFault(f"{out} exists and is no packed store: give another place, or remove it")
    try:
        if read_manifest(out)["key"] == key:
            open_store(out)
            return True
    except DamagedStore:
        pass
    shutil.rmtree(out)
    return False


def _finish(
    work: Path, out: Path, facts: dict[str, Any], chunks: list, sizes: np.ndarray, names: list[str],
    labels: np.ndarray | None, bad: list[tuple[str, str]], extra: dict[str, bytes] | None = None,
) -> None:  # fmt: skip
    """Write everything but the pixels, the manifest last, and give the folder its name."""
    small = {
        "sizes.i64": sizes.astype("<i8").tobytes(),
        "names.json": json.dumps(names).encode(),
        "bad.jsonl": "".join(json.dumps({"name": n, "reason": r}) + "\n" for n, r in bad).encode(),
        **(extra or {}),
    }
    if labels is not None:
        small["labels.i64"] = labels.astype("<i8").tobytes()
    files: dict[str, Any] = {"images.u8": {"bytes": (work / "images.u8").stat().st_size}}
    for name, content in small.items():
        _write(work / name, content)
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    body = {"version": VERSION, **facts, "count": len(names), "files": files, "chunks": chunks}
    body = json.loads(json.dumps(body))
    _write(work / MANIFEST, json.dumps({**body, "self": digest_of(body)}).encode())
    (work / "journal.jsonl").unlink(missing_ok=True)
    os.rename(work, out)


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """One packer a place: a second waits, then finds the work done."""
    import fcntl

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = open(out.with_name(out.name + ".lock"), "w")  # noqa: SIM115
    except OSError as error:
        raise EnvironmentFault(
            f"can't write the packed store {out}: {error.strerror}; set KONTRAST_CACHE or pack=false"
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _disk_faults(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        raise EnvironmentFault(
            f"writing the packed store {out}: {error.strerror}; what is done is kept and resumed"
        ) from None


def pack_images(images: Any, out: Path, facts: dict[str, Any], size: int | None, progress: Progress | None) -> Path:
    """Pack an image set that is in memory already (a named or the embedded one)."""
    from safetensors.torch import save

    if size is not None and images.typical_side > size:
        raise DataError(f"{facts['name']} is {images.typical_side} px and is packed as it is: leave the size out")
    facts = {**facts, "classes": images.classes, "notes": images.notes, "channels": images.channels}
    key = digest_of({"version": VERSION, "files": images.fingerprint, "facts": facts})
    with _locked(out), _disk_faults(out):
        if _is_done(out, key):
            return out
        work = out.with_name(out.name + ".part")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        chunks, total = [], len(images)
        with open(work / "images.u8", "wb") as file:
            for start in range(0, total, CHUNK):
                content = images[start : start + CHUNK].contiguous().numpy().tobytes()
                file.write(content)
                chunks.append((len(content), hashlib.sha256(content).hexdigest()))
                if progress:
                    progress(min(start + CHUNK, total), total)
        sizes = np.tile(np.array(images.images.shape[-2:], dtype="<i8"), (total, 1))
        labels = None if images.labels is None else images.labels.numpy()
        made = (
            {"factors.safetensors": save({k: v.contiguous() for k, v in images.factors.items()})}
            if images.factors
            else {}
        )
        facts = {**facts, "key": key, "fingerprint": images.fingerprint}
        _finish(work, out, facts, chunks, sizes, list(images.names), labels, images.bad, made)
    return out
