"""Pictures and files for tests: whole ones, and bombs of a few bytes."""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import torch
from PIL import Image

FORMATS = {"JPEG": ".jpg", "PNG": ".png", "WEBP": ".webp", "GIF": ".gif", "BMP": ".bmp", "TIFF": ".tif"}
QUICK = [
    "training.epochs=1",
    "training.batch=16",
    "training.max_steps=3",
    "training.log_every=1",
    "views.size=16",
    "encoder.name=small-conv",
    "encoder.width=16",
    "head.outputs=16",
    "evaluation.every=0",
    "evaluation.k=5",
    "evaluation.gallery=60",
]
"""Overrides that make a whole run take half a second."""


def encoded(image: Image.Image, form: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def picture(seed: int, height: int = 16, width: int | None = None) -> Image.Image:
    shape = (height, width or height, 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def folder_of(root: Path, count: int, classes: int = 1, side: int = 16) -> Path:
    """`count` different PNGs a class, flat for one class."""
    for number in range(count * classes):
        place = root / f"class{number % classes}" if classes > 1 else root
        place.mkdir(parents=True, exist_ok=True)
        picture(number, side).save(place / f"{number:04d}.png")
    return root


def png_bomb(width: int, height: int) -> bytes:
    """A PNG whose header claims a size and whose data are rows of zeros, as compressed as they get."""

    def part(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" * min((width // 8 + 1) * height, 4_000_000), 9)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", rows) + part(b"IEND", b"")


def gif_bomb(width: int, height: int) -> bytes:
    """A GIF with a huge logical screen and frame, and no data to fill it."""
    screen = b"GIF89a" + struct.pack("<HH", width, height) + b"\x80\0\0" + b"\0\0\0\xff\xff\xff"
    return screen + b"," + struct.pack("<HHHH", 0, 0, width, height) + b"\0" + b"\x02\x02\x4c\x01\0" + b";"


def tiff_bomb(width: int, height: int) -> bytes:
    """A TIFF with one strip that claims a size and holds eight bytes."""
    entries = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)]
    entries += [(273, 4, 1, 8), (277, 3, 1, 1), (278, 4, 1, height), (279, 4, 1, 8)]
    body = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<I", 16) + b"\0" * 8 + struct.pack("<H", len(entries)) + body + struct.pack("<I", 0)


def write_tar(path, members: list[tuple[str, bytes]], special: list[tarfile.TarInfo] = (), form=tarfile.PAX_FORMAT):
    with tarfile.open(path, "w", format=form) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for info in special:
            tar.addfile(info)
    return path


def png_members(count: int) -> list[tuple[str, bytes]]:
    return [(f"{number:04d}.png", encoded(picture(number), "PNG")) for number in range(count)]


def shard_samples(start: int, count: int) -> list[tuple[str, bytes]]:
    members = []
    for i in range(start, start + count):
        members += [
            (f"{i:05d}.png", encoded(picture(i), "PNG")),
            (f"{i:05d}.cls", str(i % 3).encode()),
            (f"{i:05d}.json", b"{}"),
        ]
    return members


def same_images(a, b) -> bool:
    if list(a.names) != list(b.names) or (a.labels is None) != (b.labels is None):
        return False
    if a.labels is not None and not torch.equal(a.labels, b.labels):
        return False
    return all(torch.equal(a.images[i], b.images[i]) for i in range(len(a)))
