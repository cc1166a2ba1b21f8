"""Find and read recipes by name: one TOML file per row of a paper's table. A recipe may name another as its base."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from kontrast.config.overrides import Overrides, apply_overrides, merge_trees
from kontrast.config.recipe import Recipe, read_recipe
from kontrast.config.toml import LONGEST_TEXT, parse_toml
from kontrast.errors import UsageError
from kontrast.files import read_faults
from kontrast.registry import nearest

FOLDER = Path(__file__).parents[1] / "recipes"


@functools.cache
def recipe_names() -> tuple[str, ...]:
    """Return the names of the recipes in the package: `quickstart`, `cifar10/dcl`, ..."""
    return tuple(sorted(str(p.relative_to(FOLDER).with_suffix("")).replace("\\", "/") for p in FOLDER.rglob("*.toml")))


def recipe_path(name: str) -> Path:
    """Return the file of a recipe, given its name in the package or a path to a .toml file."""
    if name in recipe_names():
        return FOLDER / f"{name}.toml"
    if name.endswith(".toml") and Path(name).is_file():
        return Path(name)
    hint = "there is no such file" if name.endswith(".toml") else nearest(name, recipe_names())
    raise UsageError(f"unknown recipe {name!r}: {hint}")


def recipe_text(path: Path) -> str:
    """Read a recipe file. Of one that is too long, only as much is read as `parse_toml` needs to refuse it."""
    try:
        with read_faults(path), path.open(encoding="utf-8", newline="") as file:
            return file.read(LONGEST_TEXT + 1)
    except UnicodeDecodeError:
        raise UsageError(f"recipe {path} is not UTF-8 text") from None


def load_tree(name: str, seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a recipe as a plain tree, merged over its base (`base = "other"`)."""
    tree = parse_toml(recipe_text(recipe_path(name)), f"recipe {name!r}")
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str) or base in (*seen, name):
        raise UsageError(f"recipe {name!r}: base must name another recipe, not {base!r}")
    return merge_trees(load_tree(base, (*seen, name)), tree)


def resolve(name: str, overrides: Overrides = ()) -> Recipe:
    """Return a recipe by its name, with its base and overrides applied."""
    return read_recipe(apply_overrides(load_tree(name), overrides), f"recipe {name!r}")
