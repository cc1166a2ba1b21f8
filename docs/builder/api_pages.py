"""The pages of the Python API: every public name of the package and of its rooms, from the docstrings."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kontrast
from kontrast.objectives import Objective

ROOMS = {
    "objectives": "Losses, one class each, and the base class for your own",
    "kernels": "Statistics of rows of the affinity matrix, tile by tile",
    "networks": "Encoders, heads, momentum teacher, memory bank, prototypes",
    "views": "Batches of images to batches of views",
    "data": "Folders, shards, packed stores and named sets to batches",
    "probes": "What frozen features can do",
    "lens": "What a representation is",
    "optim": "Optimizers and schedules",
    "errors": "Exceptions, and the exit codes of the command",
}
"""The rooms whose names are public, in the order of the pages."""


def write_api_pages(folder: Path) -> None:
    """Write the index of the API, the page of the functions, and one page per room into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "functions.md").write_text(functions_page(), encoding="utf-8")
    for room, title in ROOMS.items():
        (folder / f"{room}.md").write_text(room_page(room, title), encoding="utf-8")
    (folder / "index.md").write_text(api_index(), encoding="utf-8")


def api_index() -> str:
    rows = ["| [Functions](functions.md) | `kontrast.pretrain` and all other verbs; `Run`; the estimator `Encoder` |"]
    rows += [f"| [kontrast.{room}]({room}.md) | {title} |" for room, title in ROOMS.items()]
    table = "\n".join(["| page | what it has |", "| --- | --- |", *rows])
    pages = "\n".join(["functions", *ROOMS])
    text = "`import kontrast` is all that you need: rooms and functions are loaded when they are first used."
    return f"# Python\n\n{text}\n\n{table}\n\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"


def functions_page() -> str:
    """Return the page of the functions and classes of the package itself; `objective` is on the page of its room."""
    names = [name for name in kontrast.__all__ if (name not in ROOMS and name != "objective") or name == "lens"]
    parts = ["# Functions", "Every command is a function with the same name, and two classes belong to them."]
    functions = sorted((name for name in names if not inspect.isclass(getattr(kontrast, name))), key=str.lower)
    classes = [name for name in names if inspect.isclass(getattr(kontrast, name))]
    for name in [*classes, *functions]:
        parts.append(f"## {name}\n\n{documented('kontrast', name, getattr(kontrast, name))}")
    return "\n\n".join(parts) + "\n"


def room_page(room: str, title: str) -> str:
    """Return the page of a room: its docstring and its public names."""
    module = importlib.import_module(f"kontrast.{room}")
    public = getattr(module, "__all__", None) or own_classes(module)
    parts = [f"# kontrast.{room}", f"{title}."]
    parts += [f"## {name}\n\n{documented(module.__name__, name, getattr(module, name))}" for name in public]
    return "\n\n".join(parts) + "\n"


def own_classes(module: Any) -> list[str]:
    """Return the classes of a module without `__all__`, in the order of its file."""
    found = [(name, thing) for name, thing in vars(module).items() if inspect.isclass(thing)]
    return [name for name, thing in found if thing.__module__ == module.__name__ and not name.startswith("_")]


def documented(module: str, name: str, thing: Any) -> str:
    """Return the directive that documents a name, or the names in a table such as a registry.

    `kontrast.lens` is a room that can be called: its documentation is that of the function behind it. The methods of
    the objectives are those of their base class.
    """
    if name == "lens":
        module = "kontrast.runs.lens"
    elif isinstance(thing, Mapping):
        return f"`{module}.{name}`, by name: " + ", ".join(f"`{key}`" for key in thing) + "."
    elif inspect.isclass(thing):
        members = [] if issubclass(thing, Objective) and thing is not Objective else ["   :members:"]
        return "\n".join(["```{eval-rst}", f".. autoclass:: {module}.{name}", *members, "```"])
    return f"```{{eval-rst}}\n.. autofunction:: {module}.{name}\n```"
