"""Checks that a tree read from JSON or TOML has the keys and types that its reader needs.

A schema is a type (str, int or float), `Optional(type)`, `[schema]` for a list, or a dictionary of schemas by key. A
key that ends in "?" may be missing, and `ANY` gives the schema of the values of all keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

ANY = "*"
INFINITY = float("inf")
NAMES = {str: "text", int: "a whole number", float: "a number"}


class Optional(NamedTuple):
    """A value that may be null."""

    kind: type


def find_mismatch(value: Any, schema: Any, path: str = "") -> str:
    """Describe the first mismatch, such as `'n' is missing in probes.knn`; empty if the value matches the schema."""
    name = path or "it"
    if isinstance(schema, Optional):
        return "" if value is None else find_mismatch(value, schema.kind, path)
    if isinstance(schema, type):
        return "" if has_type(value, schema) else f"{name} is not {NAMES[schema]}"
    if isinstance(schema, list):
        if not isinstance(value, list):
            return f"{name} is not a list"
        return first(find_mismatch(part, schema[0], f"{path}[{number}]") for number, part in enumerate(value))
    if not isinstance(value, dict):
        return f"{name} is not a table"
    return first(find_key_mismatch(value, key, inner, path) for key, inner in schema.items())


def has_type(value: Any, kind: type) -> bool:
    """Tell whether a value is text, a whole number or a finite number; true and false are not numbers."""
    if kind is str:
        return isinstance(value, str)
    allowed = int if kind is int else (int, float)
    return isinstance(value, allowed) and not isinstance(value, bool) and -INFINITY < value < INFINITY


def find_key_mismatch(table: dict[str, Any], key: str, schema: Any, path: str) -> str:
    prefix = f"{path}." if path else ""
    if key == ANY:
        return first(find_mismatch(value, schema, f"{prefix}{name}") for name, value in table.items())
    name = key.removesuffix("?")
    if name not in table:
        return "" if key.endswith("?") else f"{name!r} is missing{f' in {path}' * bool(path)}"
    return find_mismatch(table[name], schema, f"{prefix}{name}")


def first(mismatches: Iterable[str]) -> str:
    return next((text for text in mismatches if text), "")
