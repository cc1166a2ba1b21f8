"""The commands `recipes` and `explain`, which list names and say what they mean.

`explain` shows the signature, docstring, paper and recipes of an objective, encoder, head or view policy.
`python -m kontrast.cli.explain docs/objectives` writes the pages of the objectives from the same text.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from kontrast.cli.output import Json, emit
from kontrast.config.recipe_files import load_tree, recipe_names, recipe_path, recipe_text
from kontrast.errors import UsageError
from kontrast.registry import Registry, unknown

SHORT_LIST = 16
"""Recipes are listed by name up to this number, and summarized by pattern beyond it."""
USE = "When to use it:"
"""The paragraph of an objective's docstring that begins like this has a section of its own on its page."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a name means: `text` for people, `tree` for programs."""

    text: str
    tree: dict[str, Any]

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        return self.tree


def explain(name: str) -> Explanation:
    """Explain an objective, recipe, encoder, head, predictor or view policy.

    Args:
        name: A name of the recipes and registries, for example "cacr", "quickstart" or "resnet-18". If several
            things have that name, all of them are explained.

    Returns:
        An `Explanation` that prints as the signature, the docstring, the paper and the recipes that use the thing.

    Example:
        >>> import kontrast
        >>> print(str(kontrast.explain("dcl")).splitlines()[2])
        DCL(temperature=0.1, negatives='all', *, normalize=True, reduction='mean')
    """
    found = [explain_recipe(name)] if name in recipe_names() else []
    for registry in registries():
        if name in registry:
            found.append(explain_policy(name) if registry.kind == "policy" else explain_entry(registry, name))
    if not found:
        known = dict.fromkeys([*recipe_names(), *(entry for registry in registries() for entry in registry)])
        hint = "; ".join(hint for registry in registries() if name and (hint := registry.hint(name)))
        raise UsageError(f"unknown name {name!r}: {unknown(name, known, hint)}; see `kontrast recipes`")
    first, *others = found
    also = {"also": [other.tree for other in others]} if others else {}
    return Explanation("\n\n".join(one.text for one in found), first.tree | also)


def registries() -> list[Registry]:
    from kontrast.networks import ENCODERS, HEADS, PREDICTORS
    from kontrast.objectives import OBJECTIVES
    from kontrast.views import POLICIES

    return [OBJECTIVES, ENCODERS, HEADS, PREDICTORS, POLICIES]


def explain_entry(registry: Registry, name: str) -> Explanation:
    """Explain a class or function of a registry by its signature and its own docstring."""
    entry: Any = registry[name]
    docstring = inspect.cleandoc(entry.__doc__ or "")  # not inspect.getdoc, which falls back to the base class
    recipes, paper = recipes_with(registry.kind, "name", name), getattr(entry, "paper", "")
    arguments = {
        key: p.default
        if isinstance(p.default, int | float | str | None)
        else None
        if p.default is p.empty
        else repr(p.default)
        for key, p in registry.arguments(name).items()
        if key not in ("inputs", "channels", "size")
    }
    tree = {"name": name, "text": docstring, "paper": paper, "arguments": arguments, "recipes": recipes}
    lines = [f"{registry.kind} {name}", "", signature(entry), "", docstring, ""]
    lines += [f"paper    {paper}"] * bool(paper) + [f"recipes  {', '.join(summarize(recipes))}"]
    return Explanation("\n".join(lines), {"kind": registry.kind, **tree})


def signature(entry: Any) -> str:
    """Return the call with its defaults and without annotations: `DCL(temperature=0.1, *, normalize=True)`."""
    parameters = inspect.signature(entry).parameters.values()
    call = inspect.Signature([p.replace(annotation=p.empty) for p in parameters])
    return f"{getattr(entry, '__name__', type(entry).__name__)}{call}"


def explain_policy(name: str) -> Explanation:
    """Explain a view policy by its settings, for each view if they differ."""
    from kontrast.views.policies import alternatives

    views = [dataclasses.asdict(policy) for policy in alternatives(name)]
    recipes = recipes_with("views", "policy", name)
    lines = [f"view policy {name}"]
    for number, view in enumerate(views, 1):
        lines += ["", f"view {number}" if len(views) > 1 else "every view"]
        lines += [f"  {key:<24} {value}" for key, value in view.items()]
    lines += ["", f"recipes  {', '.join(summarize(recipes))}"]
    return Explanation("\n".join(lines), {"kind": "policy", "name": name, "views": views, "recipes": recipes})


def explain_recipe(name: str) -> Explanation:
    """Explain a recipe by its file, whose comments say what it reproduces."""
    text = recipe_text(recipe_path(name))
    tree = {"kind": "recipe", "name": name, "text": text, "settings": load_tree(name)}
    return Explanation(f"recipe {name}\n\n{text.rstrip()}", tree)


def recipes_with(section: str, key: str, value: str) -> list[str]:
    """Return the names of the recipes that have this value in `section.key`."""
    return [name for name in recipe_names() if load_tree(name).get(section, {}).get(key) == value]


def summarize(recipes: list[str]) -> list[str]:
    """List a few recipes by name, and many by pattern: `cifar10/cacr-k4* (17)`, where 17 recipes begin like that."""
    parts = recipes
    for words in (2, 1, 0):  # how many words of a name, after its folder, a pattern keeps
        if len(parts) > SHORT_LIST:
            groups: dict[str, list[str]] = {}
            for name in recipes:
                folder, slash, base = name.rpartition("/")
                stem = folder + slash + "-".join(base.split("-")[:words]) if folder else name
                groups.setdefault(stem, []).append(name)
            parts = [f"{stem}* ({len(names)})" if len(names) > 1 else names[0] for stem, names in groups.items()]
    return parts or ["none"]


