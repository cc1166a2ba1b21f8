"""Every promise of docs/promises.md has a test that causes the fault, and every such test a promise."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "promises.md"
ROWS = range(1, 41)


def marked(path: Path) -> set[int]:
    """The rows named by `@pytest.mark.fault(...)` in a file of tests."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    marks = [c for c in calls if ast.unparse(c.func) == "pytest.mark.fault"]
    return {ast.literal_eval(argument) for mark in marks for argument in mark.args}


def promises() -> dict[int, list[str]]:
    """Row numbers of the table, in order, with the targets of their links."""
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == sorted({int(number) for number, _ in rows}), "twice or out of order"
    return {int(number): re.findall(r"\]\(([^)]+)\)", text) for number, text in rows}


@pytest.mark.parametrize("row", ROWS)
def test_a_promise_is_written_down_and_kept_by_a_test_that_it_links_to(row):
    links = promises().get(row, [])
    assert links, f"docs/promises.md has no row {row} with a link to its test"
    files = [(PAGE.parent / link).resolve() for link in links]
    assert all(path.is_file() and path.parent == HERE for path in files), links
    assert all(row in marked(path) for path in files), f"a linked file has no test marked fault({row}): {links}"


def test_no_test_keeps_a_promise_that_nobody_made():
    assert set().union(*(marked(path) for path in HERE.glob("test_*.py"))) == set(ROWS)
