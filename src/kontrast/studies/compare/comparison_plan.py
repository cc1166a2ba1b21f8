"""Which runs a comparison consists of: recipes x swept values x seeds, on the same data, views and budget.

The first recipe decides the data, the views and the budget (the number of images shown) of all runs. Each method keeps
its own objective, number of views, local crops, batch size, optimizer and encoder.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kontrast.config.overrides import apply_overrides, parse_override
from kontrast.config.recipe import Recipe, read_recipe, to_tree, toml_value
from kontrast.config.recipe_files import recipe_names
from kontrast.errors import UsageError
from kontrast.objectives import OBJECTIVES
from kontrast.registry import unknown
from kontrast.studies.cells import Cell, Say, recipe_changes, seeds_from
from kontrast.training.learner import build_objective
from kontrast.training.option_checks import check_options
from kontrast.training.resolve import fresh_recipe, with_defaults

KEPT_VIEW_SETTINGS = ("count", "local_count", "local_size")
Grid = dict[str, list[Any]]


def parse_sweeps(texts: Sequence[str]) -> Grid:
    """Parse `objective.temperature=0.05,0.1` into a key and its values; several sweeps make a grid."""
    grid: Grid = {}
    for text in texts:
        key, _, values = text.partition("=")
        key, parts = key.strip(), [v for v in values.split(",") if v.strip()]
        if not key or not parts or key == "seed" or key in grid:
            raise UsageError(
                f"--sweep {text!r} must be key.path=value,value, e.g. objective.temperature=0.05,0.1, and each key may "
                "be given once; for seeds use --seeds N"
            )
        grid[key] = list(dict.fromkeys(parse_override(f"{key}={v}")[1] for v in parts))
    return grid


def is_method(name: str) -> bool:
    """Tell whether a name is a recipe, a recipe file or an objective (which runs in the data's default recipe)."""
    return name in recipe_names() or name.endswith(".toml") or name in OBJECTIVES


def resolve_method(name: str, data: str | None, overrides: Sequence[str], device: torch.device, say: Say) -> Recipe:
    """The recipe as it would run on its own."""
    if name in recipe_names() or name.endswith(".toml"):
        return fresh_recipe(data, name, list(overrides), device, say)[0]
    if name not in OBJECTIVES:
        known = unknown(name, [*OBJECTIVES, *recipe_names()], OBJECTIVES.hint(name))
        raise UsageError(f"{name!r} is not a recipe, an objective or data: {known}")
    method = [f"objective.name={name}", f"title={toml_value(f'{name}, in the usual recipe')}"]
    return fresh_recipe(data, None, [*method, *overrides], device, say)[0]


def plan(
    names: Sequence[str],
    data: str | None,
    *,
    out: Path,
    seeds: int,
    grid: Grid,
    overrides: Sequence[str],
    device: torch.device,
    say: Say,
) -> list[Cell]:
    """All cells with their recipes, which are checked before the first one trains."""
    recipes = [resolve_method(name, data, overrides, device, say) for name in names]
    for line in differing_arguments(names, recipes, grid):
        say(line)
    first, cells = recipes[0], []
    for name, recipe in zip(names, recipes):
        tree = apply_overrides(shared_tree(first, recipe), list(overrides))  # the user's settings are not rescaled
        for change in recipe_changes(recipe, read_recipe(tree)):
            say(f"{name}: {change}, as in {names[0]}")
        for values in itertools.product(*grid.values()):
            sweep = dict(zip(grid, values))
            for seed in seeds_from(first.seed, seeds):
                cells.append(make_cell(out, name, sweep, cell_recipe(tree, sweep, first, seed)))
    cell_names = [cell.name for cell in cells]
    twice = next((name for name in cell_names if cell_names.count(name) > 1), "")
    if twice:
        raise UsageError(f"two runs would share the folder {twice}: give each recipe once and under its own name")
    return cells


def make_cell(out: Path, method: str, sweep: Mapping[str, Any], recipe: Recipe) -> Cell:
    """A cell such as `digits-dcl-temperature0.1-seed0`; its configuration is the name without the seed."""
    parts = [method.removesuffix(".toml").strip("/"), *(k.rpartition(".")[2] + short(v) for k, v in sweep.items())]
    configuration = "-".join(re.sub(r"[^\w.+-]+", "-", part) for part in parts)
    name = f"{configuration}-seed{recipe.seed}"
    facts = {"recipe": method, "configuration": configuration, "sweep": dict(sweep), "seed": recipe.seed}
    facts["run"] = f"runs/{name}"
    folder = out / "runs" / name
    return Cell(name, recipe, folder, out / "recipes" / f"{name}.toml", folder / "cell.json", facts)


def differing_arguments(names: Sequence[str], recipes: Sequence[Recipe], grid: Grid) -> list[str]:
    """One line per argument that several objectives have at different values, since it may explain a difference."""
    values: dict[str, dict[str, Any]] = {}
    for name, recipe in zip(names, recipes):
        for key, value in recipe.objective.arguments.items():
            values.setdefault(f"objective.{key}", {})[name] = value
    lines = []
    for key, by_name in values.items():
        if key not in grid and any(value != next(iter(by_name.values())) for value in by_name.values()):
            each = ", ".join(f"{name} {short(value)}" for name, value in by_name.items())
            lines.append(f"{key} differs: {each}; set {key}=... to compare the objectives at the same value")
    return lines


def shared_tree(first: Recipe, own: Recipe) -> dict[str, Any]:
    """`own` with the first recipe's data, views and number of epochs.

    Milestones are rescaled to the number of epochs. The warm-up keeps its length, because a shorter one may not do.
    """
    tree, shared = to_tree(own), to_tree(first)
    training = dict(tree["training"])
    if own.training.epochs:
        stretch = first.training.epochs / own.training.epochs
        training["milestones"] = [m * stretch for m in own.training.milestones]
    training |= {key: shared["training"][key] for key in ("epochs", "max_steps")}
    views = {**shared["views"], **{key: tree["views"][key] for key in KEPT_VIEW_SETTINGS}}
    same = {key: shared[key] for key in ("data", "evaluation")}
    return {**tree, **same, "title": own.title, "views": views, "training": training}


def cell_recipe(tree: Mapping[str, Any], sweep: Mapping[str, Any], first: Recipe, seed: int) -> Recipe:
    """The recipe of one cell. A budget in steps is rescaled so that every batch size shows as many images."""
    texts = [f"{key}={toml_value(value)}" for key, value in sweep.items()]
    recipe = read_recipe(apply_overrides({**tree, "seed": seed}, texts), "compare")
    steps, batch = first.training.max_steps, recipe.training.batch
    if steps and "training.max_steps" not in sweep and batch != first.training.batch:
        scaled = max(1, round(steps * first.training.batch / batch))
        recipe = read_recipe(apply_overrides(to_tree(recipe), [f"training.max_steps={scaled}"]), "compare")
    check_options(recipe, build_objective(recipe))
    return with_defaults(recipe)


def short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
