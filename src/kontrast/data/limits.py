"""How images are decoded: the limits of size, and the form (type and channels) that all images of a set have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from kontrast.errors import UsageError

MAX_PIXELS = 64_000_000
MAX_SIDE = 65_535
LAYOUTS = ("auto", "HWC", "CHW")
PAGES = ("first", "channels")
DTYPES = ("uint8", "uint16", "float32")
"""The types of values that images are kept in."""
MOST_CHANNELS = 4096


class BadImage(Exception):
    """A file that can't be decoded: the reason, and the errno if the operating system reported one."""

    def __init__(self, reason: str, number: int | None = None):
        super().__init__(reason)
        self.reason, self.errno = reason, number


class Form(NamedTuple):
    """What the images of a set have in common.

    Attributes:
        dtype: the type of their values: "uint8", "uint16" or "float32".
        channels: how many values each pixel has.
        color: whether the channels are red, green and blue, or gray; False for bands of other kinds.
    """

    dtype: str = "uint8"
    channels: int = 3
    color: bool = True

    @property
    def pixel_bytes(self) -> int:
        return self.channels * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.channels} channel{'s' * (self.channels != 1)} of {self.dtype}"


ORDINARY = Form()
"""Ordinary pictures: 8-bit red, green and blue."""


@dataclass(frozen=True)
class Limits:
    """How images are decoded.

    Attributes:
        bound: larger images are reduced until their shorter side has this many pixels; None for no reduction.
        max_pixels: images with more pixels are refused.
        float_range: the values (low, high) that become 0 and 255 in images of floats.
        longest: images that are then longer are reduced until their longer side has this many pixels; None for no
            limit. It bounds the memory of a batch, in which all images are padded to the largest.
        form: the type and channels that images keep; None converts all of them to ordinary pictures.
        layout: the order of the axes of arrays: "HWC", "CHW", or "auto", which takes a short axis for the channels.
        pages: what the pages of a TIFF file are: "first" reads the first, "channels" makes each a channel.
    """

    bound: int | None = None
    max_pixels: int = MAX_PIXELS
    float_range: Sequence[float] | None = None
    longest: int | None = None
    form: Form | None = None
    layout: str = "auto"
    pages: str = "first"

    def __post_init__(self) -> None:
        span = self.float_range or None
        if self.bound is not None and self.bound < 1:
            raise UsageError(f"size is {self.bound}: give at least 1 pixel, or 0 to leave images as they are")
        if span and (len(span) != 2 or not span[0] < span[1]):
            raise UsageError(f"data.float_range must be two increasing numbers, for example [0,1], not {list(span)}")
        if self.layout not in LAYOUTS or self.pages not in PAGES:
            raise UsageError(f"layout={self.layout}, pages={self.pages}; allowed: {LAYOUTS} and {PAGES}")
        object.__setattr__(self, "float_range", span and tuple(span))
        form = None if self.form is None else Form(*self.form)  # a list in the manifest of a store
        if form is not None and (form.dtype not in DTYPES or not 1 <= form.channels <= MOST_CHANNELS):
            raise UsageError(f"images can't be kept as {form}; allowed: 1 to {MOST_CHANNELS} of {', '.join(DTYPES)}")
        object.__setattr__(self, "form", form)

    @property
    def made(self) -> Form:
        """The form of decoded images."""
        return self.form or ORDINARY

    def fit(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of an image after it is reduced."""
        sides, shorter, longer = (width, height), min(width, height), max(width, height)
        if self.bound and shorter > self.bound:
            sides = tuple(max(1, round(side * self.bound / shorter)) for side in (width, height))  # type: ignore[assignment]
        if self.longest and max(sides) > self.longest:
            sides = tuple(max(1, round(side * self.longest / longer)) for side in (width, height))  # type: ignore[assignment]
        return sides

    def check_size(self, width: int, height: int) -> None:
        """Raise `BadImage` if an image is too large, or empty."""
        if not 0 < width * height <= self.max_pixels or max(width, height) > MAX_SIDE:
            allowed = f"1 to {self.max_pixels / 1e6:g} million, and no side over {MAX_SIDE}"
            raise BadImage(f"{width} x {height} pixels; allowed: {allowed}")

    def facts(self) -> dict[str, object]:
        """What a store records; without settings that older stores don't have, if they have their defaults."""
        newer = {"longest": None, "form": None, "layout": "auto", "pages": "first"}
        return {key: value for key, value in asdict(self).items() if key not in newer or value != newer[key]}


PLAIN = Limits()
