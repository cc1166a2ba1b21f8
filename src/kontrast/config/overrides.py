"""Overrides of a recipe: `key=value` text from the command line, or a mapping from Python, merged into its tree."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from kontrast.config.toml import LONGEST_TEXT, parse_toml
from kontrast.errors import UsageError, shorten

Overrides = Sequence[str] | Mapping[str, Any]
"""`key.path=value` strings, or a mapping with nested tables, dotted keys or both."""
DEEPEST = 8
"""How deeply the values of a recipe may be nested."""


def merge_trees(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `above` into `below`, table by table.

    If a table changes its `name`, it starts afresh: the arguments of the other objective or network are dropped.
    """
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            renamed = "name" in value and value["name"] != old.get("name")
            merged[key] = dict(value) if renamed else merge_trees(old, value)
        else:
            merged[key] = value
    return merged


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a tree by their dotted paths, for example `training.lr`."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves.update(flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value})
    return leaves


def parse_override(text: str) -> tuple[list[str], Any]:
    """Split `training.lr=0.1` into its path and its value. A value that is not TOML is a string."""
    key, equals, raw = text.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path) or len(path) > DEEPEST:
        raise UsageError(f"override {shorten(text)} must be key.path=value, for example training.epochs=5")
    if len(text) > LONGEST_TEXT:
        raise UsageError(f"override {shorten(text)} is longer than {LONGEST_TEXT} bytes")
    try:
        tree = parse_toml(f"value = {raw.strip()}", "override")
    except UsageError:
        tree = {}
    # Text with a newline and further keys is not one value; it stays a string, which its setting then refuses.
    return path, tree["value"] if list(tree) == ["value"] else raw.strip()


def override_tree(overrides: Overrides) -> dict[str, Any]:
    """Return overrides as one tree. Later overrides win; a name and its arguments may come in any order.

    Args:
        overrides: `key.path=value` strings, or a mapping with nested tables, dotted keys or both:
            `{"training.epochs": 5, "objective": {"name": "dcl"}}`.
    """
    tree: dict[str, Any] = {}
    if isinstance(overrides, Mapping):
        _update(tree, overrides)
    else:
        for path, value in map(parse_override, overrides):
            _update(tree, {".".join(path): value})
    return tree


def _update(tree: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Set each override in the tree, table by table; dots in a key separate tables."""
    for key, value in overrides.items():
        *path, last = str(key).split(".")
        table = tree
        for name in path if not isinstance(value, Mapping) else (*path, last):
            if not isinstance(table.get(name), dict):
                table[name] = {}
            table = table[name]
        if isinstance(value, Mapping):
            if "name" in value:
                _update(table, {"name": value["name"]})
            _update(table, value)
        else:
            if last == "name" and table.get("name", value) != value:
                table.clear()  # the arguments were those of another objective or network
            table[last] = _plain(value)


def _plain(value: Any) -> Any:
    """Return a Python value as TOML would give it: paths as text, tuples as lists, numpy's numbers as Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    value = value.tolist() if hasattr(value, "tolist") else value
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def apply_overrides(tree: Mapping[str, Any], overrides: Overrides) -> dict[str, Any]:
    """Return the tree with overrides merged into it."""
    return merge_trees(tree, override_tree(overrides))
