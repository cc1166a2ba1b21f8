"""The walk of docs/project/newcomers-walk.md, click by click: each question is answered with at most two."""

from __future__ import annotations

import importlib.util
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from builder.sources import rewrite_links, site_path

from support.built_site import ROOT, build_site

WALK = Path("docs/project/newcomers-walk.md")
needs_site = pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="needs the dependency group docs")


class Links(HTMLParser):
    """The texts of a page's links and where they lead."""

    def __init__(self, page: Path):
        super().__init__()
        self.page, self.found, self.target = page, {}, None
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        if tag == "a":
            self.target, self.words = dict(attrs).get("href"), []

    def handle_data(self, data):
        if self.target:
            self.words += data.replace("’", "'").split()  # Sphinx may set typographic quotation marks

    def handle_endtag(self, tag):
        if tag == "a" and self.target:
            place = unquote(urlsplit(self.target).path)
            self.found.setdefault(" ".join(self.words), (self.page.parent / place).resolve())
            self.target = None


def rows() -> list[tuple[str, list[str], str]]:
    """Questions, the texts of the links to click, and the page of the site that answers."""
    text = rewrite_links((ROOT / WALK).read_text(encoding="utf-8"), ROOT, WALK)
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]
    place = (ROOT / site_path(WALK)).parent
    found = []
    for question, first, second, answer in cells[2:]:
        page = (place / re.search(r"\]\((.*?)\)", answer)[1]).resolve().relative_to(ROOT).with_suffix(".html")
        found.append((question, [click for click in (first, second) if click], page.as_posix()))
    return found


def test_the_walk_has_every_tutorial():
    answers = {answer for _, _, answer in rows()}
    pages = {f"tutorials/{path.stem}.html" for path in (ROOT / "docs" / "tutorials").glob("*.md")}
    assert pages - {"tutorials/index.html"} <= answers


@needs_site
@pytest.mark.docs
@pytest.mark.parametrize(("question", "clicks", "answer"), rows(), ids=lambda value: str(value)[:40])
def test_each_question_is_answered_within_two_clicks(question, clicks, answer):
    site = build_site()
    assert site.problems == []
    page = site.pages / "index.html"
    for click in clicks:
        links = Links(page).found
        assert click in links, f"{page.name} has no link {click!r}, only {sorted(links)}"
        page = links[click]
    assert page == (site.pages / answer).resolve() and page.is_file()
