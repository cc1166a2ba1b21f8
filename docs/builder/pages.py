"""Write the pages that come from the program itself: recipes, commands and the lists of pages."""

from __future__ import annotations

from pathlib import Path


def write_generated_pages(root: Path, sources: Path) -> None:
    """Write all generated pages of the site.

    Args:
        root: The root of the repository.
        sources: The folder of gathered sources.
    """
    list_results(sources)


def list_results(sources: Path) -> None:
    """Append the table of contents of all measured results to their index, so that each page has its place."""
    index = sources / "results" / "index.md"
    names = sorted(str(p.relative_to(index.parent).with_suffix("")) for p in index.parent.rglob("*.md") if p != index)
    toctree = "\n".join(["```{toctree}", ":hidden:", "", "../results", "../papers", *names, "```"])
    index.write_text(index.read_text(encoding="utf-8") + "\n" + toctree + "\n", encoding="utf-8")
