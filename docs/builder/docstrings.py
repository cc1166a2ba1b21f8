"""A Sphinx extension that reads kontrast's docstrings, which are written to be read as plain text."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Shape|Example|Examples|Attributes):$")
BAR = re.compile(r"(`[^`]*`)|\|")


def mark_equations(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Mark blocks that are indented outside any section, such as equations, as literal text, and bars as bars."""
    marked: list[str] = []
    section = ""
    inside_block = False
    for line in lines:
        if line and not line.startswith("    "):
            section, inside_block = line if SECTION.match(line) else "", False
        elif line and not section and not inside_block:
            marked += [] if marked and marked[-1] else ["::", ""]  # without an empty line before, it is a continuation
            inside_block = True
        marked.append(line if inside_block or section.startswith("Example") else escape_bars(line))
    lines[:] = marked


def escape_bars(line: str) -> str:
    """Escape each bar outside of code, which would begin a substitution."""
    return BAR.sub(lambda found: found[1] or "\\|", line)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", mark_equations, priority=100)  # before napoleon
    return {"parallel_read_safe": True}
