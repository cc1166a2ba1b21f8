"""Decide whether the images of a source keep their own depth and channels, by the headers of a sample of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter

from kontrast.data.decode import read_header
from kontrast.data.limits import ORDINARY, BadImage, Form
from kontrast.data.listing import Listing
from kontrast.data.raw_image import Header
from kontrast.data.source_files import Options
from kontrast.errors import DataError, UsageError, printable
from kontrast.registry import nearest

DEPTHS = ("auto", "8-bit", "own")
SAMPLED = 64
"""Headers that are read to learn the form of a set."""


def with_form(found: Listing, options: Options) -> Options:
    """The options with the form in which the images of a listing are kept.

    "auto" keeps the form of images of which none in a sample is an ordinary picture, unless there is a float_range,
    which says how to convert them.
    """
    if options.depth not in DEPTHS:
        raise UsageError(f"depth can't be {options.depth!r}: {nearest(options.depth, DEPTHS)}")
    limits = options.limits
    if options.depth == "8-bit" or (options.depth == "auto" and limits.float_range):
        return options
    headers = _sample_headers(found, options)
    if not headers or (options.depth == "auto" and any(header.ordinary for _, header in headers)):
        return options
    form = common_form(headers, options.max_bad)
    return dataclasses.replace(options, limits=dataclasses.replace(limits, form=None if form == ORDINARY else form))


def _sample_headers(found: Listing, options: Options) -> list[tuple[str, Header]]:
    """Names and headers of at most `SAMPLED` images, evenly spaced over the listing, without those that are bad."""
    count, headers = min(SAMPLED, len(found.items)), []
    for number in range(count):
        item = found.items[number * len(found.items) // count]
        with contextlib.suppress(BadImage):
            header = read_header(item.path, item.offset, item.length, options.limits)
            headers.append((item.name, header))
            if header.ordinary and options.depth == "auto":
                break
    return headers


def common_form(headers: list[tuple[str, Header]], max_bad: float) -> Form:
    """The form of nearly all of these images; gray ones among colors count as colors. Others will be bad images, so
    there may be only as many as `max_bad` allows; more are an error that names the forms."""
    colors = any(header.form.channels == 3 for _, header in headers)
    names: dict[tuple[str, int], str] = {}
    counts: Counter[tuple[str, int]] = Counter()
    for name, header in headers:
        channels = 3 if colors and header.form.channels == 1 else header.form.channels
        counts[header.form.dtype, channels] += 1
        names.setdefault((header.form.dtype, channels), name)
    (dtype, channels), many = counts.most_common(1)[0]
    if len(headers) - many > max_bad * len(headers):
        shown = ", ".join(
            f"{Form(*kind)} ({count}, such as {printable(names[kind])})" for kind, count in counts.most_common(4)
        )
        advice = "keep images of one form, or convert gray and colors alike with data.depth=8-bit"
        raise DataError(f"the images differ in form; of {len(headers)} there are {shown}: {advice}")
    return Form(dtype, channels, all(header.form.color for _, header in headers if header.form.channels == channels))
