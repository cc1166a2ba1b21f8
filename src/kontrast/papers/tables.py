"""The papers' tables as grids of recipes. Each cell has a recipe, overrides and the paper's number.

A table is a TOML file in this folder, or one of your own. Its groups list cells one by one or as a grid over one
setting. Reading a table does not need torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from kontrast.config.overrides import flat
from kontrast.config.recipe import Recipe, parse_toml, to_tree, toml_value
from kontrast.config.recipe_files import recipe_text, resolve
from kontrast.errors import UsageError
from kontrast.registry import nearest

FOLDER = Path(__file__).parent
CLAIMS, ITEMS = FOLDER / "claims.toml", FOLDER / "items.toml"
IRRELEVANT_SETTINGS = (
    "title", "seed", "data.source", "data.root", "data.resident", "data.pack", "data.max_bad", "data.follow_links",
    "data.bands", "training.compile", "training.log_every", "training.track", "training.tensorboard", "evaluation.",
    "checkpoints.",
)  # fmt: skip
"""Settings in which two runs of a cell may differ: the seed, the place of the images, what is logged and saved."""
LEARNERS = ("", "VAE", "VAE-pixels", "supervised", "untrained")
CURVES = ("knn", "multiplier")
SPELLED = {
    "α": "alpha",
    "β": "beta",
    "γ": "gamma",
    "λ": "lambda",
    "σ": "sigma",
    "τ": "tau",
    "⁺": "-plus",
    "⁻": "-minus",
}
"""How characters of a swept setting's name are written in the names of files."""


@dataclass(frozen=True)
class TableCell:
    """One row of a table: what is run, the number in the paper (accuracies in percent), and where the paper has it."""

    name: str
    label: str
    recipe: str
    group: str
    overrides: tuple[str, ...] = ()
    paper: float | None = None
    where: str = ""
    learner: str = ""  # a baseline of the audit, with the recipe's encoder, images and steps; empty: the recipe itself
    same_as: str = ""  # a cell of another group with the same settings, whose runs this one shows

    @property
    def run_as(self) -> str:
        return self.same_as or self.name


@dataclass(frozen=True)
class Table:
    """A table or figure of a paper."""

    name: str
    title: str
    paper: str
    about: str
    probes: tuple[str, ...]  # names of probes, the paper's own first; none if the table is about a measured number
    settings: tuple[str, ...]
    measures: tuple[str, ...]  # names of other measurements
    curves: tuple[str, ...]  # names of the curves over epochs that are drawn and printed
    groups: dict[str, str]  # names and titles
    cells: tuple[TableCell, ...]
    origin: str = ""  # the name or file that the user gave

    @property
    def main(self) -> str:
        """The probe or the measured number that the table is about."""
        return (self.probes or self.measures)[0]

    @property
    def run_cells(self) -> list[TableCell]:
        """The cells that are run, without those that show the runs of another cell."""
        return [cell for cell in self.cells if not cell.same_as]

    def recipe(self, cell: TableCell, overrides: Sequence[str] = ()) -> Recipe:
        return resolve(cell.recipe, [*self.settings, *cell.overrides, *overrides])

    def changed_settings(self, cell: TableCell, overrides: Sequence[str]) -> dict[str, Any]:
        """The settings that these overrides change; such runs are stored apart from the cell's own."""
        plain, given = (relevant_settings(self.recipe(cell, texts), cell.learner) for texts in ((), overrides))
        return {key: given.get(key) for key in differing_keys(plain, given)}

    def select(self, names: Sequence[str]) -> list[TableCell]:
        """The cells to run for these names of cells and groups, in the table's order; all cells without names."""
        known = [cell.name for cell in self.cells]
        for name in names:
            if name not in known and name not in self.groups:
                raise UsageError(f"{self.name} has no cell or group {name!r}: {nearest(name, [*self.groups, *known])}")
        selected = {cell.run_as for cell in self.cells if not names or cell.name in names or cell.group in names}
        return [cell for cell in self.run_cells if cell.name in selected]


def table_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml") if path not in (CLAIMS, ITEMS))


def load_table(name: str) -> Table:
    """Load a table of the package by name, or one of your own by the path of its .toml file."""
    included = name in table_names()
    path = FOLDER / f"{name}.toml" if included else Path(name)
    if not included and not (path.suffix == ".toml" and path.is_file()):
        raise UsageError(f"there is no table or table file {name!r}: {nearest(name, table_names())}")
    return read_table(path.stem, parse_toml(recipe_text(path), f"table {name!r}"), name)


def read_table(name: str, tree: dict[str, Any], origin: str) -> Table:
    """Make a table of a file's tree and check it."""
    try:
        table = Table(
            name, tree["title"], tree["paper"], tree["about"], tuple(tree["probes"]), tuple(tree["settings"]),
            tuple(tree.get("measures", ())), tuple(tree.get("curves", CURVES)),
            {g["name"]: g["title"] for g in tree["groups"]},
            tuple(cell for group in tree["groups"] for cell in group_cells(group)), origin,
        )  # fmt: skip
        mistake = next(chain(grid_mistakes(tree["groups"]), table_mistakes(table)), "")
    except KeyError as error:
        mistake = f"has no {error}; see {FOLDER / 'cacr-table-2.toml'} for an example"
    except (TypeError, ValueError, AttributeError) as error:  # an unknown key, or a value of another type
        mistake = f"can't be read ({error}); see {FOLDER / 'cacr-table-2.toml'} for an example"
    if mistake:
        raise UsageError(f"table {origin!r} {mistake}")
    return table


