"""Decode once: a listing or an image set into a packed store, with all cores; a cut packing goes on where it ended.

A store is made in a folder beside its place. One that has the place already, of older images or damaged, keeps it until
the new one is whole.
"""

from __future__ import annotations

import contextlib
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
from typing import IO, Any

import numpy as np

from kontrast.data.decode import PLAIN, Limits
from kontrast.data.decode_workers import decode_all
from kontrast.data.listing import Listing
from kontrast.data.pack_journal import Journal
from kontrast.data.store import MANIFEST, VERSION, DamagedStore, digest_of, is_store, open_store, read_manifest
from kontrast.errors import DataError, EnvironmentFault, printable

ProgressCallback = Callable[[int, int], None]
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
    if len(bad) == total:
        raise none_read(bad, where)
    shown = "; ".join(f"{printable(name)} ({reason})" for name, reason in bad[:10])
    more = f"; and {len(bad) - 10} more" if len(bad) > 10 else ""
    enough = math.ceil(100 * len(bad) / total) / 100
    raise DataError(
        f"{len(bad)} of {total} images in {where} are bad, over the {max_bad:.0%} allowed ({share} images, "
        f"or {handful} of mixed kinds; {alike} are '{reason}'): {shown}{more}. "
        f"Repair or remove them, or allow as many with --max-bad {enough:g} (in a recipe: data.max_bad={enough:g})"
    )


def judge(listing: Listing, bad: list[tuple[str, str]], max_bad: float) -> None:
    """Stop where too much is bad of all that lies in one place: chance may put what is bad into the smaller part."""
    found = list(dict.fromkeys([*bad, *listing.beside]))
    check_bad(found, listing.whole or len(listing.items) + len(listing.bad), max_bad, listing.root)


def none_read(bad: list[tuple[str, str]], where: str) -> DataError:
    """No share that is allowed would help."""
    name, reason = bad[0]
    return DataError(f"none of the {len(bad)} images in {where} could be read: {printable(name)} ({reason}), ...")


def _kind(reason: str) -> str:
    """A reason without what differs from file to file: numbers, and names in quotes or brackets."""
    return re.sub(r"\d+", "N", re.sub(r"\(.*\)|<.*>|'.*'|b'.*", "", reason)).strip()


def pack_listing(
    listing: Listing,
    out: Path,
    facts: dict[str, Any],
    origin: dict[str, Any],
    limits: Limits = PLAIN,
    max_bad: float = 0.05,
    progress: ProgressCallback | None = None,
    workers: int | None = None,
) -> Path:
    """Pack what is listed into the folder `out`, or keep it where it is whole and made from the same files.

    facts: its name, split and whether there is a test part; origin: by what it can be found and packed again.
    """
    key = digest_of({"version": VERSION, "files": listing.fingerprint, "limits": asdict(limits), "facts": facts})
    with _locked(out), _disk_faults(out):
        if _is_done(out, key):
            return out
        work = out.with_name(out.name + ".part")
        journal = Journal(work, key)
        bad = _decode_into(journal, listing, limits, max_bad, progress, workers)
        kept = journal.kept(CHUNK)
        names = [listing.items[i].name for i in kept]
        labels = None if listing.labels is None else listing.labels[kept]
        sizes = np.array([s for line in journal.lines for s in line["sizes"]], dtype="<i8")
        facts = {**facts, "classes": listing.classes, "notes": journal.notes(listing), "channels": 3, "key": key}
        facts |= {"fingerprint": listing.fingerprint, "origin": origin}
        stamps = {"stamps.i64": listing.stamps[kept].astype("<i8").tobytes()}
        _finish(work, out, facts, journal.chunks(), sizes, names, labels, bad, stamps)
    return out


