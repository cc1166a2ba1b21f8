"""Read packed stores: the decoded images of one split as memory-mapped bytes, with a manifest of checksums.

    OUT/train/images.u8     uint8, the images end to end, each [C,h,w]; images.u16 or images.f32 if the manifest has
                            another dtype, uint16 or float32
              sizes.i64     int64 [N,2], height and width
              labels.i64    int64 [N], if there are labels
              stamps.i64    int64 [N], a hash of each file's position, size and date, if the images came from files
              names.json    N names
              bad.jsonl     one line per skipped file
              factors.safetensors   how synthetic images were made, if they were
              captions.json         a list of captions for each image, if there are any
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

from kontrast.data.captions import Captions
from kontrast.data.file_columns import Texts
from kontrast.data.image_set import ImageSet, RaggedImages
from kontrast.data.limits import MAX_SIDE, MOST_CHANNELS
from kontrast.errors import DataError, UsageError
from kontrast.files import read_bytes, read_faults, read_json_lines

VERSION = 1
MANIFEST = "store.json"
FULL_CHECK = 1 << 30
"""A store of up to this many bytes is verified completely when it is opened; of a larger one, only a sample of the
pixels is."""
SAMPLED_CHUNKS = 16
PIXELS = {"uint8": "images.u8", "uint16": "images.u16", "float32": "images.f32"}
"""The file of pixels by their type; the name of a type in a manifest is left out if it is uint8."""
FILES = (
    *PIXELS.values(), "sizes.i64", "labels.i64", "stamps.i64", "names.json", "bad.jsonl", "factors.safetensors",
    "captions.json",
)  # fmt: skip
KINDS: dict[str, Any] = {
    "name": str, "split": str, "has_test": bool, "classes": list | None, "notes": dict, "channels": int, "key": str,
    "fingerprint": str, "origin": dict | None, "count": int, "files": dict, "chunks": list,
}  # fmt: skip
"""The types of the entries of a manifest."""


class DamagedStore(DataError):
    """A store whose bytes do not match its manifest."""


def is_store(path: Path) -> bool:
    """Whether a folder is one split of a packed store."""
    return (path / MANIFEST).is_file()


def read_manifest(path: Path) -> dict[str, Any]:
    """Read and verify the manifest of a split. One that can't be read is a `StorageFault`: it may be whole."""
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        manifest = json.loads(read_bytes(path / MANIFEST))
        body = {k: v for k, v in manifest.items() if k != "self"}
        if manifest["self"] == digest_of(body) and manifest["version"] == VERSION and _is_sound(manifest):
            return manifest
    raise DamagedStore(f"{path / MANIFEST} is damaged or of another version: pack again")


def _is_sound(manifest: dict[str, Any]) -> bool:
    """Whether the entries have the right types, and files have known names, which can't lead out of the store. A store
    may come from others: its digests say nothing about its author."""
    files, chunks, classes = manifest["files"], manifest["chunks"], manifest["classes"]
    return (
        all(isinstance(manifest.get(key), kind) for key, kind in KINDS.items())
        and manifest.get("dtype", "uint8") in PIXELS
        and {pixels_name(manifest), "sizes.i64", "names.json"} <= files.keys() <= set(FILES)
        and all(_is_count(known["bytes"]) for known in files.values())
        and all(_is_count(length) and isinstance(known, str) for length, known in chunks)
        and all(_is_count(number) for number in manifest["notes"].values())
        and all(isinstance(name, str) for name in classes or [])
        and isinstance((manifest.get("origin") or {}).get("place", ""), str)
        and 1 <= manifest["channels"] <= MOST_CHANNELS
    )


