"""What a name means: an objective, recipe, encoder, head, predictor or view policy, from its own code and docstring."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from kontrast.config.recipe_files import load_tree, recipe_names, recipe_path, recipe_text
from kontrast.errors import UsageError
from kontrast.registry import Registry, unknown

Explained = tuple[dict[str, Any], list[str]]


def describe(name: str) -> Explained:
    """A tree for machines and lines for people; of several things of one name, all of them, the first with the rest
    under `also`."""
    found = [explain_recipe(name)] if name in recipe_names() else []
    for registry in registries():
        if name in registry:
            found.append(explain_policy(name) if registry.kind == "policy" else explain_entry(registry, name))
    if not found:
        known = [*recipe_names(), *(entry for registry in registries() for entry in registry)]
        hint = "; ".join(hint for registry in registries() if name and (hint := registry.hint(name)))
        words = unknown(name, dict.fromkeys(known), hint)
        raise UsageError(f"nothing is called {name!r}: {words}; see `kontrast recipes`")
    tree, lines = found[0]
    for _, more in found[1:]:
        lines += ["", *more]
    return (tree | {"also": [other for other, _ in found[1:]]} if found[1:] else tree), lines


def registries() -> list[Registry]:
    from kontrast.networks import ENCODERS, HEADS, PREDICTORS
    from kontrast.objectives import OBJECTIVES
    from kontrast.views import POLICIES

    return [OBJECTIVES, ENCODERS, HEADS, PREDICTORS, POLICIES]


def explain_entry(registry: Registry, name: str) -> Explained:
    thing = registry[name]
    arguments = {
        key: None if p.default is p.empty else p.default
        for key, p in registry.arguments(name).items()
        if key not in ("inputs", "channels", "size")
    }
    text = inspect.cleandoc(thing.__doc__ or "")  # its own: getdoc would tell of the class it is made of
    users = [r for r in recipe_names() if uses(load_tree(r), registry.kind, name)]
    paper = getattr(thing, "paper", "")
    tree = {
        "kind": registry.kind,
        "name": name,
        "text": text,
        "paper": paper,
        "arguments": {k: v if isinstance(v, int | float | str | None) else repr(v) for k, v in arguments.items()},
        "recipes": users,
    }
    lines = [f"{registry.kind} {name}", "", *text.splitlines(), "", "arguments and defaults"]
    lines += [f"  {key:<24} {value!r}" for key, value in arguments.items()] or ["  none"]
    if paper:
        lines += ["", f"paper    {paper}"]
    lines += ["", f"recipes  {', '.join(users) or 'none yet'}"]
    return tree, lines


def uses(tree: dict[str, Any], kind: str, name: str) -> bool:
    part = tree.get(kind)
    return isinstance(part, dict) and part.get("name") == name


def explain_policy(name: str) -> Explained:
    from kontrast.views.policies import alternatives

    trees = [dataclasses.asdict(policy) for policy in alternatives(name)]
    users = [r for r in recipe_names() if load_tree(r).get("views", {}).get("policy") == name]
    lines = [f"view policy {name}"]
    for number, tree in enumerate(trees):
        lines += ["", f"view {number + 1}" if len(trees) > 1 else "every view"]
        lines += [f"  {key:<24} {value}" for key, value in tree.items()]
    lines += ["", f"recipes  {', '.join(users) or 'none yet'}"]
    return {"kind": "policy", "name": name, "views": trees, "recipes": users}, lines


def explain_recipe(name: str) -> Explained:
    text = recipe_text(recipe_path(name))
    tree = load_tree(name)
    lines = [f"recipe {name}", "", *text.splitlines()]
    return {"kind": "recipe", "name": name, "text": text, "settings": tree}, lines


def objective_page(name: str) -> str:
    """An objective as a page of docs/objectives/, in Markdown."""
    from kontrast.objectives import OBJECTIVES

    tree, _ = explain_entry(OBJECTIVES, name)
    kind: Any = OBJECTIVES[name]
    arguments = ", ".join(f"`{key}={value!r}`" for key, value in tree["arguments"].items())
    given = [
        "z",
        "keys",
        *(word for word, takes in (("bank", kind.takes_bank), ("labels", kind.takes_labels)) if takes),
    ]
    lines = [f"# {name}", "", *tree["text"].splitlines(), "", "```python", "from kontrast.objectives import objective"]
    lines += ["", f'loss = objective("{name}")', "value = loss(z)  # projections [views, images, width]", "```", ""]
    lines += [f"Arguments and defaults: {arguments}.", ""]
    lines += [f"Takes {', '.join(f'`{word}`' for word in given)}. Paper: {tree['paper']}.", ""]
    recipes = ", ".join(f"`{recipe}`" for recipe in tree["recipes"])
    lines += [f"Recipes: {recipes or 'none yet'}.", ""]
    lines += [f"Written by `python -m kontrast.cli.explain docs/objectives` from the docstring of `{kind.__name__}`."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import sys
    from pathlib import Path

    from kontrast.objectives import OBJECTIVES

    for name in OBJECTIVES:
        (Path(sys.argv[1]) / f"{name}.md").write_text(objective_page(name), encoding="utf-8")
