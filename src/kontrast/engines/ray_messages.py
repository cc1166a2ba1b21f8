"""What the command and the processes that Ray starts send to each other.

The command waits in its main thread, where signals arrive, and Ray works in a thread of its own. Between the command
and the processes is one actor, `Messages`: it brings the lines that the first rank prints, results and errors to the
command, and the command's signals to the ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import queue
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kontrast import plugins
from kontrast.errors import EnvironmentFault, KontrastError

Send = Callable[[tuple[str, Any]], None]


class Messages:
    """Carries messages between the command and its workers. It runs as an actor of Ray."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self.stopping, self.ended = asyncio.Event(), asyncio.Event()
        self.signal, self.attempts, self.is_over = 0, 0, False

    async def put(self, kind: str, value: Any = None) -> None:
        """Send a message to the command."""
        self.waiting.put_nowait((kind, value))

    async def get(self) -> list[tuple[str, Any]]:
        """Return the messages that have not been read, at least one."""
        found = [await self.waiting.get()]
        while not self.waiting.empty():
            found.append(self.waiting.get_nowait())
        return found

    async def begin(self) -> int:
        """Count an attempt of all ranks and return how many failed before; -1 if the job has ended already."""
        self.attempts += 1
        self.ended.clear()
        await self.put("began", self.attempts)
        return -1 if self.is_over else self.attempts - 1

    async def fail(self, rank: int, error: KontrastError, final: bool) -> None:
        """Report how a rank failed, and whether it would fail again if it were restarted."""
        self.is_over |= final
        await self.put("failed", (rank, error, final))
        if rank == 0:
            self.ended.set()

    async def wait_for_end(self) -> None:
        """Wait until the first rank has failed too."""
        await self.ended.wait()

    async def stop(self, number: int) -> None:
        self.signal = number
        self.stopping.set()

    async def wait_for_stop(self) -> int:
        await self.stopping.wait()
        return self.signal


class Terminal(io.TextIOBase):
    """Standard error of the first rank, whose text the command prints. It is a terminal if that of the command is."""

    def __init__(self, messages: Any, is_terminal: bool):
        self.messages, self.is_terminal = messages, is_terminal

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def isatty(self) -> bool:
        return self.is_terminal

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.messages.put.remote("text", text)
        return len(text)


@dataclass
class Job:
    """A function for the processes that Ray starts, and what they take over from the command.

    marker: a file that the command made on storage that all processes should see. to_terminal: whether lines for people
    go to the terminal of the command, where they don't disturb a progress bar, and not to a function.
    """

    function: Callable[..., Any]
    marker: str = ""
    to_terminal: bool = False
    folder: str = field(default_factory=os.getcwd)
    arguments: list[str] = field(default_factory=lambda: list(sys.argv))
    environment: dict[str, str] = field(default_factory=lambda: own_environment())
    is_terminal: bool = field(default_factory=lambda: sys.stderr is not None and sys.stderr.isatty())

    def enter(self) -> None:
        """Make this process like that of the command, or raise if it lacks the command's folders."""
        for place in filter(None, (self.folder, self.marker)):
            if not os.path.exists(place):
                folder = self.folder if place == self.folder else os.path.dirname(place)
                advice = "workers need the folders of the command at the same paths, on storage that the nodes share"
                raise EnvironmentFault(f"{socket.gethostname()} does not see {folder}: {advice}")
        os.chdir(self.folder)
        os.environ.update(self.environment)
        sys.argv = self.arguments
        plugins.import_files()


def own_environment() -> dict[str, str]:
    """Return the variables that the workers get from the command, among them the size of its terminal."""
    size = shutil.get_terminal_size()
    names = [name for name in os.environ if name.startswith("KONTRAST_") or name in ("TERM", "NO_COLOR")]
    return {name: os.environ[name] for name in names} | {"COLUMNS": str(size.columns), "LINES": str(size.lines)}


def in_thread(work: Callable[[Send], Any]) -> Iterator[tuple[str, Any]]:
    """Call `work(send)` in a thread, and yield what it sends, ("", None) several times a second, and at the end
    ("done", what it returned). An error of the thread is raised here."""
    sent: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def run() -> None:
        try:
            sent.put(("done", work(sent.put)))
        except BaseException as error:
            sent.put(("error", error))

    threading.Thread(target=run, daemon=True).start()
    kind = ""
    while kind != "done":
        try:
            kind, value = sent.get(timeout=0.2)
        except queue.Empty:
            kind, value = "", None
        if kind == "error":
            raise value
        yield kind, value


def pass_on(ray: Any, messages: Any, send: Send) -> None:
    """Send on all messages of the actor until the connection ends."""
    with contextlib.suppress(Exception):
        while True:
            for message in ray.get(messages.get.remote()):
                send(message)
