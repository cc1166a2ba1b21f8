"""Recipes by name: one TOML file per row of a paper's table. A recipe may name another as its base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kontrast.config.overrides import apply_overrides, merge_trees
from kontrast.config.recipe import Recipe, parse_toml, read_recipe
from kontrast.config.toml import LONGEST_TEXT
from kontrast.errors import UsageError
from kontrast.registry import nearest

FOLDER = Path(__file__).parents[1] / "recipes"


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
    if path.stat().st_size > LONGEST_TEXT:
        raise UsageError(f"recipe {path} is larger than {LONGEST_TEXT} bytes; a recipe is a few lines of TOML")
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


def resolve(name: str, overrides: Sequence[str] = (), extra: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe as it will run: base, file, `extra` (the command's own arguments), overrides."""
    tree = merge_trees(load_tree(name), extra or {})
    return read_recipe(apply_overrides(tree, overrides), f"recipe {name!r}")
