"""The papers' tables as grids of recipes: each cell a recipe, overrides and the paper's number. Read without torch.

A table is a file of `papers/`: groups of cells, listed one by one or as a grid over one setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kontrast.config.overrides import flat
from kontrast.config.recipe import Recipe, parse_toml, to_tree, toml_value
from kontrast.config.recipe_files import recipe_text, resolve
from kontrast.errors import UsageError
from kontrast.registry import nearest
from kontrast.studies.schema import ANY, NUMBER, TEXT, fault

FOLDER = Path(__file__).parent
CLAIMS = FOLDER / "claims.toml"
NOT_SETTINGS = (
    "title", "seed", "data.source", "data.root", "data.resident", "data.pack", "data.max_bad", "data.follow_links",
    "training.compile", "training.log_every", "evaluation.", "checkpoints.",
)  # fmt: skip
"""What may differ between two runs of one cell: the seed, where the images lie, what is logged and kept."""
CELL = {
    "name": TEXT, "label": TEXT, "recipe?": TEXT, "overrides?": [TEXT], "paper?": NUMBER, "where?": TEXT,
    "learner?": TEXT,
}  # fmt: skip
GRID = {"key": TEXT, "values": [NUMBER], "label": TEXT, "paper?": [NUMBER], "same?": {ANY: TEXT}}
GROUP = {
    "name": TEXT, "title": TEXT, "recipe?": TEXT, "overrides?": [TEXT], "where?": TEXT, "learner?": TEXT,
    "cells?": [CELL], "grid?": GRID,
}  # fmt: skip
TABLE = {
    "groups": [GROUP], "title": TEXT, "paper": TEXT, "about": TEXT, "probes": [TEXT], "settings": [TEXT],
    "measures?": [TEXT],
}  # fmt: skip
LEARNERS = ("", "VAE", "VAE-pixels")


@dataclass(frozen=True)
class TableCell:
    """One row: what is run, and what the paper has (in percent) where."""

    name: str
    label: str
    recipe: str
    group: str
    overrides: tuple[str, ...] = ()
    paper: float | None = None
    where: str = ""
    learner: str = ""  # empty: the recipe's own; VAE, VAE-pixels: the audit's autoencoders on the recipe's images
    same_as: str = ""  # the cell of another group that is run for both

    @property
    def run_as(self) -> str:
        return self.same_as or self.name


@dataclass(frozen=True)
class Table:
    """A table or figure of a paper. probes: by name, the paper's own first. measures: what else is taken of a run."""

    name: str
    title: str
    paper: str
    about: str
    probes: tuple[str, ...]
    settings: tuple[str, ...]
    measures: tuple[str, ...]
    groups: dict[str, str]  # name to title
    cells: tuple[TableCell, ...]
    origin: str = ""  # the name or file by which it was asked for

    @property
    def run_cells(self) -> list[TableCell]:
        """Those that are run themselves: each run once, in whichever groups it is shown."""
        return [cell for cell in self.cells if not cell.same_as]

    def recipe(self, cell: TableCell, overrides: Sequence[str] = ()) -> Recipe:
        return resolve(cell.recipe, [*self.settings, *cell.overrides, *overrides])

    def changed(self, cell: TableCell, overrides: Sequence[str]) -> dict[str, Any]:
        """The settings by which these overrides make another cell of it."""
        plain, given = (settings_of(self.recipe(cell, texts), cell.learner) for texts in ((), overrides))
        return {key: given.get(key) for key in sorted(plain | given) if plain.get(key) != given.get(key)}

    def choose(self, names: Sequence[str]) -> list[TableCell]:
        """What is to be run of these cells and groups, in the table's order; none named: all."""
        known = [cell.name for cell in self.cells]
        for name in names:
            if name not in known and name not in self.groups:
                raise UsageError(f"{self.name} has no cell or group {name!r}: {nearest(name, [*self.groups, *known])}")
        asked = {cell.run_as for cell in self.cells if not names or cell.name in names or cell.group in names}
        return [cell for cell in self.run_cells if cell.name in asked]


def table_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml") if path != CLAIMS)


def load_table(name: str) -> Table:
    """A table of the package, or a .toml file of one's own."""
    path = FOLDER / f"{name}.toml"
    if name not in table_names():
        path = Path(name)
        if not name.endswith(".toml"):
            raise UsageError(f"unknown table {name!r}: {nearest(name, table_names())}")
        if not path.is_file():
            raise UsageError(f"no table file {name!r}; tables in the package: `kontrast reproduce --list`")
    return read_table(path.stem, parse_toml(recipe_text(path), f"table {name!r}"), name)


