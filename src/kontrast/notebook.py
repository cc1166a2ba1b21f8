"""What Jupyter shows: results as tables, reports in a frame, and progress as one line that changes.

A result class that prints as a table inherits from `Printed` and appears as an HTML table at the end of a cell.
"""

from __future__ import annotations

import html
import itertools
import os
import re
import sys
import urllib.parse
from pathlib import Path
from typing import Any

CELL = re.compile(r"\S+(?: \S+)*")
"""Words with single spaces between them; printed columns are at least two spaces apart."""
LARGEST_INLINE = 500_000
"""Bytes of a page that is stored in the notebook. A larger one is loaded from its file: notebooks should stay small."""
FRAME = (
    '<iframe {content} title="report" sandbox="allow-scripts" '
    'style="width: 100%; height: 40em; border: 1px solid #8888"></iframe>'
)
LINE = '<div style="font-family: monospace">{bar} {text}</div>'
BAR = '<progress value="{done:g}" max="{total:g}" style="width: 10em; vertical-align: middle"></progress>'


class Printed:
    """Shows what `print` shows of an object as an HTML table in Jupyter."""

    def printed(self) -> str:
        """Return the text of the table, with lines of any width."""
        return str(self)

    def _repr_html_(self) -> str:
        return html_of_text(self.printed())


def html_of_text(text: str) -> str:
    """Return printed text as HTML: lines with columns become rows of a table, other lines paragraphs.

    Args:
        text: lines whose columns are at least two spaces apart.

    Example:
        >>> html_of_text("a < b")
        '<p>a &lt; b</p>'
    """
    lines = [(line, list(CELL.finditer(line))) for line in text.splitlines() if line.strip()]
    parts = []
    for with_columns, group in itertools.groupby(lines, lambda pair: len(pair[1]) > 1):
        if with_columns:
            parts.append(_table([cells for _, cells in group]))
        else:
            parts += [f"<p>{html.escape(line)}</p>" for line, _ in group]
    return "\n".join(parts)


def _table(rows: list[list[re.Match[str]]]) -> str:
    """Return rows of cells as a table. A row that does not fit its columns takes all of them."""
    most = max(map(len, rows))
    full = [row for row in rows if len(row) == most]
    columns = [(min(c.start() for c in cells), max(c.end() for c in cells)) for cells in zip(*full)]
    right = [len({c.end() for c in cells}) == 1 < len({c.start() for c in cells}) for cells in zip(*full)]
    lines = []
    for row in rows:
        places = [next((i for i, (a, b) in enumerate(columns) if c.start() < b and a < c.end()), -1) for c in row]
        if -1 in places or len(set(places)) < len(places):
            text = "  ".join(cell[0] for cell in row)
            lines.append(f'<td colspan="{most}" style="text-align: left">{html.escape(text)}</td>')
            continue
        texts = dict(zip(places, row))
        lines.append("".join(_cell(texts.get(i), right[i], first=i == 0) for i in range(most)))
    return "\n".join(['<table class="dataframe">', *(f"<tr>{line}</tr>" for line in lines), "</table>"])


def _cell(found: re.Match[str] | None, right: bool, first: bool) -> str:
    """Return one cell; the first one keeps its indentation, which says what belongs to the row above."""
    text = "" if found is None else (" " * found.start() if first else "") + found[0]
    side = "right" if right else "left"
    return f'<td style="text-align: {side}; white-space: pre; padding: 0.2em 0.6em">{html.escape(text)}</td>'


def html_of_page(path: Path) -> str:
    """Return a frame that shows an HTML page; "" if there is no such file.

    Args:
        path: a page without references to other files, such as report.html.
    """
    if not path.is_file():
        return ""
    if path.stat().st_size <= LARGEST_INLINE:
        page = path.read_text(encoding="utf-8").replace("&", "&amp;").replace("'", "&#39;")  # its many " stay one byte
        return FRAME.format(content=f"srcdoc='{page}'")
    address = html.escape(urllib.parse.quote(os.path.relpath(path)))
    return f'{FRAME.format(content=f"""src="{address}" """)}<p><a href="{address}">{html.escape(str(path))}</a></p>'


def is_terminal(stream: Any) -> bool:
    """Tell whether a stream goes to a terminal, which can move its cursor.

    The commands of a cell (`!kontrast ...`) write to a pseudoterminal that Jupyter reads, and every movement of the
    cursor would stay in the page.
    """
    return stream is not None and stream.isatty() and "JPY_PARENT_PID" not in os.environ


def in_kernel() -> bool:
    """Tell whether this process runs the cells of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class NotebookLine:
    """One line of a cell's output that shows a share of work and a text, and can be changed."""

    def __init__(self) -> None:
        from IPython.display import DisplayHandle

        self._handle = DisplayHandle()
        self._shown = False

    def show(self, done: float, total: float, text: str) -> None:
        """Show the line in its new state.

        Args:
            done: how much work is done.
            total: how much there is.
            text: shown beside the bar.
        """
        bar = BAR.format(done=min(done, total), total=max(total, 1))
        content = {"text/plain": text, "text/html": LINE.format(bar=bar, text=html.escape(text))}
        (self._handle.update if self._shown else self._handle.display)(content, raw=True)
        self._shown = True
