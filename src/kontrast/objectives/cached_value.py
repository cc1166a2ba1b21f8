"""A property that is computed once, in a form that torch.compile can follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class cached(Generic[Value]):
    """A property that is computed once. functools' has a lock on Python 3.11, which torch.compile can't follow."""

    def __init__(self, compute: Callable[[Any], Value]):
        self.compute = compute

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, pairs: Any, owner: type) -> Value:
        value = self.compute(pairs)
        setattr(pairs, self.name, value)
        return value
