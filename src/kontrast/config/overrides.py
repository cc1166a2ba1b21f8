"""Overrides of a recipe: `key=value` text from the command line, or a mapping from Python, merged into its tree."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from kontrast.config.toml import LONGEST_TEXT, parse_toml
from kontrast.errors import UsageError, shorten

Overrides = Mapping[str, Any] | Sequence[str | Mapping[str, Any]]
"""A mapping with nested tables, dotted keys or both (`{"training.epochs": 5}`), or `key.path=value` strings."""
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


def parse_override(text: str) -> tuple[str, Any]:
    """Split `training.lr=0.1` into its path and its value. A value that is not TOML is a string."""
    key, equals, raw = text.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path) or len(path) > DEEPEST or len(text) > LONGEST_TEXT:
        limit = f"and at most {LONGEST_TEXT:,} characters long"
        raise UsageError(f"override {shorten(text)} must be key.path=value, for example training.epochs=5, {limit}")
    try:
        tree = parse_toml(f"value = {raw.strip()}", "override")
    except UsageError:
        tree = {}
    # Text with a newline and further keys is not one value; it stays a string, which its setting then refuses.
    return ".".join(path), tree["value"] if list(tree) == ["value"] else raw.strip()


def override_layers(overrides: Overrides) -> list[Mapping[str, Any]]:
    """Return overrides as trees, to be merged into a recipe one after the other.

    A mapping is one tree, so a name and its arguments may come in any order. Strings are a tree each: as later ones
    win, a later name drops earlier arguments of another objective or network.
    """
    if isinstance(overrides, Mapping):
        return [nested(overrides)]
    return [one if isinstance(one, Mapping) else nested(dict([parse_override(one)])) for one in overrides]


def override_keys(overrides: Overrides) -> list[str]:
    """Return the dotted paths of all settings that overrides set."""
    return list(dict.fromkeys(key for layer in override_layers(overrides) for key in flat(layer)))


def apply_overrides(tree: Mapping[str, Any], overrides: Overrides) -> dict[str, Any]:
    """Return the tree with overrides merged into it."""
    return functools.reduce(merge_trees, override_layers(overrides), dict(tree))


def nested(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with dotted keys as nested tables."""
    tree: dict[str, Any] = {}
    for key, value in overrides.items():
        *path, last = str(key).split(".")
        leaf = {last: nested(value) if isinstance(value, Mapping) else _plain(value)}
        tree = _union(tree, functools.reduce(lambda inner, name: {name: inner}, reversed(path), leaf))
    return tree


def _union(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Merge two trees; unlike `merge_trees`, a name drops nothing."""
    tables = {k: _union(one[k], v) for k, v in other.items() if isinstance(v, dict) and isinstance(one.get(k), dict)}
    return {**one, **other, **tables}


def _plain(value: Any) -> Any:
    """Return a Python value as TOML would give it: paths as text, tuples as lists, numpy's numbers as Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    value = value.tolist() if hasattr(value, "tolist") else value
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
