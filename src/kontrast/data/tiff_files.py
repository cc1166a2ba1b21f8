"""Read TIFF files of any depth and number of channels, which Pillow reduces to 8 bits or can't read.

Strips and tiles, interleaved and separate planes, BigTIFF, the lossless compressions and all three predictors are read
here; Pillow's libtiff undoes the compression. Other TIFF files are left to Pillow.

Legend: S samples (channels) of a page, h x w pixels.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from kontrast.data.limits import MAX_SIDE, MOST_CHANNELS, BadImage, Form, Limits
from kontrast.data.raw_image import Header, RawImage, on_white, turn, usual_type, with_usual_type

MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
SUBFILE, WIDTH, HEIGHT, BITS, COMPRESSION, PHOTOMETRIC, STRIPS, ORIENTATION, SAMPLES = (
    254, 256, 257, 258, 259, 262, 273, 274, 277,
)  # fmt: skip
ROWS, STRIP_BYTES, PLANAR, PREDICTOR, TILE_WIDTH, TILE_HEIGHT, TILES, TILE_BYTES = (
    278, 279, 284, 317, 322, 323, 324, 325,
)  # fmt: skip
EXTRA, SAMPLE_FORMAT = 338, 339
TYPES = {1: "u1", 3: "u2", 4: "u4", 16: "u8"}
"""The field types of TIFF that hold whole numbers."""
LOSSLESS = {1: "none", 5: "LZW", 8: "deflate", 32773: "PackBits", 32946: "deflate", 34925: "LZMA", 50000: "zstd"}
WHITE_IS_ZERO, BLACK_IS_ZERO, RGB = 0, 1, 2
MOST_PAGES, MOST_TAGS, MOST_NUMBERS = 4096, 1000, 1 << 22
UNSIGNED, SIGNED, FLOAT = 1, 2, 3

Page = dict[int, Any]
"""The tags of a page: int64 arrays of whole numbers."""


def matches(head: bytes) -> bool:
    return head[:4] in MAGIC


def read_header(source: BinaryIO, limits: Limits) -> Header | None:
    """The header of a file that can be read here; None if Pillow has to read it."""
    order, pages = _pages(source, limits)
    page, dtype = pages[0], _dtype(pages[0], order)
    if dtype is None:
        return None
    samples, alpha = _number(page, SAMPLES, 1), _alpha(page, dtype)
    channels = (samples - bool(alpha)) * len(pages)
    if not 0 < channels <= MOST_CHANNELS:
        raise BadImage(f"{channels} channels; allowed: 1 to {MOST_CHANNELS}")
    color = channels == 1 or (channels == 3 and _number(page, PHOTOMETRIC, 1) == RGB)
    form = Form(usual_type(dtype), channels, color)
    return Header(_number(page, WIDTH), _number(page, HEIGHT), form, form.dtype == "uint8" and color)


def read_raw(source: BinaryIO, limits: Limits) -> RawImage | None:
    """The values of a file; None if Pillow has to read it."""
    header = read_header(source, limits)
    if header is None:
        return None
    limits.check_size(header.width, header.height)
    order, pages = _pages(source, limits)
    pixels = np.concatenate([_read_page(source, page, order) for page in pages])
    there = len(_pages(source, limits, every=True)[1]) if limits.pages == "first" else 1
    note = "first page (data.pages=channels reads all as channels)" if there > 1 else ""
    return RawImage(turn(pixels, _number(pages[0], ORIENTATION, 1)), header.form.color, note)


def _pages(source: BinaryIO, limits: Limits, every: bool = False) -> tuple[str, list[Page]]:
    """The byte order, and the pages that are read: the first, or all of its size (without overviews)."""
    source.seek(0)
    head = source.read(16)
    order, big = "<" if head[:2] == b"II" else ">", head[2:4] in (b"+\0", b"\0+")
    place = struct.unpack(order + ("Q" if big else "I"), head[8:16] if big else head[4:8])[0]
    pages: list[Page] = []
    seen: set[int] = set()
    while place and place not in seen and len(seen) < MOST_PAGES:
        seen.add(place)
        page, place = _read_tags(source, place, order, big)
        if not pages or not (_number(page, SUBFILE, 0) & 1 or _shape(page) != _shape(pages[0])):
            pages.append(page)
        if limits.pages == "first" and not every:
            break
    if not pages or min(_shape(pages[0])[:3]) < 1 or max(_shape(pages[0])[:2]) > MAX_SIDE:
        raise BadImage("damaged: no image in the TIFF file")
    return order, pages


def _read_tags(source: BinaryIO, place: int, order: str, big: bool) -> tuple[Page, int]:
    """The tags of the page at a place, and the place of the next page."""
    wide, counted = ("Q", "Q") if big else ("I", "H")
    size = 20 if big else 12
    source.seek(place)
    count = struct.unpack(order + counted, _take(source, struct.calcsize(order + counted)))[0]
    if count > MOST_TAGS:
        raise BadImage(f"damaged: {count} tags in the TIFF file")
    entries = _take(source, count * size)
    following = source.read(struct.calcsize(order + wide))
    page: Page = {}
    for start in range(0, count * size, size):
        tag, kind = struct.unpack_from(order + "HH", entries, start)
        many = struct.unpack_from(order + wide, entries, start + 4)[0]
        if kind not in TYPES or not 0 < many <= MOST_NUMBERS:
            continue
        length = many * np.dtype(TYPES[kind]).itemsize
        inside = entries[start + (12 if big else 8) : start + size]
        if length > len(inside):
            source.seek(struct.unpack(order + wide, inside)[0])
            inside = _take(source, length)
        page[tag] = np.frombuffer(inside[:length], order + TYPES[kind]).astype(np.int64)
    return page, struct.unpack(order + wide, following)[0] if len(following) == (8 if big else 4) else 0


def _take(source: BinaryIO, length: int) -> bytes:
    content = source.read(length)
    if len(content) < length:
        raise BadImage("damaged: the TIFF file ends too early")
    return content


def _number(page: Page, tag: int, default: int = 0) -> int:
    return int(page[tag][0]) if tag in page else default


def _shape(page: Page) -> tuple[int, ...]:
    """What the pages of one image have in common: size, channels, bits and kind of values."""
    bits = _number(page, BITS, 1)
    return (_number(page, HEIGHT), _number(page, WIDTH), _number(page, SAMPLES, 1), bits, _kind(page))


def _kind(page: Page) -> int:
    return _number(page, SAMPLE_FORMAT, UNSIGNED)


def _dtype(page: Page, order: str) -> np.dtype | None:
    """The type of the values; None if Pillow has to read them: palettes, JPEG, bits, YCbCr, ..."""
    bits, samples = set(page.get(BITS, np.ones(1)).tolist()), _number(page, SAMPLES, 1)
    deep = bits != {8} or samples > 4
    if _number(page, PHOTOMETRIC, BLACK_IS_ZERO) not in (WHITE_IS_ZERO, BLACK_IS_ZERO, RGB):
        if bits <= {1, 2, 4, 8}:
            return None
        raise BadImage(f"TIFF of color model {_number(page, PHOTOMETRIC)} in {max(bits)} bits; allowed: gray, RGB")
    if bits <= {1, 2, 4} and samples == 1:
        return None
    if _number(page, COMPRESSION, 1) not in LOSSLESS:
        if not deep:
            return None
        allowed = ", ".join(sorted({*LOSSLESS.values()}))
        raise BadImage(f"TIFF compression {_number(page, COMPRESSION)} of deep values; allowed: {allowed}")
    kinds = {UNSIGNED: (8, 16, 32), SIGNED: (8, 16, 32), FLOAT: (16, 32, 64)}
    kind, width = _kind(page), max(bits)
    if len(bits) != 1 or width not in kinds.get(kind, ()):
        raise BadImage(f"TIFF values of {sorted(bits)} bits of kind {kind}; allowed: 8, 16, 32 and floats of 16 to 64")
    return np.dtype(f"{order}{' uif'[kind]}{width // 8}")


def _alpha(page: Page, dtype: np.dtype) -> int:
    """1 if the last channel is a premultiplied opacity, 2 if it is an opacity, else 0. Floats have none."""
    colors = 3 if _number(page, PHOTOMETRIC, 1) == RGB else 1
    unsaid = 2 if colors == 3 and dtype.itemsize == 1 else 0  # old programs write RGBA without saying so
    extra = int(page[EXTRA][-1]) if EXTRA in page else unsaid
    fits = _number(page, SAMPLES, 1) == colors + 1 and dtype.kind == "u" and dtype.itemsize <= 2
    return extra if fits and extra in (1, 2) else 0


def _read_page(source: BinaryIO, page: Page, order: str) -> np.ndarray:
    """The values of a page, [S,h,w] without an opacity."""
    dtype = _dtype(page, order)
    assert dtype is not None
    samples, height, width = _number(page, SAMPLES, 1), _number(page, HEIGHT), _number(page, WIDTH)
    out = np.empty((samples, height, width), dtype.newbyteorder("="))
    for plane, top, left, values in _parts(source, page, dtype):
        rows, columns = min(values.shape[0], height - top), min(values.shape[1], width - left)
        out[plane, top : top + rows, left : left + columns] = values[:rows, :columns].transpose(2, 0, 1)
    if _number(page, PHOTOMETRIC, BLACK_IS_ZERO) == WHITE_IS_ZERO and dtype.kind == "u":
        out = np.iinfo(out.dtype).max - out
    alpha = _alpha(page, dtype)
    return on_white(out, premultiplied=alpha == 1) if alpha else with_usual_type(out)


def _parts(source: BinaryIO, page: Page, dtype: np.dtype) -> Iterator[tuple[slice, int, int, np.ndarray]]:
    """Each strip or tile: its channels, its first row and column, and its values [rows,columns,channels]."""
    samples, height, width = _number(page, SAMPLES, 1), _number(page, HEIGHT), _number(page, WIDTH)
    separate = _number(page, PLANAR, 1) == 2 and samples > 1
    tiled = TILES in page
    rows = min(_number(page, TILE_HEIGHT if tiled else ROWS, height), MAX_SIDE if tiled else height)
    columns = min(_number(page, TILE_WIDTH, width), MAX_SIDE) if tiled else width
    offsets, lengths = page.get(TILES if tiled else STRIPS), page.get(TILE_BYTES if tiled else STRIP_BYTES)
    if offsets is None or lengths is None or rows < 1 or columns < 1:
        raise BadImage("damaged: the TIFF file does not say where its pixels are")
    down, across = -(-height // rows), -(-width // columns)
    deep = 1 if separate else samples
    if min(len(offsets), len(lengths)) < down * across * (samples if separate else 1):
        raise BadImage("damaged: the TIFF file lacks some of its strips or tiles")
    for number in range(down * across * (samples if separate else 1)):
        plane, place = divmod(number, down * across)
        top, left = place // across * rows, place % across * columns
        high = rows if tiled else min(rows, height - top)
        source.seek(int(offsets[number]))
        packed = _take(source, int(lengths[number]))
        content = _unpack(packed, _number(page, COMPRESSION, 1), high, columns * deep * dtype.itemsize)
        values = _undo_predictor(content, _number(page, PREDICTOR, 1), (high, columns, deep), dtype)
        yield slice(plane, plane + 1) if separate else slice(None), top, left, values


def _unpack(packed: bytes, compression: int, rows: int, row_bytes: int) -> bytes:
    """Undo the compression of a strip. libtiff does so if it is told that the bytes are the pixels of a gray image."""
    if compression != 1:
        tags = [(WIDTH, row_bytes), (HEIGHT, rows), (BITS, 8), (COMPRESSION, compression), (PHOTOMETRIC, 1),
                (STRIPS, 8 + 2 + 9 * 12 + 4), (SAMPLES, 1), (ROWS, rows), (STRIP_BYTES, len(packed))]  # fmt: skip
        entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
        whole = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + packed
        with Image.open(io.BytesIO(whole), formats=["TIFF"]) as image:
            packed = np.asarray(image).tobytes()
    if len(packed) < rows * row_bytes:
        raise BadImage("damaged: a strip of the TIFF file is too short")
    return packed[: rows * row_bytes]


def _undo_predictor(content: bytes, predictor: int, shape: tuple[int, int, int], dtype: np.dtype) -> np.ndarray:
    """The values [rows,columns,channels] of a strip, in the byte order of this machine."""
    rows, columns, deep = shape
    if predictor == 3:  # the bytes of a row by significance, the highest first, each the difference to the one before
        planes = np.frombuffer(content, np.uint8).reshape(rows, columns * dtype.itemsize, deep)
        summed = np.cumsum(planes, axis=1, dtype=np.uint8).reshape(rows, dtype.itemsize, columns * deep)
        joined = np.ascontiguousarray(summed.transpose(0, 2, 1))
        return joined.view(dtype.newbyteorder(">")).reshape(shape).astype(dtype.newbyteorder("="))
    values = np.frombuffer(content, dtype).reshape(shape).astype(dtype.newbyteorder("="))
    if predictor == 2:
        whole = values.view(f"u{dtype.itemsize}")  # differences wrap around
        return np.cumsum(whole, axis=1, dtype=whole.dtype).view(values.dtype)
    if predictor != 1:
        raise BadImage(f"TIFF predictor {predictor}; allowed: 1, 2 and 3")
    return values
