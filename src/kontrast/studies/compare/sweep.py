"""Which runs a comparison is made of: recipes x swept values x seeds, on the same data, views and budget.

The first recipe sets the data, the views and the budget (images shown) of all. What belongs to a method stays its own:
the objective, the number of views, local crops, batch, optimizer and encoder.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kontrast.config.overrides import apply_overrides, flat, parse_override
from kontrast.config.recipe import Recipe, read_recipe, to_tree, toml_value
from kontrast.config.recipe_files import recipe_names
from kontrast.errors import UsageError
from kontrast.objectives import OBJECTIVES, objective
from kontrast.registry import nearest
from kontrast.training.learner import check_options
from kontrast.training.resolve import fresh_recipe, with_defaults

METHODS_OWN_VIEWS = ("count", "local_count", "local_size")
MOST_CELLS = 10_000
Grid = dict[str, list[Any]]


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    name: str
    sweep: dict[str, Any]
    seed: int
    recipe: Recipe

    @property
    def configuration(self) -> str:
        """The cell without its seed: `digits-dcl-temperature0.1`."""
        parts = [
            self.name.removesuffix(".toml").strip("/"),
            *(k.rpartition(".")[2] + _text(v) for k, v in self.sweep.items()),
        ]
        return "-".join(re.sub(r"[^\w.+-]+", "-", part) for part in parts)

    @property
    def folder(self) -> str:
        return f"{self.configuration}-seed{self.seed}"


def parse_sweeps(texts: Sequence[str]) -> Grid:
    """`objective.temperature=0.05,0.1` as a key and its values; several make a grid."""
    grid: Grid = {}
    for text in texts:
        key, equals, values = text.partition("=")
        parts = [v for v in values.split(",") if v.strip()]
        if not equals or not key.strip() or not parts:
            raise UsageError(f"--sweep {text!r} must be key.path=value,value, e.g. objective.temperature=0.05,0.1")
        if key.strip() in grid:
            raise UsageError(f"--sweep {key.strip()} is given twice: put all its values into one")
        if key.strip() == "seed":
            raise UsageError("--sweep seed: give --seeds N instead")
        grid[key.strip()] = list(dict.fromkeys(parse_override(f"{key}={v}")[1] for v in parts))
    return grid


def is_method(name: str) -> bool:
    """A recipe's name or file, or an objective's name (which then runs in the recipe that the data has by default)."""
    return name in recipe_names() or name.endswith(".toml") or name in OBJECTIVES


def resolve_method(
    name: str, data: str | None, overrides: Sequence[str], device: torch.device, say: Callable[[str], None]
) -> Recipe:
    """The recipe as it would run alone."""
    if name in recipe_names() or name.endswith(".toml"):
        return fresh_recipe(data, name, list(overrides), device, say)[0]
    if name not in OBJECTIVES:
        raise UsageError(f"unknown recipe or objective {name!r}: {nearest(name, [*OBJECTIVES, *recipe_names()])}")
    method = [f"objective.name={name}", f"title={toml_value(f'{name}, in the usual recipe')}"]
    return fresh_recipe(data, None, [*method, *overrides], device, say)[0]


def plan(
    names: Sequence[str],
    data: str | None,
    *,
    seeds: int,
    grid: Grid,
    overrides: Sequence[str],
    device: torch.device,
    say: Callable[[str], None],
) -> list[Cell]:
    """Every cell with its whole recipe, checked before the first one trains."""
    if seeds < 1:
        raise UsageError(f"--seeds {seeds}: give at least 1")
    if len(set(names)) != len(names):
        raise UsageError(f"a name is given twice among {', '.join(names)}: its runs would be the same")
    count = len(names) * seeds * math.prod(map(len, grid.values()))
    if count > MOST_CELLS:
        raise UsageError(f"{count:,} runs; allowed: {MOST_CELLS:,}: sweep fewer values")
    own = [resolve_method(name, data, overrides, device, say) for name in names]
    for line in differing_arguments(names, own, grid):
        say(line)
    cells = []
    for name, recipe in zip(names, own):
        tree = apply_overrides(shared_tree(own[0], recipe), list(overrides))  # what was asked for is not stretched
        for note in changes(recipe, read_recipe(tree)):
            say(f"{name}: {note}, as in {names[0]}")
        for values in itertools.product(*grid.values()):
            sweep = dict(zip(grid, values))
            for seed in range(own[0].seed, own[0].seed + seeds):
                cells.append(Cell(name, sweep, seed, swept(tree, sweep, own[0], seed)))
    folders = [cell.folder for cell in cells]
    twice = next((f for f in folders if folders.count(f) > 1), None)
    if twice:
        raise UsageError(f"two of these runs would share the folder {twice}: give recipes of different names")
    return cells


def differing_arguments(names: Sequence[str], recipes: Sequence[Recipe], grid: Grid) -> list[str]:
    """A line for each argument that several objectives have, each at a value of its own: a difference between them may
    be this value's and not the objective's."""
    values: dict[str, dict[str, Any]] = {}
    for name, recipe in zip(names, recipes):
        for key, value in recipe.objective.arguments.items():
            values.setdefault(f"objective.{key}", {})[name] = value
    lines = []
    for key, found in values.items():
        if key not in grid and any(value != next(iter(found.values())) for value in found.values()):
            each = ", ".join(f"{name} {_text(value)}" for name, value in found.items())
            lines.append(f"{key}: {each}; to compare them at one value give {key}=...")
    return lines


def shared_tree(first: Recipe, own: Recipe) -> dict[str, Any]:
    """`own` on the first recipe's data, views and epochs. Milestones keep their shares of them; a warm-up stays as long
    as it is, since a shorter one may not do."""
    tree, common = to_tree(own), to_tree(first)
    views = {**common["views"], **{key: tree["views"][key] for key in METHODS_OWN_VIEWS}}
    t = dict(tree["training"])
    if own.training.epochs:
        stretch = first.training.epochs / own.training.epochs
        t["milestones"] = [m * stretch for m in own.training.milestones]
    t |= {key: common["training"][key] for key in ("epochs", "max_steps")}
    return {
        **tree,
        "title": own.title,
        "data": common["data"],
        "evaluation": common["evaluation"],
        "views": views,
        "training": t,
    }


def swept(tree: Mapping[str, Any], sweep: Mapping[str, Any], first: Recipe, seed: int) -> Recipe:
    """The cell's recipe; a budget given in steps becomes as many images for every batch size."""
    texts = [f"{key}={toml_value(value)}" for key, value in sweep.items()]
    recipe = read_recipe(apply_overrides({**tree, "seed": seed}, texts), "compare")
    steps, batch = first.training.max_steps, recipe.training.batch
    if steps and "training.max_steps" not in sweep and batch != first.training.batch:
        scaled = max(1, round(steps * first.training.batch / batch))
        recipe = read_recipe(apply_overrides(to_tree(recipe), [f"training.max_steps={scaled}"]), "compare")
    check_options(recipe, objective(recipe.objective.name, **recipe.objective.arguments))
    return with_defaults(recipe)


def changes(before: Recipe, after: Recipe) -> list[str]:
    old, new = flat(to_tree(before)), flat(to_tree(after))
    return [f"{k} {old.get(k)} -> {new.get(k)}" for k in sorted(old | new) if old.get(k) != new.get(k)]


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
