"""Recipes by name: one TOML file per row of a paper's table. A recipe may name another as its base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kontrast.config.recipe import DEEPEST, parse_toml
from kontrast.config.toml import LONGEST_TEXT
from kontrast.errors import UsageError, shorten


def merge_trees(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`, table by table. A table that changes its `name` starts afresh: the other's arguments go."""
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
    """The tree's leaves by their paths: `training.lr`."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves.update(flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value})
    return leaves


def parse_override(text: str) -> tuple[list[str], Any]:
    """`training.lr=0.1` as its path and its value; a bare word is a string."""
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
    # More than a value (a newline, then other keys) was no value: it is taken as the text it is, and judged as such.
    return path, tree["value"] if list(tree) == ["value"] else raw.strip()


def apply_overrides(tree: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The tree with each `key.path=value` laid over it, in order."""
    result: dict[str, Any] = dict(tree)
    for text in overrides:
        path, value = parse_override(text)
        layer: dict[str, Any] = {path[-1]: value}
        for key in reversed(path[:-1]):
            layer = {key: layer}
        if len(path) > 1 and not isinstance(result.get(path[0], {}), Mapping) and result.get(path[0]) is not False:
            raise UsageError(f"override {text!r}: {path[0]} has no parts")
        result = merge_trees(result, layer)
    return result
