"""Write the pages that come from the program itself: objectives, recipes, commands, the API and the list of results."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from builder.api_pages import write_api_pages
from builder.command_page import command_page
from builder.measured_rows import measured
from builder.recipe_pages import write_recipe_pages
from builder.weight_pictures import weight_pictures
from kontrast.cli.explain import objective_page
from kontrast.objectives import OBJECTIVES


def write_generated_pages(root: Path, sources: Path) -> None:
    """Write all generated pages of the site.

    Args:
        root: The root of the repository.
        sources: The folder of gathered sources.
    """
    list_results(sources)
    write_objective_pages(root, sources / "objectives", sources.parent / "weight-pictures.json")
    write_recipe_pages(sources / "reference" / "recipes")
    write_api_pages(sources / "reference" / "api")
    (sources / "reference" / "commands.md").write_text(command_page(), encoding="utf-8")


def write_objective_pages(root: Path, folder: Path, kept: Path) -> None:
    """Write the page of every objective again, with a picture of its weights and its results."""
    pictures = kept_pictures(root, kept)
    for name in OBJECTIVES:
        picture = f"```{{raw}} html\n{pictures[name]}\n```"
        page = objective_page(name, picture=picture, results=measured(name, root / "results"))
        (folder / f"{name}.md").write_text(page, encoding="utf-8")


def kept_pictures(root: Path, kept: Path) -> dict[str, str]:
    """Return the pictures of the file `kept`, or draw and keep them if the code behind them has changed."""
    drawing = [root / "docs" / "builder" / name for name in ("objective_slopes.py", "weight_pictures.py")]
    rooms = [root / "src" / "kontrast" / name for name in ("objectives", "kernels")]
    files = sorted([*drawing, *(path for room in rooms for path in room.rglob("*.py"))])
    code = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    found = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    if found.get("code") != code:
        found = {"code": code, "pictures": weight_pictures()}
        kept.write_text(json.dumps(found), encoding="utf-8")
    return dict(found["pictures"])


def list_results(sources: Path) -> None:
    """Append the table of contents of all measured results to their index, so that each page has its place."""
    index = sources / "results" / "index.md"
    names = sorted(str(p.relative_to(index.parent).with_suffix("")) for p in index.parent.rglob("*.md") if p != index)
    toctree = "\n".join(["```{toctree}", ":hidden:", "", "../results", "../papers", "../speed", *names, "```"])
    index.write_text(index.read_text(encoding="utf-8") + "\n" + toctree + "\n", encoding="utf-8")
