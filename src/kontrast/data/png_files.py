"""Read PNG files of 16 bits and several channels, which Pillow reduces to 8 bits.

Legend: C channels, h x w pixels, b bytes per pixel, r bytes per row.
"""

from __future__ import annotations

import struct
import zlib
from typing import BinaryIO

import numpy as np

from kontrast.data.limits import BadImage, Form, Limits
from kontrast.data.raw_image import Header, RawImage, on_white

MAGIC = b"\x89PNG\r\n\x1a\n"
CHANNELS = {2: 3, 4: 2, 6: 4}
"""Stored channels by PNG's color type; gray and palettes, which Pillow reads well, are left out."""
NONE, SUB, UP, AVERAGE, PAETH = range(5)


def matches(head: bytes) -> bool:
    """Whether a file is a 16-bit PNG of several channels."""
    return head[:8] == MAGIC and head[12:16] == b"IHDR" and head[24:25] == b"\x10" and head[25:26] in b"\2\4\6"


def read_header(source: BinaryIO, limits: Limits) -> Header:
    width, height, _, kind, _, _, interlaced = struct.unpack(">IIBBBBB", source.read(29)[16:])
    if interlaced:
        raise BadImage("interlaced 16-bit PNG of several channels: save it without interlacing")
    return Header(width, height, Form("uint16", 3 if kind in (2, 6) else 1))


def read_raw(source: BinaryIO, limits: Limits) -> RawImage:
    header = read_header(source, limits)
    limits.check_size(header.width, header.height)
    source.seek(0)
    content = source.read()
    channels = CHANNELS[content[25]]
    row_bytes = 2 * channels * header.width
    unpacked = zlib.decompressobj().decompress(_image_data(content), header.height * (1 + row_bytes))
    if len(unpacked) < header.height * (1 + row_bytes):
        raise BadImage("damaged: the PNG file ends too early")
    rows = np.frombuffer(unpacked, np.uint8).reshape(header.height, 1 + row_bytes)
    if rows[:, 0].max() > PAETH:
        raise BadImage("damaged: unknown filter in the PNG file")
    plain = undo_filters(rows[:, 1:], rows[:, 0], 2 * channels)
    pixels = plain.view(">u2").reshape(header.height, header.width, channels).transpose(2, 0, 1).astype(np.uint16)
    return RawImage(on_white(pixels) if channels % 2 == 0 else pixels, color=True)


def _image_data(content: bytes) -> bytes:
    """The compressed pixels: the IDAT chunks, whose checksums must be right."""
    parts, place = [], 8
    while place + 12 <= len(content):
        length, kind = struct.unpack_from(">I4s", content, place)
        body = content[place + 8 : place + 8 + length]
        if kind == b"IEND":
            break
        if kind == b"IDAT":
            known = content[place + 8 + length : place + 12 + length]
            if struct.pack(">I", zlib.crc32(kind + body)) != known:
                raise BadImage("damaged: wrong checksum in the PNG file")
            parts.append(body)
        place += 12 + length
    return b"".join(parts)


def undo_filters(rows: np.ndarray, kinds: np.ndarray, step: int) -> np.ndarray:
    """Undo PNG's filters, uint8 [h,r], each row by its own kind.

    A pixel depends on its left, upper and upper left neighbors. All pixels on a diagonal, at column d - y of row y, are
    therefore known at the same time: numpy computes one diagonal after another, over all rows at once.
    """
    height, width = len(rows), rows.shape[1] // step
    if not kinds.any():
        return np.ascontiguousarray(rows)
    # One row above and one pixel to the left are zeros.
    known = np.zeros((height + 1, width + 1, step), np.int16)
    stored = rows.reshape(height, width, step)
    for diagonal in range(height + width - 1):
        y = np.arange(max(0, diagonal - width + 1), min(height, diagonal + 1))
        x = diagonal - y
        left, up, corner, kind = known[y + 1, x], known[y, x + 1], known[y, x], kinds[y, None]
        guess = np.select(
            [kind == SUB, kind == UP, kind == AVERAGE, kind == PAETH],
            [left, up, (left + up) >> 1, _paeth(left, up, corner)],
            np.int16(0),
        )
        known[y + 1, x + 1] = (stored[y, x] + guess) & 255
    return known[1:, 1:].astype(np.uint8).reshape(height, -1)


def _paeth(left: np.ndarray, up: np.ndarray, corner: np.ndarray) -> np.ndarray:
    """The neighbor that is nearest to left + up - corner; of equals the first in this order: left, up, corner."""
    to_left, to_up, to_corner = abs(up - corner), abs(left - corner), abs(left + up - 2 * corner)
    nearest_up = np.where(to_up <= to_corner, up, corner)
    return np.where((to_left <= to_up) & (to_left <= to_corner), left, nearest_up)
