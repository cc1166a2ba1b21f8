"""A Sphinx extension that reads kontrast's docstrings, which are written to be read as plain text."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Shape|Example|Examples|Attributes):$")


def mark_equations(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Mark blocks that are indented outside any section, such as equations, as literal text."""
    marked: list[str] = []
    inside_section = inside_block = False
    for line in lines:
        if line and not line.startswith("    "):
            inside_section, inside_block = bool(SECTION.match(line)), False
        elif line and not inside_section and not inside_block:
            marked += [] if marked and marked[-1] else ["::", ""]  # without an empty line before, it is a continuation
            inside_block = True
        marked.append(line)
    lines[:] = marked


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", mark_equations, priority=100)  # before napoleon
    return {"parallel_read_safe": True}
