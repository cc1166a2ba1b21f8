"""An objective's arguments: checks that say what was given and what is allowed, and a number's exact bits."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

from kontrast.errors import UsageError
from kontrast.registry import nearest

LARGEST = 1e18
"""Of an argument: products of two and their inverses stay within float32."""


def number(
    name: str, value: Any, *, above: float | None = None, least: float | None = None, below: float = math.inf
) -> float:
    """A finite number, where asked above or not under a limit, and below another."""
    wanted = "a finite number"
    if above is not None:
        wanted += f" above {above:g}"
    if least is not None:
        wanted += f", at least {least:g}"
    if below < math.inf:
        wanted += f", below {below:g}"
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of NumPy's or torch's
        value = value.item()
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if fits and value != 0 and not 1 / LARGEST <= abs(value) <= LARGEST:
        raise UsageError(f"{name} is {value!r}: give a number between {1 / LARGEST:g} and {LARGEST:g}")
    if not fits or (above is not None and value <= above) or (least is not None and value < least) or value >= below:
        raise UsageError(f"{name} is {value!r}: give {wanted}")
    return float(value)


def positive(name: str, value: Any) -> float:
    return number(name, value, above=0.0)


def weight(name: str, value: Any) -> float:
    return number(name, value, least=0.0)


def optional_weight(name: str, value: Any) -> float | None:
    return None if value is None else weight(name, value)


def whole(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UsageError(f"{name} is {value!r}: give a whole number, at least 0")
    return value


def choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise UsageError(f"{name} is {value!r}: {nearest(str(value), allowed)}")
    return str(value)


def switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}: give true or false")
    return value


def switch_or(name: str, value: Any, word: str) -> bool | str:
    """True, false, or a word that stands between them."""
    if isinstance(value, str) and value != word:
        raise UsageError(f"{name} is {value!r}: give true, false or {word!r}")
    return value if value == word else switch(name, value)


def optional_switch(name: str, value: Any) -> bool | None:
    return None if value is None else switch(name, value)


def bits(value: float) -> int:
    """A float64's bits as an int64, which casts of a module to another precision leave alone."""
    return struct.unpack("q", struct.pack("d", value))[0]
