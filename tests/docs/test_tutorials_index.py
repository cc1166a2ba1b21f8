"""The index of the tutorials lists each page once, in its table and in the table of contents."""

from __future__ import annotations

import re
from pathlib import Path

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"


def test_the_index_lists_every_tutorial():
    text = (TUTORIALS / "index.md").read_text(encoding="utf-8")
    table, contents = text.split("```{toctree}")
    pages = sorted(path.stem for path in TUTORIALS.glob("*.md") if path.stem != "index")
    assert sorted(set(re.findall(r"\]\(([\w-]+)\.md\)", table))) == pages
    assert sorted(re.findall(r"^([\w-]+)$", contents, re.MULTILINE)) == pages
