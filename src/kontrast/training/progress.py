"""Show the progress of long work: a bar with rate and time left on a terminal, else a line now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import Any

from kontrast.errors import printable

SECONDS_BETWEEN_LINES = 15.0
BAR = 16
OTHER_COLUMNS = BAR + 17  # the bar, the percentage and the time left, with the gaps between all columns


class Progress:
    """A progress bar: `with Progress("train", total, unit="images") as bar: bar.advance(n, loss=0.3)`.

    Args:
        title: what is shown before the bar.
        total: how much work there is, in units.
        done: how much of it was done before, for example before a run was resumed.
        unit: the name of a unit of work.
        silent: show nothing.
    """

    def __init__(self, title: str, total: float, *, done: float = 0, unit: str = "images", silent: bool = False):
        self.title, self.total, self.done, self.unit, self.silent = title, total, done, unit, silent
        self.facts: dict[str, Any] = {}
        self._bar: Any = None
        self.start = self._last_line = time.monotonic()
        self._first = done

    def __enter__(self) -> Progress:
        if sys.stderr is not None and sys.stderr.isatty() and not self.silent:
            from rich.console import Console
            from rich.progress import BarColumn, TimeRemainingColumn
            from rich.progress import Progress as Rich

            done = ("{task.description}", BarColumn(bar_width=BAR), "{task.percentage:>3.0f}%")
            left = ("{task.fields[rate]}", TimeRemainingColumn(compact=True), "{task.fields[facts]}")
            self._bar = Rich(*done, *left, console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.total, completed=self.done, rate="", facts="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def rate(self) -> float:
        """Units per second since this process began."""
        return (self.done - self._first) / max(time.monotonic() - self.start, 1e-9)

    def advance(self, amount: float, **facts: Any) -> None:
        """Add finished work, and show numbers by name beside the bar."""
        self.done += amount
        self.facts.update(facts)
        if self._bar is not None:
            rate = f"{self.rate:,.0f} {self.unit}/s"
            room = self._bar.console.width - len(self.title) - len(rate) - OTHER_COLUMNS
            self._bar.update(self._task, completed=self.done, rate=rate, facts=_facts_text(self.facts, room))
        elif not self.silent and time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            share, left = 100 * self.done / max(self.total, 1), (self.total - self.done) / max(self.rate, 1e-9)
            speed = f"{self.rate:,.0f} {self.unit}/s  {left:,.0f} s left"
            tell(f"{self.title} {share:3.0f}%  {speed}  {_facts_text(self.facts)}".rstrip())


class PackingBar:
    """A bar for decoding, `bar(done, total)`, which appears only if there is something to decode.

    If `done` goes back, another split has begun, and gets a bar of its own.
    """

    def __init__(self, title: str):
        self.title = title
        self._bar: Progress | None = None
        self._start = time.monotonic()  # the bar appears when the first images are already done

    def __enter__(self) -> PackingBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.__exit__()

    def __call__(self, done: int, total: int) -> None:
        if self._bar is not None and done < self._bar.done:
            self._bar.__exit__()
            self._bar, self._start = None, time.monotonic()
        if self._bar is None:
            self._bar = Progress(self.title, total).__enter__()
            self._bar.start = self._start
        self._bar.advance(done - self._bar.done)


class ListingLine:
    """A line now and then while a large folder is listed: `line(count)`, the number of images found so far."""

    def __init__(self, title: str):
        self.title = title
        self.start = self._last = time.monotonic()

    def __call__(self, count: int) -> None:
        now = time.monotonic()
        if now - self._last > SECONDS_BETWEEN_LINES / 5:
            self._last = now
            tell(f"list {self.title}: {count:,} images  {count / (now - self.start):,.0f} images/s")


def tell(text: str) -> None:
    """Print a line for people on standard error."""
    with contextlib.suppress(OSError):  # nobody reads it any more, which is no reason to stop
        print(printable(text), file=sys.stderr, flush=True)


def _facts_text(facts: Mapping[str, Any], room: int | None = None) -> str:
    """Return names and numbers as text; the last ones are left out if there is not enough room."""
    words = [f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in facts.items()]
    while room is not None and words and len("  ".join(words)) > room:
        words.pop()
    return "  ".join(words)