def objective_page(name: str, picture: str = "", results: str = "") -> str:
    """Return the page of an objective for docs/objectives/, in Markdown.

    Args:
        name: A registered objective.
        picture: A picture of its weights, in Markdown; the site draws it when it is built.
        results: What was measured with it, in Markdown.
    """
    from kontrast.objectives import OBJECTIVES

    kind: Any = OBJECTIVES[name]
    tree = explain_entry(OBJECTIVES, name).tree
    text, arguments = split_docstring(tree["text"])
    parts = [f"# {name}", text.summary, *map(display, equations(kind.equation)), picture]
    parts += ["## When to use it", text.use, "## Details", text.details, "## In Python"]
    parts += [f'```python\nkontrast.objectives.{wrapped_signature(kind)}\nkontrast.objective("{name}")\n```']
    parts += [as_markdown(arguments), uses(kind)]
    parts += ["## Results here", results] * bool(results)
    parts += ["## Recipes", ", ".join(f"`{part}`" for part in summarize(tree["recipes"])) + "."]
    end = "This page is written by `python -m kontrast.cli.explain docs/objectives` from the docstring of"
    return "\n\n".join(filter(None, [*parts, f"{end} `{kind.__name__}`."])) + "\n"


def objective_index() -> str:
    """Return the index of docs/objectives/, with a line per objective, in Markdown."""
    from kontrast.objectives import OBJECTIVES

    rows = []
    for name, kind in sorted(OBJECTIVES.items()):
        summary = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
        rows.append(f"| [{name}]({name}.md) | {summary} |")
    table = "\n".join(["| name | what it is |", "| --- | --- |", *rows])
    text = "Every loss is an objective: `kontrast.objective(NAME)` in Python, and `objective.name=NAME` for a command."
    law = "[The law](../concepts/law.md) says what most of them have in common."
    return f"# Objectives\n\n{text}\n{law}\n\n{table}\n\n```{{toctree}}\n:hidden:\n:glob:\n\n*\n```\n"


class ObjectiveText(NamedTuple):
    """The parts of an objective's docstring before its arguments."""

    summary: str
    use: str
    details: str


def split_docstring(docstring: str) -> tuple[ObjectiveText, str]:
    """Split an objective's docstring into its text and the rest, from `Args:` on.

    The first block of formulas is left out, because a page shows it as equations.
    """
    text, _, arguments = docstring.partition("\nArgs:\n")
    summary, _, *paragraphs = text.strip().split("\n\n")
    use = next((one for one in paragraphs if one.startswith(USE)), "")
    details = "\n\n".join(one for one in paragraphs if one != use)
    sentences = use.removeprefix(USE).strip()
    return ObjectiveText(summary, sentences[:1].upper() + sentences[1:], details), f"Args:\n{arguments}"


def equations(latex: str) -> list[str]:
    """Return the equations of an objective; a line that is indented more than the first continues the one before."""
    lines = inspect.cleandoc(latex).splitlines()
    return re.sub(r"\n +", " ", "\n".join(lines)).splitlines()


def display(equation: str) -> str:
    return f"$$\n{equation}\n$$"


def wrapped_signature(kind: Any) -> str:
    """Return the signature on one line, or with one argument per line if it is long."""
    text = signature(kind)
    if len(text) <= 80:
        return text
    name, _, arguments = text.partition("(")
    return f"{name}(\n    " + ",\n    ".join(arguments.removesuffix(")").split(", ")) + ",\n)"


def uses(kind: Any) -> str:
    """Say what an objective needs and takes besides z, and which equation of which paper it is."""
    needed = [word for word in ("prototypes", "indices", "bank", "labels") if getattr(kind, f"needs_{word}")]
    taken = ["keys"] * (not kind.needs_labels) + [w for w in ("bank", "labels") if getattr(kind, f"takes_{w}")]
    needs = f"needs {words(needed)}" if needed else ""
    takes = f"takes {words([word for word in taken if word not in needed])}" if set(taken) - set(needed) else ""
    return f"Besides `z` it {' and '.join(filter(None, [needs, takes]))}. Paper: {kind.paper}."


def words(names: list[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)


def as_markdown(docstring: str) -> str:
    """Turn the arguments and shapes of a docstring into lists; an example is indented and so is code already."""
    lines, section = [], ""
    for line in docstring.splitlines():
        if line and not line.startswith(" "):
            section = line
        if line in ("Args:", "Shape:", "Example:"):
            lines += [f"**{line.removesuffix(':')}**", ""]
        elif line.startswith(" ") and section in ("Args:", "Shape:"):
            lines.append(("  " if line.startswith("     ") else "- ") + line.strip())
        else:
            lines.append(line)
    return "\n".join(lines)


def recipes(as_json: Json = False) -> None:
    """List the recipes and their titles."""
    titles = {name: str(load_tree(name).get("title", "")) for name in recipe_names()}
    width = max(map(len, titles))
    emit(titles, [f"{name:<{width}}  {title}" for name, title in titles.items()], as_json)


def explain_command(
    name: Annotated[str, typer.Argument(help="An objective, recipe, encoder, head, predictor or view policy.")],
    as_json: Json = False,
) -> None:
    """Explain what NAME is.

    Shows the equation, the arguments, the paper and the recipes of an objective, encoder, head or view policy.
    """
    explanation = explain(name)
    emit(explanation.to_dict(), explanation.text.splitlines(), as_json)


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command()(recipes)
    app.command("explain")(explain_command)


if __name__ == "__main__":
    from kontrast.objectives import OBJECTIVES

    folder = Path(sys.argv[1])
    (folder / "index.md").write_text(objective_index(), encoding="utf-8")
    for each in OBJECTIVES:
        (folder / f"{each}.md").write_text(objective_page(each), encoding="utf-8")
