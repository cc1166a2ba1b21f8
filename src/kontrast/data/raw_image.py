"""An image as its file has it, with its own channels and depth, and what becomes of it in a set.

Legend: C channels, h x w pixels. Values are uint8, uint16 or float32.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from PIL import Image

from kontrast.data.limits import BadImage, Form, Limits

NO_RANGE = (
    "float or 32-bit values: state their range with data.float_range=[low,high] "
    "(pack, embed, neighbors, probe: --float-range low,high)"
)
WHITE = {"uint8": 255, "uint16": 65_535}


class Header(NamedTuple):
    """What the header of an image file says.

    Attributes:
        width: in pixels, before any reduction.
        height: likewise; EXIF orientation may swap the two.
        form: the type of the values and the channels.
        ordinary: whether this is a picture for eyes, which 8-bit red, green and blue represent well.
        turned: whether EXIF orientation swaps width and height; False too for a PNG that says so after its pixels.
    """

    width: int
    height: int
    form: Form
    ordinary: bool = False
    turned: bool = False


class RawImage(NamedTuple):
    """Decoded values [C,h,w], whether they are red, green and blue or gray, and a note ("" or what was done)."""

    pixels: np.ndarray
    color: bool = False
    note: str = ""


def usual_type(dtype: np.dtype) -> str:
    """The type in which values of another type are kept; raises `BadImage` if they aren't numbers."""
    if dtype.kind == "b" or dtype.name in ("uint8", "uint16"):
        return "uint8" if dtype.kind == "b" else dtype.name
    if dtype.kind not in "iuf":
        raise BadImage(f"values of type {dtype}; allowed: whole numbers and floats")
    return "float32"


def with_usual_type(values: np.ndarray) -> np.ndarray:
    """The values as uint8, uint16 or float32."""
    kind = usual_type(values.dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # what becomes infinite is refused later
        return values.astype(kind) * np.uint8(255) if values.dtype.kind == "b" else values.astype(kind, copy=False)


def on_white(pixels: np.ndarray, premultiplied: bool = False) -> np.ndarray:
    """Put the channels before the last one, which is the opacity, on white; whole numbers only."""
    white = WHITE[pixels.dtype.name]
    colors, opacity = pixels[:-1].astype(np.float64), pixels[-1:].astype(np.float64) / white
    mixed = colors * (1 if premultiplied else opacity) + white * (1 - opacity)
    return np.floor(np.clip(mixed, 0, white) + 0.5).astype(pixels.dtype)


def turn(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Apply an EXIF orientation from 1 to 8 to values [C,h,w]."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(0, 2, 1)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, :, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def keep_form(raw: RawImage, limits: Limits) -> np.ndarray:
    """The values [C,h,w] in the form of the set, reduced to its size; raises `BadImage` if they have another form."""
    form, pixels = limits.made, raw.pixels
    if len(pixels) == 1 and form.channels == 3:
        pixels = np.repeat(pixels, 3, axis=0)
    if (found := Form(pixels.dtype.name, len(pixels), form.color)) != form:
        raise BadImage(f"{found}, the set has {form}")
    if pixels.dtype.kind == "f" and not np.isfinite(pixels).all():
        raise BadImage("NaN or infinite values")
    if (pixels == pixels[:, :1, :1]).all():
        raise BadImage("constant: all pixels are equal")
    height, width = pixels.shape[1:]
    if (wanted := limits.fit(width, height)) == (width, height):
        return pixels
    window = Image.Resampling.HAMMING if limits.longest else Image.Resampling.BICUBIC  # as for ordinary pictures
    bands = (Image.fromarray(band if form.dtype == "uint8" else band.astype(np.float32)) for band in pixels)
    small = np.stack([np.asarray(band.resize(wanted, window)) for band in bands])
    if form.dtype == "uint16":
        return np.clip(np.floor(small + 0.5), 0, WHITE["uint16"]).astype(np.uint16)
    return small


def as_picture(raw: RawImage, limits: Limits) -> Image.Image:
    """An 8-bit picture of values of any depth: 16-bit values are divided by 257, floats need a range."""
    pixels = raw.pixels
    if len(pixels) not in (1, 3):
        raise BadImage(f"{len(pixels)} channels can't become red, green and blue: data.depth=own keeps them")
    if pixels.dtype == np.uint16:
        pixels = np.clip((pixels.astype(np.int64) + 128) // 257, 0, 255)
    elif pixels.dtype.kind == "f":
        pixels = scale_floats(pixels, limits)
    pixels = pixels.astype(np.uint8)
    return Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))


def scale_floats(values: np.ndarray, limits: Limits) -> np.ndarray:
    """Floats in the user's range as values from 0 to 255."""
    finite = np.isfinite(values).all()
    if limits.float_range is None or not finite:
        raise BadImage(NO_RANGE if finite else "NaN or infinite values")
    low, high = limits.float_range
    return np.clip(np.floor((values.astype(np.float64) - low) / (high - low) * 255 + 0.5), 0, 255)
