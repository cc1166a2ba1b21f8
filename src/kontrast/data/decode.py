"""One image file to uint8 [3,h,w], or a reason why not. Decoding processes import it: no torch.

What is done to which mode is stated here and nowhere else: 16-bit grey is divided by 257, alpha is laid on white, the
EXIF turn is applied, the first frame stands for an animation, and floats need a stated range.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from kontrast.errors import KontrastError, UsageError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
MAX_PIXELS = 64_000_000
MAX_SIDE = 65_535
MAX_BYTES = 1 << 29
NO_RANGE = (
    "float or 32-bit values: state their range with data.float_range=[low,high] "
    "(pack, embed, neighbors, probe: --float-range low,high)"
)

_MAGIC = (
    (b"<!doctype", "an HTML page"), (b"<html", "an HTML page"),
    (b"<?xml", "XML"), (b"<svg", "SVG"), (b"%PDF", "PDF"), (b"PK\x03\x04", "a zip archive"), (b"\x1f\x8b", "gzip data"),
    (b"\x7fELF", "a program"), (b"\x00\x00\x00\x0cjP  ", "JPEG 2000"), (b"8BPS", "a Photoshop file"),
)  # fmt: skip


class BadImage(Exception):
    """A file that gives no image: the reason in words, and the errno where the system gave one."""

    def __init__(self, reason: str, number: int | None = None):
        super().__init__(reason)
        self.reason, self.errno = reason, number


@dataclass(frozen=True)
class Limits:
    """What a decoder may do: bound the shorter side, how many pixels it opens, which range floats have."""

    bound: int | None = None
    max_pixels: int = MAX_PIXELS
    float_range: tuple[float, float] | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Limits:
        """From their fields as JSON gives them back."""
        span = fields["float_range"]
        return cls(fields["bound"], fields["max_pixels"], None if span is None else (span[0], span[1]))

    def __post_init__(self) -> None:
        if self.bound is not None and self.bound < 1:
            raise UsageError(f"size is {self.bound}: give at least 1 pixel, or 0 to leave images as they are")


PLAIN = Limits()


def checked_range(given: Sequence[float] | None) -> tuple[float, float] | None:
    """The range of float images: none, or two rising numbers."""
    if not given:
        return None
    if len(given) != 2 or not given[0] < given[1]:
        raise UsageError(f"data.float_range must be two rising numbers, for example [0,1], not {list(given)}")
    return given[0], given[1]


def decode_file(path: str, offset: int = 0, length: int = -1, limits: Limits = PLAIN) -> tuple[np.ndarray, str]:
    """uint8 [3,h,w] from a file or a stretch of one, and a note ("" or what was done); raises `BadImage`."""
    try:
        with open(path, "rb", opener=_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise BadImage("not a regular file")
            size = length if length >= 0 else status.st_size
            if size > MAX_BYTES:
                raise BadImage(f"{size:,} bytes: more than {MAX_BYTES:,}")
            file.seek(offset)
            content = file.read(length)
    except OSError as error:
        raise BadImage(f"{os.strerror(error.errno or errno.EIO)} ({error.errno})", error.errno) from None
    if length >= 0 and len(content) < length:
        raise BadImage("the archive ends before the file does")
    return decode(content, limits)


def _at_once(path: str, flags: int) -> int:
    """Open without waiting: a pipe that nobody writes to would never open."""
    return os.open(path, flags | os.O_NONBLOCK)


def decode(content: bytes, limits: Limits = PLAIN) -> tuple[np.ndarray, str]:
    """uint8 [3,h,w] and a note; raises `BadImage`."""
    if not content:
        raise BadImage("empty file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                return pixels_of(image, limits)
    except (BadImage, KontrastError):  # a signal's handler may raise here too, and that is no fault of the image
        raise
    except Image.DecompressionBombError:
        raise BadImage(f"more than {limits.max_pixels / 1e6:g} million pixels") from None
    except Image.UnidentifiedImageError:
        raise BadImage(f"not an image: {sniff(content)}") from None
    except Exception as error:  # Pillow's decoders raise nearly every built-in exception on damaged files
        raise BadImage(f"damaged: {type(error).__name__}: {str(error)[:100] or 'no message'}") from None


def sniff(content: bytes) -> str:
    """What a file that is no image really is, in words."""
    head = content[:512].lstrip()
    for magic, words in _MAGIC:
        if head.startswith(magic) or head.lower().startswith(magic):
            return words
    if content[4:12] in (b"ftypavif", b"ftypheic", b"ftypmif1"):
        return "HEIC or AVIF"
    try:
        text = content[:512].decode("utf-8")
    except UnicodeDecodeError:
        return "unknown bytes, or a damaged header"
    return "text" if text.isprintable() or any(c in text for c in "\n\r\t") else "unknown bytes"


def pixels_of(image: Image.Image, limits: Limits = PLAIN) -> tuple[np.ndarray, str]:
    """uint8 [3,h,w] of an opened image, and a note on what was done to it; raises `BadImage`."""
    width, height = image.size
    if width * height > limits.max_pixels or max(width, height) > MAX_SIDE:
        raise BadImage(
            f"{width} x {height} pixels: more than {limits.max_pixels / 1e6:g} million, or a side over {MAX_SIDE}"
        )
    if width < 1 or height < 1:
        raise BadImage(f"{width} x {height} pixels")
    note = "first frame" if getattr(image, "is_animated", False) else ""
    if image.format in ("JPEG", "MPO") and limits.bound and min(width, height) > limits.bound:
        ratio = limits.bound / min(width, height)
        image.draft(None, (round(width * ratio), round(height * ratio)))
    marked = image.getexif().get(0x0112, 1)
    image.load()
    turn = image.getexif().get(0x0112, 1)  # Pillow turns a TIFF itself as it loads it, and takes the mark away
    picture = _rgb(image, limits)
    picture = _bounded(picture, limits.bound)
    if turn in (2, 3, 4, 5, 6, 7, 8):
        picture.getexif()[0x0112] = turn
        picture = ImageOps.exif_transpose(picture)
    if marked in (2, 3, 4, 5, 6, 7, 8):
        note = note or "turned"
    return np.ascontiguousarray(np.asarray(picture).transpose(2, 0, 1)), note


def _rgb(image: Image.Image, limits: Limits) -> Image.Image:
    """Mode RGB, 8 bits, whatever came. Pillow's own convert() clips 16-bit grey to white and floats to black."""
    mode = image.mode
    if mode == "RGB" and "transparency" not in image.info:
        return image
    if mode.startswith("I;16") or (mode == "I" and image.format == "PNG"):
        deep = np.asarray(image).astype(np.int64)
        return _grey(np.clip((deep + 128) // 257, 0, 255))
    if mode in ("I", "F"):
        return _grey(_ranged(np.asarray(image), limits))
    if mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        solid = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", solid.size, "white"), solid).convert("RGB")
    return image.convert("RGB")


def _ranged(values: np.ndarray, limits: Limits) -> np.ndarray:
    if limits.float_range is None:
        raise BadImage(NO_RANGE)
    low, high = limits.float_range
    if not np.isfinite(values).all():
        raise BadImage("NaN or infinite values")
    return np.clip(np.floor((values.astype(np.float64) - low) / (high - low) * 255 + 0.5), 0, 255)


def _grey(values: np.ndarray) -> Image.Image:
    return Image.fromarray(values.astype(np.uint8)).convert("RGB")


def _bounded(picture: Image.Image, bound: int | None) -> Image.Image:
    shorter = min(picture.size)
    if not bound or shorter <= bound:
        return picture
    size = [max(1, round(side * bound / shorter)) for side in picture.size]
    return picture.resize((size[0], size[1]), Image.Resampling.BICUBIC)
