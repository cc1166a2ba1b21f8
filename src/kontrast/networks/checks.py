"""Checks of the arguments of networks, with errors of one line."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from kontrast.errors import UsageError
from kontrast.registry import nearest


def check_whole(name: str, value: Any, *, least: int = 1, multiple: int = 1, most: float = math.inf) -> int:
    """Return the value if it is a whole number in the range and a multiple of `multiple`."""
    if type(value) is not int or not least <= value <= most or value % multiple:
        kind = "whole number" if multiple == 1 else f"multiple of {multiple}"
        raise UsageError(f"{name} = {value!r}: give a {kind} from {least}" + (f" to {most}" if most < math.inf else ""))
    return value


def check_choice(name: str, value: str, allowed: Iterable[str]) -> None:
    """Raise an error that names the nearest allowed value, if this one is not allowed."""
    if value not in allowed:
        raise UsageError(f"unknown {name} {value!r}: {nearest(value, allowed)}")
