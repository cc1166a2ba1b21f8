"""Decode one image file to uint8 [3,h,w], or say why that is impossible. Decoding processes import it: no torch.

How each mode is converted: 16-bit gray is divided by 257, transparent images are put on white, EXIF orientation is
applied, an animation gives its first frame, and floats need a range from the user.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps

from kontrast.data.byte_source import BadImage as BadImage
from kontrast.data.byte_source import ChangedFile as ChangedFile
from kontrast.data.byte_source import open_bytes
from kontrast.errors import KontrastError, UsageError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
MAX_PIXELS = 64_000_000
MAX_SIDE = 65_535
ORIENTATION = 0x0112
"""The EXIF tag."""
NO_RANGE = (
    "float or 32-bit values: state their range with data.float_range=[low,high] "
    "(pack, embed, neighbors, probe: --float-range low,high)"
)

_MAGIC = (
    (b"<!doctype", "an HTML page"), (b"<html", "an HTML page"),
    (b"<?xml", "XML"), (b"<svg", "SVG"), (b"%PDF", "PDF"), (b"PK\x03\x04", "a zip archive"), (b"\x1f\x8b", "gzip data"),
    (b"\x7fELF", "a program"), (b"\x00\x00\x00\x0cjP  ", "JPEG 2000"), (b"8BPS", "a Photoshop file"),
)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """How images are decoded.

    Attributes:
        bound: larger images are reduced until their shorter side has this many pixels; None for no reduction.
        max_pixels: images with more pixels are refused.
        float_range: the values (low, high) that become 0 and 255 in images of floats.
        longest: images that are then longer are reduced until their longer side has this many pixels; None for no
            limit. It bounds the memory of a batch, in which all images are padded to the largest.
    """

    bound: int | None = None
    max_pixels: int = MAX_PIXELS
    float_range: Sequence[float] | None = None
    longest: int | None = None

    def __post_init__(self) -> None:
        span = self.float_range or None
        if self.bound is not None and self.bound < 1:
            raise UsageError(f"size is {self.bound}: give at least 1 pixel, or 0 to leave images as they are")
        if span and (len(span) != 2 or not span[0] < span[1]):
            raise UsageError(f"data.float_range must be two increasing numbers, for example [0,1], not {list(span)}")
        object.__setattr__(self, "float_range", span and tuple(span))

    def fit(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of an image after it is reduced."""
        sides, shorter, longer = (width, height), min(width, height), max(width, height)
        if self.bound and shorter > self.bound:
            sides = tuple(max(1, round(side * self.bound / shorter)) for side in (width, height))  # type: ignore[assignment]
        if self.longest and max(sides) > self.longest:
            sides = tuple(max(1, round(side * self.longest / longer)) for side in (width, height))  # type: ignore[assignment]
        return sides

    def facts(self) -> dict[str, object]:
        """What a store records; without `longest` if there is no such limit, as older stores do."""
        return {key: value for key, value in asdict(self).items() if key != "longest" or value is not None}


PLAIN = Limits()


def decode_file(
    path: str, offset: int = 0, length: int = -1, limits: Limits = PLAIN, stamp: tuple[int, int] | None = None
) -> tuple[np.ndarray, str]:
    """Decode a file, or `length` bytes of one from `offset`: uint8 [3,h,w] and a note ("" or what was done to it).

    stamp: the size and date that the file must have, else `ChangedFile` is raised.
    """
    with open_bytes(path, offset, length, stamp) as file:
        content = file.read(length)
    return decode(content, limits)


def decode(content: bytes, limits: Limits = PLAIN) -> tuple[np.ndarray, str]:
    """Decode the content of an image file: uint8 [3,h,w] and a note. Raises `BadImage`."""
    with _read_image(io.BytesIO(content), limits) as image:
        return pixels_of(image, limits)


def read_sides(
    path: str, offset: int = 0, length: int = -1, limits: Limits = PLAIN, stamp: tuple[int, int] | None = None
) -> tuple[int, int]:
    """The shorter and the longer side that an image will have when it is decoded, from its header alone.

    EXIF orientation may swap height and width, and for PNG Pillow decodes the whole image to learn it: so the sides
    come sorted.
    """
    with open_bytes(path, offset, length, stamp) as file:
        source = file if length < 0 else io.BytesIO(file.read(length))
        with _read_image(source, limits) as image:
            _check_size(image, limits)
            shorter, longer = sorted(limits.fit(*image.size))
    return shorter, longer


@contextlib.contextmanager
def _read_image(source: BinaryIO, limits: Limits) -> Iterator[Image.Image]:
    """Open an image of an allowed format; whatever Pillow raises inside the context becomes `BadImage`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(source, formats=FORMATS) as image:
                yield image
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
    """uint8 [3,h,w] of an opened image, and a note on what was done to it; raises `BadImage`."""
    _check_size(image, limits)
    note = "first frame" if getattr(image, "is_animated", False) else ""
    if image.format in ("JPEG", "MPO") and (wanted := limits.fit(*image.size)) != image.size:
        image.draft(None, wanted)  # decodes at a half, a quarter or an eighth, at least as large as wanted
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


def _check_size(image: Image.Image, limits: Limits) -> None:
    width, height = image.size
    if not 0 < width * height <= limits.max_pixels or max(width, height) > MAX_SIDE:
        allowed = f"1 to {limits.max_pixels / 1e6:g} million, and no side over {MAX_SIDE}"
        raise BadImage(f"{width} x {height} pixels; allowed: {allowed}")


def _rgb(image: Image.Image, limits: Limits) -> Image.Image:
    """Convert any mode to 8-bit RGB. Pillow's own convert() clips 16-bit gray to white and floats to black."""
    mode = image.mode
    if mode == "RGB" and "transparency" not in image.info:
        return image
    if mode.startswith("I;16") or (mode == "I" and image.format == "PNG"):
        deep = np.asarray(image).astype(np.int64)
        return _gray(np.clip((deep + 128) // 257, 0, 255))
    if mode in ("I", "F"):
        return _gray(_scale_floats(np.asarray(image), limits))
    if mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        solid = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", solid.size, "white"), solid).convert("RGB")
    return image.convert("RGB")


def _scale_floats(values: np.ndarray, limits: Limits) -> np.ndarray:
    finite = np.isfinite(values).all()
    if limits.float_range is None or not finite:
        raise BadImage(NO_RANGE if finite else "NaN or infinite values")
    low, high = limits.float_range
    return np.clip(np.floor((values.astype(np.float64) - low) / (high - low) * 255 + 0.5), 0, 255)


def _gray(values: np.ndarray) -> Image.Image:
    return Image.fromarray(values.astype(np.uint8)).convert("RGB")
