"""Checks of an objective's arguments, each with an error that names the argument, its value and what is allowed."""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Sequence
from typing import Any, NoReturn

from kontrast.errors import UsageError
from kontrast.registry import nearest

LARGEST = 1e18
"""The largest argument, and the inverse of the smallest: products of two of them stay within float32."""


def refuse(name: str, value: Any, allowed: str) -> NoReturn:
    raise UsageError(f"{name} is {value!r}: {allowed}")


def number(
    name: str, value: Any, *, above: float | None = None, least: float | None = None, below: float | None = None
) -> float:
    """Check a finite number: more than `above`, at least `least`, less than `below`."""
    if getattr(value, "ndim", None) == 0:  # a number from numpy or torch
        value = value.item()
    limits = [("above", above, operator.gt), ("of at least", least, operator.ge), ("below", below, operator.lt)]
    given = [(word, limit, compare) for word, limit, compare in limits if limit is not None]
    finite = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if finite and value != 0 and not 1 / LARGEST <= abs(value) <= LARGEST:
        refuse(name, value, f"give a number between {1 / LARGEST:g} and {LARGEST:g}")
    if not finite or not all(compare(value, limit) for _, limit, compare in given):
        wanted = " and ".join(f"{word} {limit:g}" for word, limit, _ in given)
        refuse(name, value, f"give a finite number {wanted}".rstrip())
    return float(value)


def positive(name: str, value: Any) -> float:
    """Check a number above 0."""
    return number(name, value, above=0.0)


def weight(name: str, value: Any) -> float:
    """Check a number of at least 0."""
    return number(name, value, least=0.0)


def whole(name: str, value: Any) -> int:
    """Check a whole number of at least 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        refuse(name, value, "give a whole number, at least 0")
    return value


def choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    """Check one of several words."""
    if value not in allowed:
        refuse(name, value, nearest(str(value), allowed))
    return str(value)


def switch(name: str, value: Any, *words: str) -> Any:
    """Check true or false, or one of some words."""
    if not isinstance(value, bool) and not (isinstance(value, str) and value in words):
        refuse(name, value, f"give {' or '.join(['true', 'false', *map(repr, words)])}")
    return value


def bits(value: float) -> int:
    """Return the bits of a float64 as an int64, which casting a module to another precision leaves unchanged."""
    return struct.unpack("q", struct.pack("d", value))[0]
