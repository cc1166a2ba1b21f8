"""Show the progress of long work: a bar with rate and time left in a terminal or Jupyter, else a line now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from kontrast.errors import printable
from kontrast.notebook import NotebookLine, in_kernel, is_terminal
from kontrast.training.timing import Rate

SECONDS_BETWEEN_LINES = 15.0
SECONDS_BETWEEN_CHANGES = 0.2  # of a line in Jupyter, each of which is a message to the browser
BAR = 16
OTHER_COLUMNS = BAR + 9  # the bar and the percentage, with the gaps between all columns


class Progress:
    """A progress bar: `with Progress("train", total, unit="images") as bar: bar.advance(n, loss=0.3)`.

    Args:
        title: what is shown before the bar.
        total: how much work there is, in units.
        done: how much of it was done before, for example before a run was resumed.
        unit: the name of a unit of work.
        silent: show nothing.
        rate: measures the rate; default: by the clock, from now on.
        left: returns the seconds left, if they are more than the units left at this rate, or None if not known yet.
    """

    def __init__(
        self, title: str, total: float, *, done: float = 0, unit: str = "images", silent: bool = False,
        rate: Rate | None = None, left: Callable[[], float | None] | None = None,
    ):  # fmt: skip
        self.title, self.total, self.done, self.unit, self.silent = title, total, done, unit, silent
        self.facts: dict[str, Any] = {}
        self._display: TerminalBar | NotebookBar | Lines | None = None
        self.start = time.monotonic()
        self._first = done
        self.measured, self._left = rate or Rate(), left
        self.measured.restart(done)

    def __enter__(self) -> Progress:
        if not self.silent:
            self._display = TerminalBar(self) if is_terminal(sys.stderr) else NotebookBar() if in_kernel() else Lines()
        return self

    def __exit__(self, *_: object) -> None:
        if self._display is not None:
            self._display.end(self)

    @property
    def rate(self) -> float:
        """Units per second over the last seconds, or since this process began if nothing else is known."""
        return self.measured.current or (self.done - self._first) / max(time.monotonic() - self.start, 1e-9)

    @property
    def left(self) -> float | None:
        """The seconds that the rest will take; None if it is not known yet."""
        if self._left is not None:
            return self._left()
        return (self.total - self.done) / max(self.measured.expected or self.rate, 1e-9)

    def advance(self, amount: float, measured: bool = True, **facts: Any) -> None:
        """Add finished work, and show numbers by name beside the bar.

        Args:
            amount: how much work.
            measured: whether it is finished now; a device may still be busy with it.
            **facts: numbers by name.
        """
        self.done += amount
        self.facts.update(facts)
        if measured:
            self.measured.add(self.done)
        if self._display is not None:
            self._display.show(self)

    def time_text(self) -> str:
        """Return the time left as text; "" if it is not known yet."""
        left = self.left
        return "" if left is None else f"{time_left(left)} left"

    @property
    def rate_text(self) -> str:
        """Return the current rate and the time left."""
        return f"{self.rate:,.0f} {self.unit}/s  {self.time_text()}".rstrip()

    @property
    def line(self) -> str:
        """Return everything that is known as one line."""
        share = 100 * self.done / max(self.total, 1)
        return f"{self.title} {share:3.0f}%  {self.rate_text}  {_facts_text(self.facts)}".rstrip()


class TerminalBar:
    """The bar of a terminal.

    Args:
        progress: what it shows.
    """

    def __init__(self, progress: Progress):
        from rich.console import Console
        from rich.progress import BarColumn
        from rich.progress import Progress as Rich

        done = ("{task.description}", BarColumn(bar_width=BAR), "{task.percentage:>3.0f}%")
        bar: Any = Rich(*done, "{task.fields[rate]}", "{task.fields[facts]}", console=Console(stderr=True))
        bar.start()
        self._task = bar.add_task(progress.title, total=progress.total, completed=progress.done, rate="", facts="")
        self._bar = bar

    def show(self, progress: Progress) -> None:
        rate = progress.rate_text
        room = self._bar.console.width - len(progress.title) - len(rate) - OTHER_COLUMNS
        self._bar.update(self._task, completed=progress.done, rate=rate, facts=_facts_text(progress.facts, room))

    def end(self, progress: Progress) -> None:
        self._bar.stop()


class NotebookBar:
    """The bar of a cell in Jupyter; in the end it says how long the work took."""

    def __init__(self) -> None:
        self._line = NotebookLine()
        self._last: float | None = None

    def show(self, progress: Progress) -> None:
        if self._last is None or time.monotonic() - self._last > SECONDS_BETWEEN_CHANGES:
            self._last = time.monotonic()
            self._line.show(progress.done, progress.total, progress.line)

    def end(self, progress: Progress) -> None:
        if self._last is None:
            return  # nothing was done, as in a probe that another one replaces
        share = 100 * progress.done / max(progress.total, 1)
        seconds = time_left(time.monotonic() - progress.start)
        text = f"{progress.title} {share:3.0f}%  {seconds}  {_facts_text(progress.facts)}".rstrip()
        self._line.show(progress.done, progress.total, text)


class Lines:
    """A line now and then, for files, pipes and the commands of a cell in Jupyter."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def show(self, progress: Progress) -> None:
        if time.monotonic() - self._last > SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            tell(progress.line)

    def end(self, progress: Progress) -> None:
        pass


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
            self._bar.measured.samples = [(self._start, 0)]
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


def time_left(seconds: float) -> str:
    """Return a time as text: `45 s`, `12:30 min` or `3:05 h`."""
    if seconds < 100:
        return f"{max(0.0, seconds):.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"


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