def _decode_into(journal: Journal, listing: Listing, limits: Limits, max_bad: float, progress: ProgressCallback | None,
                 workers: int | None) -> list[tuple[str, str]]:  # fmt: skip
    """Decode what the journal has not yet, as long as not too much is bad; what is. A journal without an image, from
    which nothing can go on, does not stay."""
    total = len(listing.items)
    try:
        with journal:
            for number, chunk in decode_all(listing.items, limits, CHUNK, workers, start=len(journal.lines)):
                journal.append(chunk)
                if chunk.bad:
                    judge(listing, journal.bad(listing, CHUNK), max_bad)
                if progress:
                    progress(min((number + 1) * CHUNK, total), total)
        bad = journal.bad(listing, CHUNK)
        judge(listing, bad, max_bad)
        if not journal.kept(CHUNK):
            raise none_read(bad, listing.root)
    except DataError:
        if not journal.kept(CHUNK):
            shutil.rmtree(journal.work, ignore_errors=True)
        raise
    return bad


def _is_done(out: Path, key: str) -> bool:
    """Whether a whole store of the same files and limits is there; another, or a damaged one, waits for `_exchange`."""
    replaced = _replaced(out)
    if is_store(replaced) and not out.exists():  # a kill between the two renames
        os.rename(replaced, out)
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
    return False


def _exchange(work: Path, out: Path) -> None:
    """Give a whole store its place; the one that had it before goes only now."""
    replaced = _replaced(out)
    shutil.rmtree(replaced, ignore_errors=True)
    if out.exists():
        os.rename(out, replaced)
    os.rename(work, out)
    shutil.rmtree(replaced, ignore_errors=True)


def _replaced(out: Path) -> Path:
    return out.with_name(out.name + ".replaced")


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
    _exchange(work, out)


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """One packer a place: a second waits, then finds the work done. Where nothing came to be, nothing stays."""
    place, made = out.with_name(out.name + ".lock"), not out.parent.exists()
    with _lock(out, place):
        try:
            yield
        finally:
            if not any(path.exists() for path in (out, out.with_name(out.name + ".part"), _replaced(out))):
                with contextlib.suppress(OSError):  # others have come to the folder
                    place.unlink()
                    if made:
                        out.parent.rmdir()


def _lock(out: Path, place: Path) -> IO[str]:
    """The lock's file, locked. One that was removed while we waited for it locks nothing, and another is made."""
    import fcntl

    while True:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            lock = open(place, "w")  # noqa: SIM115
            fcntl.flock(lock, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock.fileno()), os.stat(place)):
                    return lock
            lock.close()
        except OSError as error:
            raise EnvironmentFault(
                f"can't write the packed store {out}: {error.strerror or error}; set KONTRAST_CACHE or data.pack=false"
            ) from None


@contextlib.contextmanager
def _disk_faults(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentFault(
            f"writing the packed store {out}: {error.strerror or error}; what is done is kept and resumed"
        ) from None


def pack_images(images: Any, out: Path, facts: dict[str, Any], origin: dict[str, Any] | None, size: int | None = None,
                progress: ProgressCallback | None = None) -> Path:  # fmt: skip
    """Pack an image set that is decoded already: a named set, the embedded one, or images of the user's program."""
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
                content = _bytes_of(images.images, range(start, min(start + CHUNK, total)))
                file.write(content)
                chunks.append((len(content), hashlib.sha256(content).hexdigest()))
                if progress:
                    progress(min(start + CHUNK, total), total)
        sizes = np.array([images.images[i].shape[-2:] for i in range(total)])
        labels = None if images.labels is None else images.labels.numpy()
        made = (
            {"factors.safetensors": save({k: v.contiguous() for k, v in images.factors.items()})}
            if images.factors
            else {}
        )
        facts = {**facts, "key": key, "fingerprint": images.fingerprint, "origin": origin}
        _finish(work, out, facts, chunks, sizes, list(images.names), labels, images.bad, made)
    return out


def _bytes_of(pictures: Any, positions: range) -> bytes:
    return b"".join(pictures[i].contiguous().numpy().tobytes() for i in positions)
