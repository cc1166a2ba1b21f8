"""Decode one image file, or say why that is impossible. Decoding processes import it: no torch.

By default an image becomes uint8 [3,h,w]: 16-bit values are divided by 257, transparent images are put on white, EXIF
orientation is applied, an animation gives its first frame, and floats need a range from the user. With `Limits.form` it
keeps its own channels and depth, as `raw_image.keep_form` says.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageOps

from kontrast.data import array_files, dicom_files, png_files, tiff_files
from kontrast.data.byte_source import MAX_BYTES, open_bytes
from kontrast.data.byte_source import ChangedFile as ChangedFile
from kontrast.data.limits import ORDINARY, PLAIN, BadImage, Form, Limits
from kontrast.data.raw_image import Header, RawImage, as_picture, keep_form, scale_floats
from kontrast.data.video_frames import frame_size, frame_times, read_frame, split_frame
from kontrast.errors import KontrastError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
ORIENTATION = 0x0112
"""The EXIF tag."""
HEAD = 132
"""Bytes from which the kind of a file is known."""
GRAY = ("1", "L", "LA", "La")
"""Pillow's modes of 8-bit gray pictures."""
_MAGIC = (
    (b"<!doctype", "an HTML page"), (b"<html", "an HTML page"),
    (b"<?xml", "XML"), (b"<svg", "SVG"), (b"%PDF", "PDF"), (b"PK\x03\x04", "a zip archive"), (b"\x1f\x8b", "gzip data"),
    (b"\x7fELF", "a program"), (b"\x00\x00\x00\x0cjP  ", "JPEG 2000"), (b"8BPS", "a Photoshop file"),
)  # fmt: skip


def decode_file(
    path: str, offset: int = 0, length: int = -1, limits: Limits = PLAIN, stamp: tuple[int, int] | None = None
) -> tuple[np.ndarray, str]:
    """Decode a file, `length` bytes of one from `offset`, or a frame of a video: values [C,h,w] and a note ("" or what
    was done to them).

    stamp: the size and date that the file must have, else `ChangedFile` is raised.
    """
    path, time = split_frame(path)
    if time is not None:
        with open_bytes(path, offset, length, stamp, most=None) as file, _bad_if_damaged(file, limits):
            return pixels_of(read_frame(file, time), limits)
    with open_bytes(path, offset, length, stamp) as file:
        content = file.read(length)
    return decode(content, limits)


def decode(content: bytes, limits: Limits = PLAIN) -> tuple[np.ndarray, str]:
    """Decode the content of an image file: values [C,h,w] in the form of `limits` and a note. Raises `BadImage`."""
    source = io.BytesIO(content)
    with _bad_if_damaged(source, limits):
        raw = _read_raw(source, content[:HEAD], limits, deep=limits.form is not None)
        if raw is None:
            try:
                with Image.open(source, formats=FORMATS) as image:
                    return pixels_of(image, limits)
            except Image.UnidentifiedImageError:
                raw = _read_raw(source, content[:HEAD], limits, deep=True)
                if raw is None:
                    raise
        if limits.form is not None:
            return keep_form(raw, limits), raw.note
        pixels, note = pixels_of(as_picture(raw, limits), limits)
        return pixels, raw.note or note


def _read_raw(source: BinaryIO, head: bytes, limits: Limits, deep: bool) -> RawImage | None:
    """The values of a file that begins like this, from one of our own readers; None if Pillow has to read it.

    deep: whether to read TIFF and PNG files here too, with all of their depth.
    """
    reader = _reader(head, deep)
    source.seek(0)
    raw = None if reader is None else reader.read_raw(source, limits)
    source.seek(0)
    return raw


def read_sides(
    path: str, offset: int = 0, length: int = -1, limits: Limits = PLAIN, stamp: tuple[int, int] | None = None
) -> tuple[int, int]:
    """The shorter and the longer side that an image will have when it is decoded, from its header alone.

    EXIF orientation may swap height and width, and for PNG Pillow decodes the whole image to learn it: so the sides
    come sorted.
    """
    header = read_header(path, offset, length, limits, stamp, deep=limits.form is not None)
    limits.check_size(header.width, header.height)
    shorter, longer = sorted(limits.fit(header.width, header.height))
    return shorter, longer


def read_size(path: str) -> tuple[int, int]:
    """The height and the width that an ordinary picture will have when it is decoded, from its header alone."""
    header = read_header(path, deep=False)
    PLAIN.check_size(header.width, header.height)
    return (header.width, header.height) if header.turned else (header.height, header.width)


def read_header(
    path: str,
    offset: int = 0,
    length: int = -1,
    limits: Limits = PLAIN,
    stamp: tuple[int, int] | None = None,
    *,
    deep: bool = True,
) -> Header:
    """Size, type and channels of an image file or of the frames of a video. Raises `BadImage`.

    deep: what the file has; False: what Pillow makes of a TIFF or PNG file.
    """
    path, time = split_frame(path)
    with open_bytes(path, offset, length, stamp, MAX_BYTES if time is None else None) as file:
        source = file if length < 0 else io.BytesIO(file.read(length))
        with _bad_if_damaged(source, limits):
            if time is not None:
                return Header(*frame_size(source), ORDINARY, True)
            reader = _reader(source.read(HEAD), deep)
            source.seek(0)
            header = None if reader is None else reader.read_header(source, limits)
            if header is None:
                source.seek(0)
                with Image.open(source, formats=FORMATS) as image:
                    header = _header_of(image)
    return header


