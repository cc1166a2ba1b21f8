"""Recipes by name: one TOML file per row of a paper's table. A recipe may name another as its base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kontrast.registry import UsageError, nearest, shorten
from kontrast.settings import DEEPEST, Recipe, parse_toml, read_recipe

RECIPE_BYTES = 1_000_000
FOLDER = Path(__file__).parent


def recipe_names() -> list[str]:
    """The recipes in the package: `quickstart`, `cifar10/dcl`, ..."""
    return sorted(str(p.relative_to(FOLDER).with_suffix("")).replace("\\", "/") for p in FOLDER.rglob("*.toml"))


def recipe_path(name: str) -> Path:
    """The file of a recipe: a name in the package, or a path to a .toml file."""
    if name in recipe_names():
        return FOLDER / f"{name}.toml"
    path = Path(name)
    if name.endswith(".toml"):
        if path.is_file():
            return path
        raise UsageError(f"no recipe file {name!r}; recipes in the package: `kontrast recipes`")
    raise UsageError(f"unknown recipe {name!r}: {nearest(name, recipe_names())}")


def recipe_text(path: Path) -> str:
    """A recipe file's text, refused when it is too large to be one or not text at all."""
    if path.stat().st_size > RECIPE_BYTES:
        raise UsageError(f"recipe {path} is larger than {RECIPE_BYTES} bytes; a recipe is a few lines of TOML")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"recipe {path} is not UTF-8 text") from None


def load_tree(name: str, seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """A recipe's plain tree with its base (`base = "other"`) merged beneath."""
    path = recipe_path(name)
    tree = parse_toml(recipe_text(path), f"recipe {name!r}")
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str) or base in (*seen, name):
        raise UsageError(f"recipe {name!r}: base must name another recipe, not {base!r}")
    return merge_trees(load_tree(base, (*seen, name)), tree)


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
    if len(text) > RECIPE_BYTES:
        raise UsageError(f"override {shorten(text)} is longer than {RECIPE_BYTES} bytes")
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


def resolve(name: str, overrides: Sequence[str] = (), extra: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe as it will run: base, file, `extra` (the command's own arguments), overrides."""
    tree = merge_trees(load_tree(name), extra or {})
    return read_recipe(apply_overrides(tree, overrides), f"recipe {name!r}")
