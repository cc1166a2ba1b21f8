"""Write image files of any depth and number of channels, as programs of satellites and microscopes do."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np


def bands(channels: int, height: int = 20, width: int = 24, seed: int = 0, high: int = 4000) -> np.ndarray:
    """uint16 [C,h,w] of smooth waves: each channel its own, so that a swapped axis shows."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(0.3 * (c + 1) * x + 0.2 * y + seed) + np.cos(0.1 * (c + 2) * y) for c in range(channels)]
    return (100 + (high - 100) * (np.stack(waves) + 2) / 4).astype(np.uint16)


def tiff(
    values: np.ndarray, *, order: str = "<", big: bool = False, separate: bool = False, tile: int = 0, rows: int = 7,
    compression: int = 1, predictor: int = 1, photometric: int = 1, extra: tuple[int, ...] = (), pages: int = 1,
    orientation: int = 1,
) -> bytes:  # fmt: skip
    """A TIFF file of values [S,h,w]. Its pages, if there are several, share the channels equally."""
    whole = np.split(values, pages)
    head = (b"II" if order == "<" else b"MM") + struct.pack(order + "H", 43 if big else 42)
    out = bytearray(head + (struct.pack(order + "HHQ", 8, 0, 16) if big else struct.pack(order + "I", 8)))
    for number, page in enumerate(whole):
        _add_page(out, page, order, big, separate, tile, rows, compression, predictor, photometric, extra, orientation,
                  number == len(whole) - 1)  # fmt: skip
    return bytes(out)


def _add_page(
    out: bytearray, page: np.ndarray, order: str, big: bool, separate: bool, tile: int, rows: int, compression: int,
    predictor: int, photometric: int, extra: tuple[int, ...], orientation: int, last: bool,
) -> None:  # fmt: skip
    samples, height, width = page.shape
    parts = [
        _packed(part, order, compression, predictor, bool(tile), tile or rows, tile or width, top, left)
        for part in (page[:, None] if separate else [page])
        for top in range(0, height, tile or rows)
        for left in range(0, width, tile or width)
    ]
    kind = {"u": 1, "i": 2, "f": 3}[page.dtype.kind]
    bits = 8 * page.dtype.itemsize
    tags: dict[int, list[int]] = {
        256: [width], 257: [height], 258: [bits] * samples, 259: [compression], 262: [photometric],
        274: [orientation], 277: [samples], 284: [2 if separate else 1], 317: [predictor], 339: [kind] * samples,
    }  # fmt: skip
    tags |= {322: [tile], 323: [tile]} if tile else {278: [rows]}
    tags |= {338: list(extra)} if extra else {}
    where, sizes = (324, 325) if tile else (273, 279)
    entry, base = (20, 8) if big else (12, 2)
    start = len(out)
    place = start + base + entry * (len(tags) + 2) + (8 if big else 4)
    data = bytearray()
    offsets = []
    for part in parts:
        offsets.append(place + len(data))
        data += part
    tags[where], tags[sizes] = offsets, [len(part) for part in parts]
    directory = struct.pack(order + ("Q" if big else "H"), len(tags))
    for tag, numbers in sorted(tags.items()):
        content = struct.pack(f"{order}{len(numbers)}{'Q' if big else 'I'}", *numbers)
        inside = 8 if big else 4
        if len(content) > inside:
            content, far = struct.pack(order + ("Q" if big else "I"), place + len(data)), content
            data += far
        directory += struct.pack(order + "HH" + ("Q" if big else "I"), tag, 16 if big else 4, len(numbers))
        directory += content.ljust(inside, b"\0")
    following = 0 if last else place + len(data)
    out += directory + struct.pack(order + ("Q" if big else "I"), following) + data


def _packed(
    part: np.ndarray, order: str, compression: int, predictor: int, padded: bool, rows: int, columns: int, top: int,
    left: int,
) -> bytes:  # fmt: skip
    """A strip or tile of values [S,h,w]."""
    block = part[:, top : top + rows, left : left + columns]
    if padded:
        block = np.pad(block, ((0, 0), (0, rows - block.shape[1]), (0, columns - block.shape[2])))
    block = np.ascontiguousarray(block.transpose(1, 2, 0))
    if predictor == 2:
        whole = block.view(f"u{block.itemsize}")
        block = np.concatenate([whole[:, :1], whole[:, 1:] - whole[:, :-1]], 1)
    if predictor == 3:
        high, wide, deep = block.shape
        flat = block.astype(block.dtype.newbyteorder(">")).view(np.uint8).reshape(high, wide * deep, -1)
        mixed = np.ascontiguousarray(flat.transpose(0, 2, 1)).reshape(high, -1, deep)
        content = np.concatenate([mixed[:, :1], mixed[:, 1:] - mixed[:, :-1]], 1).tobytes()
    else:
        content = block.astype(block.dtype.newbyteorder(order)).tobytes()
    return zlib.compress(content) if compression == 8 else content


def deep_png(values: np.ndarray, filters: tuple[int, ...] = (0, 1, 2, 3, 4)) -> bytes:
    """A 16-bit PNG of values [C,h,w], 2 to 4 channels, whose rows take the filters in turn."""
    channels, height, width = values.shape
    step = 2 * channels
    rows = np.ascontiguousarray(values.transpose(1, 2, 0), ">u2").view(np.uint8).reshape(height, -1)
    content = bytearray()
    for y in range(height):
        kind = filters[y % len(filters)]
        content.append(kind)
        for i, value in enumerate(rows[y].tolist()):
            left = int(rows[y][i - step]) if i >= step else 0
            up = int(rows[y - 1][i]) if y else 0
            corner = int(rows[y - 1][i - step]) if y and i >= step else 0
            guess = min((left, up, corner), key=lambda near: abs(left + up - corner - near))
            content.append((value - (0, left, up, (left + up) // 2, guess)[kind]) % 256)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, {2: 4, 3: 2, 4: 6}[channels], 0, 0, 0))]
    chunks += [(b"IDAT", zlib.compress(bytes(content))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )


def npy(values: np.ndarray, allow_pickle: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, values, allow_pickle=allow_pickle)
    return file.getvalue()


def npy_header(shape: tuple[int, ...]) -> bytes:
    """The header of an .npy file of uint16 values, without the values."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<u2", "fortran_order": False, "shape": shape})
    return file.getvalue()


def write_bands(root: Path, classes: int = 2, each: int = 12, channels: int = 5) -> Path:
    """A folder of .npy files, uint16 [C,h,w], in class folders."""
    for label in range(classes):
        folder = root / f"class{label}"
        folder.mkdir(parents=True)
        for number in range(each):
            np.save(folder / f"{number:03d}.npy", bands(channels, seed=number, high=2000 + 1500 * label))
    return root
