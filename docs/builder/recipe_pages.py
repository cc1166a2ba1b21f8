"""The pages of the recipes, one per data set: their commands, the papers' numbers and ours, from the files' headers."""

from __future__ import annotations

import re
from pathlib import Path

from kontrast.config.recipe_files import load_tree, recipe_names, recipe_path, recipe_text
from kontrast.papers.paper_items import load_items

DATA = {
    "": "No data set of their own",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "digits": "Embedded digits",
    "flickr8k": "Flickr8k, images and texts",
    "imagenet": "ImageNet",
    "imagenet100": "ImageNet-100",
    "mnist": "MNIST",
    "stl10": "STL-10",
}
"""Folders of recipes and their titles; another folder has its name as title."""
PAPERS = sorted({item.paper for item in load_items()})
NUMBER_OF = re.compile(r"^Paper \(([^)]*)\)")
LAST = "Other papers and baselines"
INTRODUCTION = """A recipe is a short file that describes a method: objective, views, networks, training. Each row has
the command that runs it; `key=value` after it changes a setting, and `kontrast explain NAME` prints the file. The
numbers are those of the recipe's header. Ours are measured by a command that the linked table names, or not given."""


def write_recipe_pages(folder: Path) -> None:
    """Write the index of the recipes and one page per data set into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    groups: dict[str, list[str]] = {}
    for name in recipe_names():
        groups.setdefault(name.rpartition("/")[0], []).append(name)
    for group, names in groups.items():
        (folder / f"{group or 'general'}.md").write_text(recipe_page(DATA.get(group, group), names), encoding="utf-8")
    (folder / "index.md").write_text(recipe_index(groups), encoding="utf-8")


def recipe_index(groups: dict[str, list[str]]) -> str:
    rows = [
        f"| [{DATA.get(group, group)}]({group or 'general'}.md) | {len(names)} |" for group, names in groups.items()
    ]
    pages = "\n".join(group or "general" for group in groups)
    table = "\n".join(["| data set | recipes |", "| --- | --- |", *rows])
    return f"# Recipes\n\n{INTRODUCTION}\n\n{table}\n\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"


def recipe_page(title: str, names: list[str]) -> str:
    """Return the page of a data set, with a section per paper."""
    sections: dict[str, list[str]] = {}
    for name in names:
        header = header_lines(name)
        paper = next((paper for paper in PAPERS if re.search(rf"\b{paper}\b", header[1])), LAST)
        sections.setdefault(paper, []).append(recipe_row(name, header))
    parts = [f"# {title}", INTRODUCTION]
    for paper in sorted(sections, key=lambda paper: (paper == LAST, paper)):
        head = ["| recipe and command | paper | ours |", "| --- | --- | --- |"]
        parts += [f"## {paper}", "\n".join(head + sections[paper])]
    return "\n\n".join(parts) + "\n"


def header_lines(name: str) -> list[str]:
    """Return the lines of the comment at the top of a recipe's file: the command, the paper's number, and ours."""
    lines = recipe_text(recipe_path(name)).splitlines()
    end = next(n for n, line in enumerate(lines) if not line.startswith("#"))
    return [line.removeprefix("#").strip() for line in lines[:end]]


def recipe_row(name: str, header: list[str]) -> str:
    command, *notes = header
    ours = next((line.removeprefix("Ours:").strip() for line in notes if line.startswith("Ours:")), "")
    paper = " ".join(line for line in notes if not line.startswith("Ours:"))
    title = str(load_tree(name).get("title", name))
    cells = [f"{title}<br>`{command}`", NUMBER_OF.sub(r"\1", paper), link_results(ours)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def link_results(text: str) -> str:
    """Turn the name of a file in results/ into a link from the pages of the recipes."""
    return re.sub(r"results/([\w./-]+?)\.md", lambda m: f"[{m[0]}](../../results/{page(m[1])}.md)", text)


def page(name: str) -> str:
    return re.sub(r"README$", "index", name)
