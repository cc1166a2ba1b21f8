"""Every promise in docs/promises.md has a test that causes the fault, and every such test has a promise."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "promises.md"


def promises() -> dict[int, list[str]]:
    """Return the links of each row of the table, by row number."""
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1)), "missing, twice or out of order"
    return {int(number): re.findall(r"\]\(([^)]+)\)", text) for number, text in rows}


ROWS = sorted(promises())


def marked_rows(path: Path) -> set[int]:
    """Return the rows named by `@pytest.mark.fault(...)` in a test file."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    marks = [c for c in calls if ast.unparse(c.func) == "pytest.mark.fault"]
    return {ast.literal_eval(argument) for mark in marks for argument in mark.args}


@pytest.mark.parametrize("row", ROWS)
def test_promise_links_to_a_test_that_causes_the_fault(row):
    links = promises().get(row, [])
    assert links, f"docs/promises.md has no row {row} with a link to its test"
    files = [(PAGE.parent / link).resolve() for link in links]
    assert all(path.is_file() and path.parent == HERE for path in files), links
    assert all(row in marked_rows(path) for path in files), f"a linked file has no test marked fault({row}): {links}"


def test_every_marked_row_is_a_promise():
    assert set().union(*(marked_rows(path) for path in HERE.glob("test_*.py"))) == set(ROWS)
