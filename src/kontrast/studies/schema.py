"""Whether a tree that was read from a file has the form that its reader needs, told before anything is done with it.

A shape is the name of a kind, [shape] for a list of such, or a table of shapes by key: a key that ends in "?" may be
missing, and under `ANY` stands the shape of all values, whatever their keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

TEXT, WHOLE, NUMBER, SHARE, COUNT = "text", "whole number", "number", "number from 0 to 1", "number of at least 1"
MAYBE_NUMBER, MAYBE_TEXT, POINT, BYTES = "number or null", "text or null", "pair of numbers", "row of hexadecimal bytes"
ANY = "*"
LARGEST = 1e300  # no measurement is larger, and what is can't be written as a decimal


def is_number(value: Any) -> bool:
    """A number that can be counted with: NaN and infinity, which Python reads from JSON, can't."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST < value < LARGEST


def is_whole(value: Any) -> bool:
    return is_number(value) and isinstance(value, int)


KINDS = {
    TEXT: lambda value: isinstance(value, str),
    WHOLE: is_whole,
    NUMBER: is_number,
    SHARE: lambda value: is_number(value) and 0 <= value <= 1,
    COUNT: lambda value: is_whole(value) and value >= 1,
    MAYBE_NUMBER: lambda value: value is None or is_number(value),
    MAYBE_TEXT: lambda value: value is None or isinstance(value, str),
    POINT: lambda value: isinstance(value, list) and len(value) == 2 and all(map(is_number, value)),
    BYTES: lambda value: isinstance(value, str) and re.fullmatch(r"(?:[0-9a-f]{2})*", value) is not None,
}


def fault(value: Any, shape: Any, where: str = "") -> str:
    """The first thing that is wrong, as `probes.knn lacks 'n'`; empty where the value has the shape."""
    named = where or "it"
    if isinstance(shape, str):
        return "" if KINDS[shape](value) else f"{named} is no {shape}"
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{named} is no list"
        return first(fault(part, shape[0], f"{where}[{place}]") for place, part in enumerate(value))
    if not isinstance(value, dict):
        return f"{named} is no table"
    return first(key_fault(value, key, inner, where) for key, inner in shape.items())


def key_fault(table: dict[str, Any], key: str, shape: Any, where: str) -> str:
    """What is wrong with a table's value of this key."""
    before = f"{where}." if where else ""
    if key == ANY:
        return first(fault(value, shape, f"{before}{name}") for name, value in table.items())
    name = key.removesuffix("?")
    if name not in table:
        return "" if key.endswith("?") else f"{where or 'it'} lacks {name!r}"
    return fault(table[name], shape, f"{before}{name}")


def first(faults: Iterable[str]) -> str:
    return next((text for text in faults if text), "")
