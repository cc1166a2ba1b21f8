"""Read images in NumPy's files: .npy, and .npz with one array. Nothing is ever unpickled.

Legend: H x W pixels, C channels.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, BinaryIO

import numpy as np
from numpy.lib import format as npy

from kontrast.data.limits import MOST_CHANNELS, BadImage, Form, Limits
from kontrast.data.raw_image import Header, RawImage, usual_type, with_usual_type

MAGIC = b"\x93NUMPY"
ZIP = b"PK\x03\x04"
FEW = 16
"""An axis of at most this many values can be the channels if the file does not say so."""
NAME = "image"
"""The array of an .npz file that is read if there are several."""


def matches(head: bytes) -> bool:
    return head.startswith((MAGIC, ZIP))


def read_header(source: BinaryIO, limits: Limits) -> Header:
    with _member(source) as file:
        shape, dtype, _ = _read_array_header(file)
    return _header(shape, dtype, limits)


def read_raw(source: BinaryIO, limits: Limits) -> RawImage:
    with _member(source) as file:
        shape, dtype, fortran = _read_array_header(file)
        header = _header(shape, dtype, limits)
        limits.check_size(header.width, header.height)
        count = int(np.prod(shape))
        content = file.read(count * dtype.itemsize)
    if len(content) < count * dtype.itemsize:
        raise BadImage("damaged: the array ends too early")
    values = np.frombuffer(content, dtype).reshape(shape[::-1] if fortran else shape)
    values = values.T if fortran else values
    first = values[None] if len(shape) == 2 else np.moveaxis(values, _channel_axis(shape, limits), 0)
    return RawImage(with_usual_type(np.array(first, order="C")), header.form.color)


@contextmanager
def _member(source: BinaryIO) -> Iterator[IO[bytes]]:
    """The stream of an .npy file: the source itself, or a member of an .npz archive."""
    if source.read(len(ZIP)) != ZIP:
        source.seek(0)
        yield source
        return
    try:
        archive = zipfile.ZipFile(source)
    except zipfile.BadZipFile:
        raise BadImage("not an image: a damaged zip archive") from None
    names = [name for name in archive.namelist() if name.endswith(".npy")]
    if not names:
        raise BadImage("not an image: a zip archive")
    if len(names) > 1 and f"{NAME}.npy" not in names:
        shown = ", ".join(name.removesuffix(".npy") for name in names[:3])
        raise BadImage(f"{len(names)} arrays ({shown}): store one per file, or call the image's {NAME!r}")
    with archive.open(f"{NAME}.npy" if len(names) > 1 else names[0]) as file:
        yield file


def _read_array_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype, bool]:
    """Shape and type of an array, and whether its first axis is contiguous. An array of objects is refused."""
    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise BadImage(f"NumPy format {version}; allowed: 1.0 to 3.0")
    # Version 3 differs from 2 only in allowing names of fields beyond Latin-1, and images have no fields.
    shape, fortran, dtype = (npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(file)
    if dtype.hasobject:
        raise BadImage("an array of Python objects, which is never unpickled: save numbers")
    return shape, dtype, fortran


def _header(shape: tuple[int, ...], dtype: np.dtype, limits: Limits) -> Header:
    if len(shape) not in (2, 3) or 0 in shape:
        raise BadImage(f"array of shape {list(shape)}; allowed: [H,W], [H,W,C] or [C,H,W]")
    kind = usual_type(dtype)
    if len(shape) == 2:
        return Header(shape[1], shape[0], Form(kind, 1), False)
    axis = _channel_axis(shape, limits)
    channels, (height, width) = shape[axis], [side for i, side in enumerate(shape) if i != axis]
    if channels > MOST_CHANNELS:
        raise BadImage(f"{channels} channels in an array of shape {list(shape)}; allowed: 1 to {MOST_CHANNELS}")
    ordinary = kind == "uint8" and channels in (1, 3)
    return Header(width, height, Form(kind, channels, ordinary or channels == 1), ordinary)


def _channel_axis(shape: tuple[int, ...], limits: Limits) -> int:
    """The axis of the channels: what data.layout says, or else the first or last axis if it alone is short."""
    if limits.layout != "auto":
        return 2 if limits.layout == "HWC" else 0
    short = [axis for axis in (0, 2) if shape[axis] <= FEW]
    if len(short) != 1:
        which = "both ends could be channels" if short else f"neither end has at most {FEW} channels"
        raise BadImage(f"array of shape {list(shape)}: {which}; state data.layout=HWC or data.layout=CHW")
    return short[0]