def list_frames(path: str, every: float) -> list[float]:
    """The times of the frames of a video that are images, in seconds. Raises `BadImage`."""
    with open_bytes(path, most=None) as file, _bad_if_damaged(file, PLAIN):
        return frame_times(file, every)


def _reader(head: bytes, deep: bool) -> Any:
    """The module that reads a file which begins like this; None if Pillow does."""
    readers = (array_files, dicom_files, *((tiff_files, png_files) if deep else ()))
    return next((reader for reader in readers if reader.matches(head)), None)


def _header_of(image: Image.Image) -> Header:
    """What Pillow says of an image that it has opened."""
    width, height = image.size
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        return Header(width, height, Form("uint16", 1))
    if image.mode in ("I", "F"):
        return Header(width, height, Form("float32", 1))
    # The method of Image doesn't decode a PNG. Pillow has already swapped the sides of a TIFF.
    turned = image.format != "TIFF" and Image.Image.getexif(image).get(ORIENTATION, 1) in range(5, 9)
    return Header(width, height, Form("uint8", 1 if image.mode in GRAY else 3), True, turned)


@contextlib.contextmanager
def _bad_if_damaged(source: BinaryIO, limits: Limits) -> Iterator[None]:
    """Turn whatever decoders raise about a file into `BadImage`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (BadImage, KontrastError):  # a signal handler may raise here too, which is no fault of the image
        raise
    except Exception as error:  # Pillow's decoders raise nearly every built-in exception on damaged files
        reason = f"damaged: {type(error).__name__}: {str(error)[:100] or 'no message'}"
        if isinstance(error, Image.DecompressionBombError):
            reason = f"more than {limits.max_pixels / 1e6:g} million pixels"
        elif isinstance(error, Image.UnidentifiedImageError):
            source.seek(0)
            head = source.read(512)
            reason = f"not an image: {sniff(head)}" if head else "empty file"
        raise BadImage(reason) from None


def sniff(content: bytes) -> str:
    """Guess what a file is that is not an image, from its first bytes."""
    head = content.lstrip()
    for magic, what in _MAGIC:
        if head.startswith(magic) or head.lower().startswith(magic):
            return what
    if content[4:12] in (b"ftypavif", b"ftypheic", b"ftypmif1"):
        return "HEIC or AVIF"
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return "unknown bytes, or a damaged header"
    return "text" if text.isprintable() or any(c in text for c in "\n\r\t") else "unknown bytes"


def pixels_of(image: Image.Image, limits: Limits = PLAIN) -> tuple[np.ndarray, str]:
    """Values [C,h,w] of an opened image, and a note on what was done to it; raises `BadImage`."""
    limits.check_size(*image.size)
    note = "first frame" if getattr(image, "is_animated", False) else ""
    if image.format in ("JPEG", "MPO") and (wanted := limits.fit(*image.size)) != image.size:
        image.draft(None, wanted)  # decodes at a half, a quarter or an eighth, at least as large as wanted
    if limits.form is not None:
        return _own_pixels(image, limits), note
    in_file = image.getexif().get(ORIENTATION, 1)
    image.load()
    left = image.getexif().get(ORIENTATION, 1)  # Pillow rotates a TIFF as it loads it, and removes the tag
    picture = _rgb(image, limits)
    if (wanted := limits.fit(*picture.size)) != picture.size:
        # Hamming's window takes half as long as bicubic, with which runs and stores without `longest` were made.
        picture = picture.resize(wanted, Image.Resampling.HAMMING if limits.longest else Image.Resampling.BICUBIC)
    if left in range(2, 9):
        picture.getexif()[ORIENTATION] = left
        picture = ImageOps.exif_transpose(picture)
    if in_file in range(2, 9):
        note = note or "turned"
    return np.stack([np.asarray(band) for band in picture.split()]), note  # twice as fast as to transpose the pixels


def _own_pixels(image: Image.Image, limits: Limits) -> np.ndarray:
    """The values of an opened image in the form of the set."""
    picture = ImageOps.exif_transpose(image)
    form = _header_of(image).form
    if form.dtype == "uint8":
        picture = _rgb(picture, limits).convert("L") if form.channels == 1 else _rgb(picture, limits)
    values = np.asarray(picture)
    pixels = values[None] if values.ndim == 2 else np.ascontiguousarray(values.transpose(2, 0, 1))
    return keep_form(RawImage(pixels.astype(form.dtype, copy=False), color=True), limits)


def _rgb(image: Image.Image, limits: Limits) -> Image.Image:
    """Convert any mode to 8-bit RGB. Pillow's own convert() clips 16-bit gray to white and floats to black."""
    mode = image.mode
    if mode == "RGB" and "transparency" not in image.info:
        return image
    if mode.startswith("I;16") or (mode == "I" and image.format == "PNG"):
        deep = np.asarray(image).astype(np.int64)
        return _gray(np.clip((deep + 128) // 257, 0, 255))
    if mode in ("I", "F"):
        return _gray(scale_floats(np.asarray(image), limits))
    if mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        solid = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", solid.size, "white"), solid).convert("RGB")
    return image.convert("RGB")


def _gray(values: np.ndarray) -> Image.Image:
    return Image.fromarray(values.astype(np.uint8)).convert("RGB")
