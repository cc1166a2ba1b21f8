"""Tables and sentences for the terminal: a line that is too long breaks between columns or words, not inside them."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

GAP = "  "


def terminal_width() -> int | None:
    """Columns of the terminal that results are written to; None for a file or a pipe, where lines stay whole."""
    stream = sys.stdout  # None where standard output is closed
    return shutil.get_terminal_size().columns if stream is not None and stream.isatty() else None


def text_table(table: dict[str, Any], width: int | None = None) -> list[str]:
    """A table with its columns' names, aligned."""
    return aligned([table["columns"], *table["rows"]], width)


def aligned(rows: Sequence[Sequence[Any]], width: int | None = None) -> list[str]:
    """Rows as lines. Columns that are too many for the width follow below, each part led by the first column again."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[place]) for row in texts) for place in range(len(texts[0]))]
    parts = [list(range(len(widths)))]
    if width is not None:
        parts = parts_within(widths, width)
        while width > 0 and len(parts_within(widths, width - 1)) == len(parts):  # parts of about the same width
            width -= 1
            parts = parts_within(widths, width)
    blocks = [[GAP.join(row[p].ljust(widths[p]) for p in part).rstrip() for row in texts] for part in parts]
    return [line for number, block in enumerate(blocks) for line in ([""] if number else []) + block]


def parts_within(widths: list[int], width: int) -> list[list[int]]:
    """The columns of each part, the first column in all; a part has at least one other, however wide it is."""
    parts = [[0]]
    for place in range(1, len(widths)):
        taken = sum(widths[p] + len(GAP) for p in parts[-1]) + widths[place]
        if taken > width and len(parts[-1]) > 1:
            parts.append([0])
        parts[-1].append(place)
    return parts


def wrapped(text: str, width: int | None = None, hang: int = 0) -> list[str]:
    """A sentence as lines, the later ones moved in; a word longer than a line stays whole."""
    if width is None:
        return [text]
    room = max(width, hang + 20)
    return textwrap.wrap(text, room, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False) or [
        text
    ]
