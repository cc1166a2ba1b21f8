"""A packed store: decoded images of one split as memory-mapped bytes, with a manifest that tells when it is damaged.

    OUT/train/images.u8     uint8, the images end to end, each [3,h,w]
              sizes.i64     int64 [N,2], height and width          labels.i64   int64 [N], where there are labels
              stamps.i64    int64 [N], a hash of each file's place, size and date, where there were files
              names.json    N names                                bad.jsonl    a line for each skipped file
              factors.safetensors   what a made set was drawn with, where there is any
              store.json    the manifest: counts, classes, where it came from, SHA-256 of everything

The folder appears under its name only when it is whole: it is written beside it and renamed. Legend: N images.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kontrast.data.image_set import ImageSet, Ragged
from kontrast.errors import DataError, UsageError

VERSION = 1
MANIFEST = "store.json"
FULL_CHECK = 1 << 30
"""A store up to this many bytes is checked wholly when it is opened; of a larger one, every file but the pixels, and a
sample of those."""
SAMPLED_CHUNKS = 16


class DamagedStore(DataError):
    """A store whose bytes are not those of its manifest."""


def is_store(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        body = {k: v for k, v in manifest.items() if k != "self"}
        if manifest["self"] != digest_of(body) or manifest["version"] != VERSION:
            raise DamagedStore(f"{path / MANIFEST} is damaged or of another version: pack again")
        return manifest
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, DamagedStore):
            raise
        raise DamagedStore(f"{path / MANIFEST} can't be read ({type(error).__name__}): pack again") from None


def refuse_place(spec: str, out: Path) -> None:
    """A store is not written among the images it is made of, nor over one of other images."""
    if os.path.isdir(spec) and out.resolve().is_relative_to(Path(spec).resolve()):
        raise UsageError(f"{out} lies in {spec}, whose images it would join: give a place outside")
    for place in filter(is_store, (out / "train", out / "test")):
        with contextlib.suppress(DamagedStore):
            if (name := read_manifest(place)["name"]) != spec:
                raise UsageError(f"{out} is a packed store of {name}: give another place, or remove it")


def digest_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def verify(path: Path, manifest: dict[str, Any], full: bool | None = None) -> None:
    """Raise `DamagedStore` where a file is missing, has another length or, as far as is checked, other bytes."""
    for name, known in manifest["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != known["bytes"]:
            raise DamagedStore(f"{file} is missing or cut: pack again")
        if "sha256" in known and hashlib.sha256(file.read_bytes()).hexdigest() != known["sha256"]:
            raise DamagedStore(f"the checksum of {file} fails: pack again")
    chunks = manifest["chunks"]
    if full is None:
        full = manifest["files"]["images.u8"]["bytes"] <= FULL_CHECK
    step = 1 if full else max(1, len(chunks) // SAMPLED_CHUNKS)
    start = 0
    with open(path / "images.u8", "rb") as file:
        for number, (length, known) in enumerate(chunks):
            if number % step == 0:
                file.seek(start)
                if hashlib.sha256(file.read(length)).hexdigest() != known:
                    raise DamagedStore(f"the checksum of part {number} of {path / 'images.u8'} fails: pack again")
            start += length


def open_store(path: Path, full: bool | None = None) -> ImageSet:
    """The images of one packed split, memory-mapped."""
    manifest = read_manifest(path)
    verify(path, manifest, full)
    sizes = torch.from_numpy(np.fromfile(path / "sizes.i64", dtype="<i8").reshape(-1, 2))
    # Copy-on-write: torch warns of memory that is read-only, and nobody writes.
    flat = torch.from_numpy(np.memmap(path / "images.u8", dtype=np.uint8, mode="c"))
    labels = None
    if "labels.i64" in manifest["files"]:
        labels = torch.from_numpy(np.fromfile(path / "labels.i64", dtype="<i8"))
    stamps = None
    if "stamps.i64" in manifest["files"]:
        stamps = torch.from_numpy(np.fromfile(path / "stamps.i64", dtype="<i8"))
    factors = {}
    if "factors.safetensors" in manifest["files"]:
        from safetensors.torch import load

        factors = load((path / "factors.safetensors").read_bytes())
    return ImageSet(
        images=shape_up(flat, sizes, manifest["channels"]),
        names=json.loads((path / "names.json").read_text()),
        labels=labels,
        classes=manifest["classes"],
        factors=factors,
        name=manifest["name"],
        split=manifest["split"],
        has_test=manifest["has_test"],
        fingerprint=manifest["fingerprint"],
        bad=read_bad(path),
        notes=manifest["notes"],
        stamps=stamps,
        place=(manifest.get("origin") or {}).get("place", manifest["split"]),
    )


def read_bad(path: Path) -> list[tuple[str, str]]:
    """What a packed split left out."""
    lines = map(json.loads, (path / "bad.jsonl").read_text().splitlines())
    return [(line["name"], line["reason"]) for line in lines]


def shape_up(flat: torch.Tensor, sizes: torch.Tensor, channels: int) -> torch.Tensor | Ragged:
    """One tensor [N,C,H,W] where all sizes agree, else `Ragged`."""
    height, width = sizes[0].tolist()
    if bool((sizes == sizes[0]).all()):
        return flat.view(len(sizes), channels, height, width)
    return Ragged(flat, sizes, channels)
