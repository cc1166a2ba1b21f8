"""The commands `recipes`, `explain` and `pack`, which need no run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kontrast.cli.output import (
    FloatRange,
    FollowLinks,
    Json,
    MaxBad,
    emit,
    two_numbers,
)

if TYPE_CHECKING:
    pass


def recipes(as_json: Json = False) -> None:
    """List the recipes, with what each is."""
    from kontrast.config.recipe_files import load_tree, recipe_names

    titles = {name: str(load_tree(name).get("title", "")) for name in recipe_names()}
    width = max(map(len, titles))
    emit(titles, [f"{name:<{width}}  {title}" for name, title in titles.items()], as_json)


def explain(
    name: Annotated[str, typer.Argument(help="An objective, recipe, encoder, head or view policy.")],
    as_json: Json = False,
) -> None:
    """Say what NAME is: its equation, arguments and defaults, its paper, and the recipes that use it."""
    from kontrast.cli.describe import describe

    tree, lines = describe(name)
    emit(tree, lines, as_json)


def pack_command(
    data: Annotated[str, typer.Argument(help="A folder, a named set or shards.")],
    out: Annotated[Path, typer.Argument(help="The store to write.")],
    size: Annotated[int, typer.Option(help="Bound the shorter side to this; 0: as they are.")] = 0,
    max_bad: MaxBad = None,
    float_range: FloatRange = "",
    follow_links: FollowLinks = False,
    as_json: Json = False,
) -> None:
    """Decode DATA once into a memory-mapped store that opens at once."""
    from kontrast.data import open_data
    from kontrast.data.pack import pack
    from kontrast.training.progress import PackingBar

    with PackingBar("pack") as bar:
        chosen: dict[str, Any] = {"follow_links": follow_links, "float_range": two_numbers(float_range)}
        chosen |= {} if max_bad is None else {"max_bad": max_bad}
        stores = pack(data, out, size=size or None, progress=bar, **chosen)
    parts = {path.name: open_data(out, path.name) for path in stores}
    facts = {name: {"images": len(part), "skipped": len(part.bad)} for name, part in parts.items()}
    lines = [f"{name:<6} {f['images']:>9,} images, {f['skipped']} skipped" for name, f in facts.items()]
    emit({"store": str(out), "parts": facts}, [*lines, f"store  {out}"], as_json)


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command()(recipes)
    app.command()(explain)
    app.command("pack")(pack_command)