def pixels_name(manifest: dict[str, Any]) -> str:
    """The file of pixels of a store."""
    return PIXELS[manifest.get("dtype", "uint8")]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 2**63


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
        full = _length(manifest) <= FULL_CHECK
    step = 1 if full else max(1, len(chunks) // SAMPLED_CHUNKS)
    start = 0
    with open(path / pixels_name(manifest), "rb") as file:
        for number, (length, known) in enumerate(chunks):
            if number % step == 0:
                file.seek(start)
                if hashlib.sha256(file.read(length)).hexdigest() != known:
                    raise DamagedStore(f"the checksum of part {number} of {file.name} fails: pack again")
            start += length


def open_store(path: Path, full: bool | None = None) -> ImageSet:
    """Open one split of a packed store; its pixels are memory-mapped."""
    with read_faults(path):
        return _read_store(path, full)


def _read_store(path: Path, full: bool | None) -> ImageSet:
    manifest = read_manifest(path)
    verify(path, manifest, full)
    there, channels = manifest["files"], manifest["channels"]
    sizes = _read_numbers(path, manifest, "sizes.i64", 2).reshape(-1, 2)
    dtype = np.dtype(manifest.get("dtype", "uint8"))
    whole = channels * int(sizes.prod(1).sum()) * dtype.itemsize
    if int(sizes.min()) < 1 or int(sizes.max()) > MAX_SIDE or whole != _length(manifest):
        raise _damaged(path, "sizes.i64")
    # Copy-on-write, although nobody writes: torch warns about read-only memory.
    flat = torch.from_numpy(np.memmap(path / pixels_name(manifest), dtype=dtype, mode="c"))
    labels, stamps = (
        _read_numbers(path, manifest, name) if name in there else None for name in ("labels.i64", "stamps.i64")
    )
    classes = manifest["classes"]
    if labels is not None and (int(labels.min()) < 0 or (classes and int(labels.max()) >= len(classes))):
        raise _damaged(path, "labels.i64")
    return ImageSet(
        images=shape_images(flat, sizes, channels),
        names=_read_names(path, manifest["count"]),
        labels=labels,
        factors=_read_factors(path, manifest["count"]) if "factors.safetensors" in there else {},
        captions=_read_captions(path, manifest["count"]) if "captions.json" in there else None,
        bad=read_bad(path),
        stamps=stamps,
        place=(manifest.get("origin") or {}).get("place", manifest["split"]),
        color=manifest.get("color") is not False,
        **{key: manifest[key] for key in ("classes", "name", "split", "has_test", "fingerprint", "notes")},
    )


def _damaged(path: Path, name: str) -> DamagedStore:
    return DamagedStore(f"{path / name} does not fit the other files of the store: pack again")


def _length(manifest: dict[str, Any]) -> int:
    return manifest["files"][pixels_name(manifest)]["bytes"]


def _read_numbers(path: Path, manifest: dict[str, Any], name: str, columns: int = 1) -> torch.Tensor:
    """int64 [N * columns] of a file, which must have as many numbers as the store has images."""
    content = (path / name).read_bytes()
    if not content or len(content) != 8 * columns * manifest["count"]:
        raise _damaged(path, name)
    return torch.from_numpy(np.frombuffer(content, dtype="<i8").astype(np.int64))


def _read_names(path: Path, count: int) -> Texts:
    try:
        names = json.loads((path / "names.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or len(names) != count or not all(isinstance(name, str) for name in names):
        raise _damaged(path, "names.json")
    return Texts.of(names)


def _read_captions(path: Path, count: int) -> Captions:
    try:
        found = json.loads((path / "captions.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        found = None
    sound = isinstance(found, list) and len(found) == count and all(isinstance(one, list) and one for one in found)
    if not sound or not all(isinstance(text, str) for one in found for text in one):  # type: ignore[union-attr]
        raise _damaged(path, "captions.json")
    return Captions.of(found)  # type: ignore[arg-type]


def _read_factors(path: Path, count: int) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        factors = load((path / "factors.safetensors").read_bytes())
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError):
        factors = {"": torch.empty(())}
    if any(values.ndim == 0 or len(values) != count for values in factors.values()):
        raise _damaged(path, "factors.safetensors")
    return factors


def read_bad(path: Path) -> list[tuple[str, str]]:
    """The names of the files that packing skipped, with the reasons."""
    if not (path / "bad.jsonl").exists():
        return []
    lines = [(line.get("name"), line.get("reason")) for line in read_json_lines(path / "bad.jsonl")]
    return [(name, why) for name, why in lines if isinstance(name, str) and isinstance(why, str)]


def shape_images(flat: torch.Tensor, sizes: torch.Tensor, channels: int) -> torch.Tensor | RaggedImages:
    """Flat pixels as one tensor [N,C,H,W] if all images have the same size, else as `RaggedImages`."""
    if bool((sizes == sizes[0]).all()):
        return flat.view(len(sizes), channels, *sizes[0].tolist())
    return RaggedImages(flat, sizes, channels)
