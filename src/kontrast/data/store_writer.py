"""Write packed stores: a listing is decoded, once and with all cores, or decoded images are copied.

A store is written in the folder OUT.part and renamed when it is complete; until then, a store that is already there
stays. An interrupted packing continues where it stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kontrast.data.bad_images import check_listing, none_readable
from kontrast.data.captions import Captions
from kontrast.data.decode_workers import decode_all
from kontrast.data.image_set import ImageSet
from kontrast.data.limits import Form
from kontrast.data.listing import Listing
from kontrast.data.pack_journal import Journal
from kontrast.data.source_files import Options
from kontrast.data.store import (
    MANIFEST,
    VERSION,
    DamagedStore,
    digest_of,
    is_store,
    open_store,
    pixels_name,
    read_manifest,
)  # fmt: skip
from kontrast.errors import DataError, EnvironmentFault
from kontrast.files import disk_faults, exchange_folder, remove_folder, replaced_folder, sync, take_lock

CHUNK = 256
Facts = dict[str, Any]


def pack_split(
    found: ImageSet | Listing, out: Path, facts: Facts, origin: Facts | None, options: Options | None = None
) -> Path:
    """Write the images of one split into the folder `out`, unless a complete store of the same images is there.

    Args:
        found: the images, or a listing of them that is decoded.
        out: the folder of the split; its parents are created.
        facts: what the manifest records first: name, split and has_test.
        origin: what the manifest records about the source, so that a damaged store can be packed again; or None.
        options: limits of decoding, max_bad, workers and progress.
    """
    options = options or Options()
    if isinstance(found, Listing):
        form = options.limits.made
        more = {"classes": found.classes, "notes": found.notes, **form_facts(form)}
        key = digest_of(
            {"version": VERSION, "files": found.fingerprint, "limits": options.limits.facts(), "facts": facts}
        )
    else:
        if options.limits.bound is not None and found.typical_side > options.limits.bound:
            raise DataError(f"{facts['name']} is {found.typical_side} px and is packed as it is: leave the size out")
        form = Form(str(found.dtype).removeprefix("torch."), found.channels, found.color)
        more = {"classes": found.classes, "notes": found.notes, **form_facts(form)}
        key = digest_of({"version": VERSION, "files": found.fingerprint, "facts": {**facts, **more}})
    with _locked(out):
        if not _is_complete(out, key):
            facts = {**facts, **more, "key": key, "fingerprint": found.fingerprint, "origin": origin}
            if isinstance(found, Listing):
                _write_listing(found, out, facts, options)
            else:
                _write_images(found, out, facts, options)
    return out


def form_facts(form: Form) -> Facts:
    """What a manifest records about the form of images; only their channels if they are ordinary in all else."""
    dtype = {"dtype": form.dtype} if form.dtype != "uint8" else {}
    return {"channels": form.channels, **dtype, **({} if form.color else {"color": False})}


def remove_split(out: Path) -> None:
    """Remove a split that its source no longer has. It is renamed first, so that half of one is never opened."""
    old, doomed = replaced_folder(out), out.with_name(f".del-{out.name}")
    if not any(path.exists() for path in (out, old, doomed)):
        return
    with _locked(out):
        remove_folder(doomed)
        remove_folder(old)
        if is_store(out):
            os.rename(out, doomed)
            remove_folder(doomed)


def _write_listing(listing: Listing, out: Path, facts: Facts, options: Options) -> None:
    """Decode what an interrupted packing has not decoded yet, and finish the store."""
    journal = Journal(_work_folder(out), facts["key"], len(listing.items), CHUNK, options.limits.made)
    bad = _decode_into(journal, listing, options)
    kept = listing.take(np.array(journal.kept()))
    sizes = np.array([s for line in journal.lines for s in line["sizes"]])
    stamps = {"stamps.i64": kept.stamps.astype("<i8").tobytes(), **captions_file(kept.captions)}
    facts = {**facts, "notes": journal.notes(listing)}
    _finish(out, facts, journal.chunks(), sizes, kept.items.names, kept.labels, bad, stamps)


def _decode_into(journal: Journal, listing: Listing, options: Options) -> list[tuple[str, str]]:
    """Decode what the journal does not have yet and return the bad images. A journal without any image is removed."""
    total = len(listing.items)
    try:
        with journal:
            start = len(journal.lines)
            for number, chunk in decode_all(listing.items, options.limits, CHUNK, options.workers, start):
                journal.append(chunk)
                if chunk.bad:
                    check_listing(listing, journal.bad(listing), options.max_bad)
                if options.progress:
                    options.progress(min((number + 1) * CHUNK, total), total)
        bad = journal.bad(listing)
        check_listing(listing, bad, options.max_bad)
        if not journal.kept():
            raise none_readable(bad, listing.root)
        return bad
    finally:
        if not journal.kept():
            remove_folder(journal.work)


def _write_images(images: ImageSet, out: Path, facts: Facts, options: Options) -> None:
    """Copy images that are decoded already into a store."""
    from safetensors.torch import save

    work = _work_folder(out)
    remove_folder(work)
    work.mkdir(parents=True)
    chunks, sizes, total = [], [], len(images)
    with open(work / pixels_name(facts), "wb") as file:
        for start in range(0, total, CHUNK):
            one_chunk = [images.images[i] for i in range(start, min(start + CHUNK, total))]
            content = b"".join(image.contiguous().numpy().tobytes() for image in one_chunk)
            file.write(content)
            chunks.append((len(content), hashlib.sha256(content).hexdigest()))
            sizes += [image.shape[1:] for image in one_chunk]
            if options.progress:
                options.progress(min(start + CHUNK, total), total)
    labels = None if images.labels is None else images.labels.numpy()
    factors = {name: values.contiguous() for name, values in images.factors.items()}
    extra = {"factors.safetensors": save(factors)} if factors else {}
    extra |= captions_file(images.captions)
    _finish(out, facts, chunks, np.array(sizes), images.names, labels, images.bad, extra)


def captions_file(captions: Captions | None) -> dict[str, bytes]:
    """The file of captions, by its name; nothing if there are none."""
    return {} if captions is None else {"captions.json": json.dumps(captions.per_image()).encode()}


def _is_complete(out: Path, key: str) -> bool:
    """Whether there is a complete store of the same files and limits. A damaged or different store stays for now."""
    old = replaced_folder(out)
    if is_store(old) and not out.exists():  # a process was killed between the two renames of `exchange_folder`
        os.rename(old, out)
    if not out.exists():
        return False
    remove_folder(old)  # what the last exchange could not remove
    if not is_store(out):
        raise EnvironmentFault(f"{out} exists and is not a packed store: give another place, or remove it")
    with contextlib.suppress(DamagedStore):
        if read_manifest(out)["key"] == key:
            open_store(out)
            return True
    return False


def _work_folder(out: Path) -> Path:
    return out.with_name(out.name + ".part")


def _finish(
    out: Path, facts: Facts, chunks: list, sizes: np.ndarray, names: Sequence[str],
    labels: np.ndarray | None, bad: list[tuple[str, str]], extra: dict[str, bytes],
) -> None:  # fmt: skip
    """Write everything but the pixels, the manifest last, and rename the folder."""
    work = _work_folder(out)
    small = {
        "sizes.i64": sizes.astype("<i8").tobytes(),
        "names.json": json.dumps(list(names)).encode(),
        "bad.jsonl": "".join(json.dumps({"name": n, "reason": r}) + "\n" for n, r in bad).encode(),
        **extra,
    }
    if labels is not None:
        small["labels.i64"] = labels.astype("<i8").tobytes()
    pixels = pixels_name(facts)
    files: dict[str, Any] = {pixels: {"bytes": (work / pixels).stat().st_size}}
    for name, content in small.items():
        (work / name).write_bytes(content)
        sync(work / name)
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    body = {"version": VERSION, **facts, "count": len(names), "files": files, "chunks": chunks}
    body = json.loads(json.dumps(body))
    (work / MANIFEST).write_bytes(json.dumps({**body, "self": digest_of(body)}).encode())
    sync(work / MANIFEST)
    (work / "journal.jsonl").unlink(missing_ok=True)
    exchange_folder(work, out)


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """One process packs into a folder at a time; a second waits and then finds the work done.

    If nothing was written, the lock file and a parent folder that was created for it are removed again.
    """
    lock, created, handle = out.with_name(out.name + ".lock"), not out.parent.exists(), None
    with disk_faults(out, advice="set KONTRAST_CACHE or data.pack=false"):
        while handle is None:
            out.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # a packing that failed removed its folder meanwhile
                handle = take_lock(lock)
    try:
        with disk_faults(out):
            yield
    finally:
        if not any(path.exists() for path in (out, _work_folder(out), replaced_folder(out))):
            with contextlib.suppress(OSError):  # the parent folder may have other content by now
                lock.unlink()
                if created:
                    out.parent.rmdir()
        with contextlib.suppress(OSError):  # it is closed even if an error is reported
            os.close(handle)