def grid_mistakes(groups: Sequence[dict[str, Any]]) -> Iterator[str]:
    for group in groups:
        grid = group.get("grid", {"values": []})
        name, count, papers = group["name"], len(grid["values"]), len(grid.get("paper", ()))
        if papers not in (0, count):
            yield f"has a group {name!r} with {count} values but {papers} paper numbers; give {count} or none"
        unknown = set(grid.get("same", ())) - {f"{value:g}" for value in grid["values"]}
        if unknown:
            yield f"has a group {name!r} with `same` for {', '.join(sorted(unknown))}, not one of its values"


def sweeps(table: Table) -> dict[str, dict[str, list[tuple[float, TableCell]]]]:
    """Groups whose labels differ only in a number, by the name of what is swept: that number and the cell."""
    found: dict[str, dict[str, list[tuple[float, TableCell]]]] = {}
    for group in table.groups:
        cells = [cell for cell in table.cells if cell.group == group]
        matches = [re.fullmatch(r"(\D*?)\s*(\d+(?:\.\d+)?)\s*(\D*)", cell.label) for cell in cells]
        names = {f"{match[1]} {match[3]}".strip(" =") for match in matches if match}
        if len(names) == 1 and all(matches):
            numbers = [float(match[2]) for match in matches if match]
            found.setdefault(names.pop(), {})[group] = list(zip(numbers, cells))
    return found


def file_word(swept: str) -> str:
    """The name of a swept setting for the names of files: "t⁺" is "t-plus"."""
    spelled = "".join(SPELLED.get(character, character) for character in swept.lower())
    return re.sub(r"[^a-z0-9]+", "-", spelled).strip("-") or "sweep"


def table_mistakes(table: Table) -> Iterator[str]:
    names = [cell.name for cell in table.cells]
    yield from (f"has two cells named {name!r}" for name in names if names.count(name) > 1)
    yield from (f"has a cell and a group named {name!r}: rename one" for name in names if name in table.groups)
    if not table.cells:
        yield "has no cells: give at least one"
    if not table.probes and not table.measures:
        yield "has no probes and no measures: give at least one"
    words: dict[str, str] = {}
    for swept in sweeps(table):
        if (first := words.setdefault(file_word(swept), swept)) != swept:
            yield f"sweeps {first!r} and {swept!r}, whose figures would have the same name: change the labels of one"
    runs = {cell.name: cell for cell in table.run_cells}
    for cell in table.cells:
        if cell.learner not in LEARNERS:
            yield f"has a cell {cell.name!r} with learner {cell.learner!r}; allowed: {', '.join(LEARNERS[1:])}, or none"
        if cell.same_as and cell.same_as not in runs:
            yield f"has a cell {cell.name!r} that is the same as {cell.same_as!r}, which does not exist"
        elif cell.same_as:
            other = runs[cell.same_as]
            mine, its = (relevant_settings(table.recipe(one), one.learner) for one in (cell, other))
            if different := differing_keys(mine, its):
                yield f"has a cell {cell.name!r} that differs from {other.name!r} in {', '.join(different)}"


def group_cells(group: dict[str, Any]) -> list[TableCell]:
    """The cells of a group; the group's own recipe, overrides and other keys apply to all of them."""
    shared = {key: group[key] for key in ("recipe", "where", "learner") if key in group}
    overrides = tuple(group.get("overrides", ()))
    cells = []
    for tree in [*group.get("cells", ()), *grid_cells(group)]:
        own: dict[str, Any] = {"label": str(tree["label"]), "overrides": (*overrides, *tree.get("overrides", ()))}
        own["paper"] = None if tree.get("paper") is None else float(tree["paper"])
        cells.append(TableCell(**{**shared, **tree, **own, "group": group["name"]}))
    return cells


def grid_cells(group: dict[str, Any]) -> list[dict[str, Any]]:
    """One cell per value of the group's grid, named after the group and the value."""
    grid = group.get("grid")
    if not grid:
        return []
    papers, same = grid.get("paper") or [None] * len(grid["values"]), grid.get("same", {})
    label_first = grid["label"].endswith("=")  # "λ = 2", but "2 bits"
    return [
        {
            "name": f"{group['name']}-{value:g}",
            "label": f"{grid['label']} {value:g}" if label_first else f"{value:g} {grid['label']}",
            "overrides": [f"{grid['key']}={toml_value(value)}"],
            "paper": paper,
            "same_as": same.get(f"{value:g}", ""),
        }
        for value, paper in zip(grid["values"], papers)
    ]


def differing_keys(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [key for key in sorted(before | after) if before.get(key) != after.get(key)]


def relevant_settings(recipe: Recipe, learner: str = "") -> dict[str, Any]:
    """The flat recipe without settings that don't change the result; baselines also ignore the objective."""
    ignored = (*IRRELEVANT_SETTINGS, "objective.") if learner else IRRELEVANT_SETTINGS
    return {key: value for key, value in flat(to_tree(recipe)).items() if not key.startswith(ignored)}
