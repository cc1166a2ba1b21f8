"""Read packed stores: the decoded images of one split as memory-mapped bytes, with a manifest of checksums.

    OUT/train/images.u8     uint8, the images end to end, each [C,h,w]
              sizes.i64     int64 [N,2], height and width
              labels.i64    int64 [N], if there are labels
              stamps.i64    int64 [N], a hash of each file's position, size and date, if the images came from files
              names.json    N names
              bad.jsonl     one line per skipped file
              factors.safetensors   how synthetic images were made, if they were
              store.json    the manifest: counts, classes, source, SHA-256 of everything

`store_writer` writes them. Legend: N images.
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

from kontrast.data.image_set import ImageSet, RaggedImages
from kontrast.errors import DataError, UsageError
from kontrast.files import read_faults, read_json_lines

VERSION = 1
MANIFEST = "store.json"
FULL_CHECK = 1 << 30
"""A store of up to this many bytes is verified completely when it is opened; of a larger one, only a sample of the
pixels is."""
SAMPLED_CHUNKS = 16


class DamagedStore(DataError):
    """A store whose bytes do not match its manifest."""


def is_store(path: Path) -> bool:
    """Whether a folder is one split of a packed store."""
    return (path / MANIFEST).is_file()


def read_manifest(path: Path) -> dict[str, Any]:
    """Read and verify the manifest of a split."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        body = {k: v for k, v in manifest.items() if k != "self"}
        if manifest["self"] == digest_of(body) and manifest["version"] == VERSION:
            return manifest
    raise DamagedStore(f"{path / MANIFEST} is damaged or of another version: pack again")


def check_destination(spec: str, out: Path) -> None:
    """Refuse to write a store among the images it is made of, or over a store of other images."""
    if os.path.isdir(spec) and out.resolve().is_relative_to(Path(spec).resolve()):
        raise UsageError(f"{out} is inside {spec}, whose images it would become a part of: give a place outside")
    for place in filter(is_store, (out / "train", out / "test")):
        with contextlib.suppress(DamagedStore):
            if (name := read_manifest(place)["name"]) != spec:
                raise UsageError(f"{out} is a packed store of {name}: give another place, or remove it")


def digest_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def verify(path: Path, manifest: dict[str, Any], full: bool | None = None) -> None:
    """Raise `DamagedStore` if a file is missing or has another length or checksum; `full` checks all pixels."""
    for name, known in manifest["files"].items():
        file = path / name
        whole = file.is_file() and file.stat().st_size == known["bytes"]
        if not whole or ("sha256" in known and hashlib.sha256(file.read_bytes()).hexdigest() != known["sha256"]):
            raise DamagedStore(f"{file} {'has a wrong checksum' if whole else 'is missing or cut'}: pack again")
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
    """Open one split of a packed store; its pixels are memory-mapped."""
    with read_faults(path):
        return _read_store(path, full)


def _read_store(path: Path, full: bool | None) -> ImageSet:
    manifest = read_manifest(path)
    verify(path, manifest, full)
    sizes = torch.from_numpy(np.fromfile(path / "sizes.i64", dtype="<i8").reshape(-1, 2))
    # Copy-on-write, although nobody writes: torch warns about read-only memory.
    flat = torch.from_numpy(np.memmap(path / "images.u8", dtype=np.uint8, mode="c"))
    there, factors = manifest["files"], {}
    labels, stamps = (
        torch.from_numpy(np.fromfile(path / name, dtype="<i8")) if name in there else None
        for name in ("labels.i64", "stamps.i64")
    )
    if "factors.safetensors" in there:
        from safetensors.torch import load

        factors = load((path / "factors.safetensors").read_bytes())
    return ImageSet(
        images=shape_images(flat, sizes, manifest["channels"]),
        names=json.loads((path / "names.json").read_text()),
        labels=labels,
        factors=factors,
        bad=read_bad(path),
        stamps=stamps,
        place=(manifest.get("origin") or {}).get("place", manifest["split"]),
        **{key: manifest[key] for key in ("classes", "name", "split", "has_test", "fingerprint", "notes")},
    )


def read_bad(path: Path) -> list[tuple[str, str]]:
    """The names of the files that packing skipped, with the reasons."""
    return [(line["name"], line["reason"]) for line in read_json_lines(path / "bad.jsonl")]


def shape_images(flat: torch.Tensor, sizes: torch.Tensor, channels: int) -> torch.Tensor | RaggedImages:
    """Flat pixels as one tensor [N,C,H,W] if all images have the same size, else as `RaggedImages`."""
    if bool((sizes == sizes[0]).all()):
        return flat.view(len(sizes), channels, *sizes[0].tolist())
    return RaggedImages(flat, sizes, channels)
