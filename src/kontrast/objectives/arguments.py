"""Checks of an objective's arguments, each with an error that names the argument, its value and what is allowed.

A number may be given as a Python or NumPy number, a Decimal, a Fraction, or a tensor of shape []. A parameter, or a
tensor that requires grad, stays a tensor and gets its gradient; its value is checked once, here.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Sequence
from decimal import Decimal
from numbers import Integral, Real
from typing import Any, NoReturn

from torch import Tensor, nn

from kontrast.errors import UsageError
from kontrast.kernels.row_statistics import describe
from kontrast.objectives.inputs import may_read_values
from kontrast.registry import nearest

Number = float | Tensor
"""A checked number: a float, or a tensor of shape [] that is differentiated."""

LARGEST = 1e18
"""The largest argument, and the inverse of the smallest: products of two of them stay within float32."""

NT_XENT_ALONE = "only nt-xent, info-nce and siglip learn theirs"


def refuse(name: str, value: Any, allowed: str) -> NoReturn:
    raise UsageError(f"{name} is {describe(value) if isinstance(value, Tensor) else repr(value)}: {allowed}")


def number(
    name: str, value: Any, *, above: float | None = None, least: float | None = None, below: float | None = None,
    most: float | None = None, not_learned: str = "",
) -> Number:  # fmt: skip
    """Check a finite number: above `above`, at least `least`, below `below`, at most `most`; a trained one is not 0.

    `not_learned` is the reason for refusing the word "learned", for arguments that someone may want to learn.
    """
    if isinstance(value, str) and value == "learned" and not_learned:
        refuse(name, value, f"it can't be learned here: {not_learned}; give a number")
    if isinstance(value, Tensor) and is_differentiated(value):
        return check_tensor(name, value, above if least != 0 else 0.0, below, most)
    limits = [("above", above, operator.gt), ("of at least", least, operator.ge), ("below", below, operator.lt)]
    limits += [("of at most", most, operator.le)]
    given = [(word, limit, compare) for word, limit, compare in limits if limit is not None]
    found = as_float(value)
    if math.isfinite(found) and found != 0 and not 1 / LARGEST <= abs(found) <= LARGEST:
        refuse(name, value, f"give a number between {1 / LARGEST:g} and {LARGEST:g}")
    if not math.isfinite(found) or not all(compare(found, limit) for _, limit, compare in given):
        wanted = " and ".join(f"{word} {limit:g}" for word, limit, _ in given)
        refuse(name, value, f"give a finite number {wanted}".rstrip())
    return found


def as_float(value: Any) -> float:
    """Return a number of any kind as a float, and NaN for anything else: bools, text, arrays, complex numbers."""
    if getattr(value, "ndim", None) == 0:  # a number from numpy or torch
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real | Decimal):
        return math.nan
    try:
        return float(value)
    except (OverflowError, ValueError):  # a whole number of hundreds of digits, a signaling NaN
        return math.nan


def is_differentiated(value: Tensor) -> bool:
    """Return whether a tensor stays a tensor: it is trained, or its value can't be read (torch.func, the compiler)."""
    return isinstance(value, nn.Parameter) or value.requires_grad or value.is_meta or not may_read_values(value)


def check_tensor(
    name: str, value: Tensor, above: float | None, below: float | None, most: float | None = None
) -> Tensor:
    """Check the shape and type of a tensor that is differentiated, and its value, if it can be read."""
    if value.ndim or not value.is_floating_point():
        refuse(name, value, "give a number, or a floating point tensor of shape []")
    if not value.is_meta and may_read_values(value):
        number(name, value.detach().item(), above=above, below=below, most=most)
    return value


def fixed(name: str, value: Number) -> float:
    """Refuse a tensor where it would not get its exact gradient."""
    if isinstance(value, Tensor):
        refuse(name, value, f"{name} gets no gradient here; give a number")
    return value


def is_zero(value: Number) -> bool:
    """Return whether a number switches its term off. A tensor never does: its value is not read."""
    return not isinstance(value, Tensor) and value == 0


def positive(name: str, value: Any, *, not_learned: str = "") -> Number:
    """Check a number above 0."""
    return number(name, value, above=0.0, not_learned=not_learned)


def weight(name: str, value: Any, *, not_learned: str = "") -> Number:
    """Check a number of at least 0."""
    return number(name, value, least=0.0, not_learned=not_learned)


def share(name: str, value: Any) -> Number:
    """Check a number from 0 to 1."""
    return number(name, value, least=0.0, most=1.0)


def whole(name: str, value: Any, *, least: int = 0) -> int:
    """Check a whole number of at least `least` that fits into 64 bits."""
    item = value.item() if getattr(value, "ndim", None) == 0 else value
    found = int(item) if isinstance(item, Integral) and not isinstance(item, bool) else -1
    if not least <= found < 2**63:
        refuse(name, value, f"give a whole number, at least {least} and below 2^63")
    return found


def choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    """Check one of several words."""
    if not isinstance(value, str) or value not in allowed:
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


def check_ridge(ridge: float, absolute: bool = False) -> None:
    """Check the ridge of a covariance: a share of the identity unless it is `absolute`."""
    if ridge > 1 and not absolute:
        raise UsageError(f"ridge is {ridge:g}: give the share of the identity in the covariance, from 0 to 1")
