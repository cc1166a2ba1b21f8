"""The README and the home page of the site: short, with figures that were measured and links that lead to them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kontrast.objectives import OBJECTIVES

ROOT = Path(__file__).parents[2]
README, HOME = ROOT / "README.md", ROOT / "docs" / "index.md"
NUMBER = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?![\w])")
SETTINGS = {"32,768", "16", "200", "32", "128", "2.11"}
"""Numbers that say what was measured: pairs, bits, batch sizes, versions."""


def results(page: Path) -> list[str]:
    """Return the three results of a page, each with its links."""
    section = page.read_text(encoding="utf-8").split("## Three results that nobody else has")[1].split("\n## ")[0]
    parts = section.split("\n- **") if page == README else section.split("{container} panel\n")
    return parts[1:]


def test_the_readme_is_short_and_begins_with_a_picture_and_two_commands():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    first_screen = "\n".join(lines[:40])
    assert "pip install uv && uv run kontrast pretrain" in first_screen and "\nuv run pytest" in first_screen
    assert re.search(r"!\[[^\]]+\]\(docs/report\.png\)", first_screen)
    assert "## Three results" in first_screen


@pytest.mark.parametrize("page", [README, HOME], ids=["readme", "home"])
def test_the_three_results_have_the_figures_of_the_pages_that_they_link_to(page):
    assert len(results(page)) == 3
    for text in results(page):
        links = re.findall(r"\]\(([^)]+)\)", text)
        assert links
        measured = " ".join((page.parent / link).read_text(encoding="utf-8") for link in links)
        figures = set(NUMBER.findall(re.sub(r"\]\([^)]+\)", "]", text))) - SETTINGS
        assert figures
        for figure in figures:
            assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?!\d)", measured), (figure, links)


@pytest.mark.parametrize("page", [README, HOME], ids=["readme", "home"])
def test_the_number_of_objectives_is_right(page):
    (count,) = re.findall(r"(\d+) (?:\[objectives\]|losses)", page.read_text(encoding="utf-8"))
    assert int(count) == len(OBJECTIVES)


def test_the_page_of_rooms_has_every_folder_and_file():
    text = (ROOT / "docs" / "rooms.md").read_text(encoding="utf-8")
    source = ROOT / "src" / "kontrast"
    names = [path.name + "/" for path in source.iterdir() if path.is_dir() and path.name != "__pycache__"]
    names += [path.name for path in source.glob("*.py") if not path.name.startswith("__")]
    assert [name for name in names if f"`{name}`" not in text] == []
