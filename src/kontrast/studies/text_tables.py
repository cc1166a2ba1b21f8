"""Tables and sentences for the terminal. Long lines break between columns or words, never inside them."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from kontrast.notebook import is_terminal

GAP = "  "


def terminal_width() -> int | None:
    """Columns of the terminal that standard output goes to; None for a file or a pipe, whose lines are not wrapped."""
    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None


def aligned(rows: Sequence[Sequence[Any]], width: int | None = None) -> list[str]:
    """Lines of rows with aligned columns. Columns that don't fit follow below, after a repeated first column."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in texts) for column in range(len(texts[0]))]
    blocks = [list(range(len(widths)))]
    if width is not None:
        blocks = split_columns(widths, width)
        while width > 0 and len(split_columns(widths, width - 1)) == len(blocks):  # make the blocks about equally wide
            width -= 1
            blocks = split_columns(widths, width)
    lines = [[GAP.join(row[c].ljust(widths[c]) for c in block).rstrip() for row in texts] for block in blocks]
    return [line for number, block in enumerate(lines) for line in ([""] if number else []) + block]


def split_columns(widths: list[int], width: int) -> list[list[int]]:
    """The columns of each block. Every block has the first column and at least one other, however wide it is."""
    blocks = [[0]]
    for column in range(1, len(widths)):
        used = sum(widths[c] + len(GAP) for c in blocks[-1]) + widths[column]
        if used > width and len(blocks[-1]) > 1:
            blocks.append([0])
        blocks[-1].append(column)
    return blocks


def wrapped(text: str, width: int | None = None, hang: int = 0) -> list[str]:
    """Lines of a sentence; later lines are indented by `hang`, and a word longer than a line stays whole."""
    if width is None:
        return [text]
    options: Any = {"subsequent_indent": " " * hang, "break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, max(width, hang + 20), **options) or [text]
