"""docs/security.md: every line of the threat model is held by tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "security.md"
LINK = re.compile(r"\[`(test_\w+)`\]\(([^)]+)\)")


def lines() -> dict[str, list[tuple[str, str]]]:
    """Return the tests, as names and files, of each line of the table; headings within it are left out."""
    rows = [line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return {row[0]: LINK.findall(row[-1]) for row in rows[2:] if not row[0].startswith("| **")}


def test_the_page_has_a_line_for_everything_that_is_not_trusted():
    text = PAGE.read_text(encoding="utf-8")
    headings = ("Pictures", "Archives", "Weights", "Run folders", "Recipes", "Names", "Embeddings", "The machine")
    assert all(f"| **{heading}" in text for heading in headings) and len(lines()) >= 25


@pytest.mark.parametrize("line", lines())
def test_every_line_names_tests_that_exist(line):
    tests = lines()[line]
    assert tests, f"no test holds the line {line!r}"
    for name, link in tests:
        path = (PAGE.parent / link).resolve()
        assert path.is_file(), link
        defined = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        assert name in defined, f"{link} has no {name}"


def test_every_link_leads_somewhere():
    for link in re.findall(r"\]\((\.\./[^)#]+|[\w.-]+\.md)\)", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parent / link).exists(), link