def read_table(name: str, tree: dict[str, Any], origin: str) -> Table:
    """The table of a file's tree; one that is no table, or an impossible one, is refused."""
    named = f"table {origin!r}"
    wrong = fault(tree, TABLE)
    if wrong:
        beside = FOLDER / "cacr-table-2.toml"
        raise UsageError(f"{named} can't be read: {wrong}; {beside} is one that can")
    try:
        cells = [cell for group in tree["groups"] for cell in read_group(group)]
    except TypeError as error:
        raise UsageError(f"{named} has a cell that can't be read: {error}") from None
    except UsageError as error:
        raise UsageError(f"{named}: {error}") from None
    table = Table(
        name, tree["title"], tree["paper"], tree["about"], tuple(tree["probes"]), tuple(tree["settings"]),
        tuple(tree.get("measures", ())), {g["name"]: g["title"] for g in tree["groups"]}, tuple(cells), origin,
    )  # fmt: skip
    check_table(table, named)
    return table


def check_table(table: Table, named: str) -> None:
    names = [cell.name for cell in table.cells]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{named} has two cells named {name!r}")
        if name in table.groups:
            raise UsageError(f"{named} has a cell and a group named {name!r}: --cells could mean either")
    for what, found in (("cells", table.cells), ("probes", table.probes)):
        if not found:
            raise UsageError(f"{named} has no {what}: give at least one")
    for cell in table.cells:
        if cell.same_as:
            check_same(table, cell, named)
        if cell.learner not in LEARNERS:
            raise UsageError(
                f"{named}: cell {cell.name!r} has the learner {cell.learner!r}; allowed: VAE, VAE-pixels, or none"
            )


def check_same(table: Table, cell: TableCell, named: str) -> None:
    """Refuse a cell that would show the runs of one with other settings."""
    other = next((one for one in table.run_cells if one.name == cell.same_as), None)
    if other is None:
        raise UsageError(f"{named}: cell {cell.name!r} is the same as {cell.same_as!r}, which is not there")
    mine, its = (settings_of(table.recipe(one), one.learner) for one in (cell, other))
    apart = [key for key in sorted(mine | its) if mine.get(key) != its.get(key)]
    if apart:
        raise UsageError(f"{named}: cell {cell.name!r} is not the same as {other.name!r}: {', '.join(apart)} differ")


def read_group(group: dict[str, Any]) -> list[TableCell]:
    """The cells of a group; what the group says holds for each of them."""
    shared = {key: group[key] for key in ("recipe", "where", "learner") if key in group}
    overrides = tuple(group.get("overrides", ()))
    cells = []
    for tree in [*group.get("cells", ()), *grid_cells(group)]:
        own = tuple(tree.get("overrides", ()))
        cells.append(TableCell(**{**shared, **tree, "group": group["name"], "overrides": (*overrides, *own)}))
    return cells


def grid_cells(group: dict[str, Any]) -> list[dict[str, Any]]:
    """One cell for each value of the group's grid, named after the group and the value."""
    grid = group.get("grid")
    if not grid:
        return []
    papers = grid.get("paper") or [None] * len(grid["values"])
    if len(papers) != len(grid["values"]):
        raise UsageError(
            f"the grid of group {group['name']!r} has {len(grid['values'])} values, and of the paper {len(papers)}: "
            "give one for each, or none"
        )
    same = grid.get("same", {})
    unknown = set(same) - {f"{value:g}" for value in grid["values"]}
    if unknown:
        words = ", ".join(sorted(unknown))
        raise UsageError(f"the grid of group {group['name']!r} has `same` for {words}, which is none of its values")
    before = grid["label"].endswith("=")  # "λ = 2", but "2 bits"
    return [
        {
            "name": f"{group['name']}-{value:g}",
            "label": f"{grid['label']} {value:g}" if before else f"{value:g} {grid['label']}",
            "overrides": [f"{grid['key']}={toml_value(value)}"],
            "paper": paper,
            "same_as": same.get(f"{value:g}", ""),
        }
        for value, paper in zip(grid["values"], papers)
    ]


def settings_of(recipe: Recipe, learner: str = "") -> dict[str, Any]:
    """What makes a run of one cell comparable with another's: the flat recipe without what may differ, and, where
    another learner takes the recipe's place, without the objective."""
    left_out = (*NOT_SETTINGS, "objective.") if learner else NOT_SETTINGS
    return {key: value for key, value in flat(to_tree(recipe)).items() if not key.startswith(left_out)}


def parse_seeds(text: str) -> list[int]:
    """`3` is the seeds 0, 1 and 2; `1,4` those two; `2,` the one seed 2."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 0 or ("," not in text and numbers[0] < 1):
        raise UsageError(f"--seeds {text!r}: give how many (3), or which ones with commas (1,4; a single one as 2,)")
    return list(dict.fromkeys(numbers)) if "," in text else list(range(numbers[0]))
