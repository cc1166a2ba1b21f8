"""Checks of an objective's arguments, each with an error that names the argument, its value and what is allowed."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

from kontrast.errors import UsageError
from kontrast.registry import nearest

LARGEST = 1e18
"""The largest argument, and the inverse of the smallest: products of two of them stay within float32."""


def number(
    name: str, value: Any, *, above: float | None = None, least: float | None = None, below: float = math.inf
) -> float:
    """Check a finite number: more than `above`, at least `least`, less than `below`."""
    wanted = "a finite number"
    if above is not None:
        wanted += f" above {above:g}"
    if least is not None:
        wanted += f", at least {least:g}"
    if below < math.inf:
        wanted += f", below {below:g}"
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number from numpy or torch
        value = value.item()
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if fits and value != 0 and not 1 / LARGEST <= abs(value) <= LARGEST:
        raise UsageError(f"{name} is {value!r}: give a number between {1 / LARGEST:g} and {LARGEST:g}")
    if not fits or (above is not None and value <= above) or (least is not None and value < least) or value >= below:
        raise UsageError(f"{name} is {value!r}: give {wanted}")
    return float(value)


def positive(name: str, value: Any) -> float:
    """Check a number above 0."""
    return number(name, value, above=0.0)


def weight(name: str, value: Any) -> float:
    """Check a number of at least 0."""
    return number(name, value, least=0.0)


def optional_weight(name: str, value: Any) -> float | None:
    return None if value is None else weight(name, value)


def whole(name: str, value: Any) -> int:
    """Check a whole number of at least 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UsageError(f"{name} is {value!r}: give a whole number, at least 0")
    return value


def choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    """Check one of several words."""
    if value not in allowed:
        raise UsageError(f"{name} is {value!r}: {nearest(str(value), allowed)}")
    return str(value)


def switch(name: str, value: Any) -> bool:
    """Check true or false."""
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}: give true or false")
    return value


def switch_or(name: str, value: Any, word: str) -> bool | str:
    """Check true, false or one word."""
    if isinstance(value, str) and value != word:
        raise UsageError(f"{name} is {value!r}: give true, false or {word!r}")
    return value if value == word else switch(name, value)


def optional_switch(name: str, value: Any) -> bool | None:
    return None if value is None else switch(name, value)


def bits(value: float) -> int:
    """Return the bits of a float64 as an int64, which casting a module to another precision leaves unchanged."""
    return struct.unpack("q", struct.pack("d", value))[0]
