"""Several runs of a table at once on one device: a small network does not fill a large GPU.

Each run is `kontrast reproduce` for one cell and one seed in a process of its own, which adds its numbers itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from kontrast.errors import EnvironmentFault, KontrastError, Stopped
from kontrast.files import disk_faults
from kontrast.training.signals import Interrupted

AT_ONCE = "KONTRAST_RUNS_AT_ONCE"
"""Tells a run's process how many share the device with it: its seconds mean nothing without that."""


def at_once() -> int:
    return int(os.environ.get(AT_ONCE, "1"))


class Titled(Protocol):
    """What can be run: its folder's name and its words."""

    @property
    def folder(self) -> str: ...

    @property
    def title(self) -> str: ...


class Running(NamedTuple):
    job: Any
    process: subprocess.Popen[bytes]
    log: Path


class Processes:
    """`Processes(command, place, 3, say).run(jobs)`: three at once; a signal is passed on to all and no more begin.
    `variables` are added to their environment."""

    def __init__(
        self,
        command: Callable[[Any], list[str]],
        place: Path,
        at_once: int,
        say: Callable[[str], None],
        variables: Mapping[str, str] = MappingProxyType({}),
    ):
        self.command, self.place, self.at_once, self.say, self.variables = command, place, at_once, say, variables
        self.running: list[Running] = []
        self.stop: int | None = None

    def run(self, jobs: Sequence[Titled]) -> list[KontrastError]:
        """Run them all; the errors of those that failed."""
        waiting, errors = list(jobs), []
        old = {number: signal.signal(number, self.note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            while self.running or (waiting and self.stop is None):
                while waiting and len(self.running) < self.at_once and self.stop is None:
                    self.start(waiting.pop(0))
                time.sleep(0.2)
                for one in [r for r in self.running if r.process.poll() is not None]:
                    self.running.remove(one)
                    ended = len(jobs) - len(waiting) - len(self.running)
                    errors += self.ended(one, f"[{ended}/{len(jobs)}]")
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
        if self.stop is not None:
            kind = Interrupted if self.stop == signal.SIGINT else Stopped
            raise kind("stopped and saved; give the same command again to go on")
        return errors

    def start(self, job: Titled) -> None:
        log = self.place / f"{job.folder}.log"
        threads = str(max(1, (os.cpu_count() or 1) // self.at_once))
        place = {"OMP_NUM_THREADS": threads, **os.environ, **self.variables, AT_ONCE: str(self.at_once)}
        command = [sys.executable, "-m", "kontrast", "reproduce", *self.command(job)]
        with disk_faults(log), open(log, "wb") as file:
            # A group of its own: Ctrl-C in the terminal comes to this process, which passes it on once.
            process = subprocess.Popen(command, stdout=file, stderr=file, env=place, process_group=0)
        self.running.append(Running(job, process, log))
        self.say(f"{job.title}: started, its log is {log}")

    def ended(self, one: Running, title: str) -> list[KontrastError]:
        """Say how it ended, in its own last words."""
        said = one.log.read_text(encoding="utf-8", errors="replace").splitlines()
        last = next(
            (line for line in reversed(said) if line.startswith(("kontrast: ", "[1/1] "))), "no word of its end"
        )
        last = last.removeprefix("kontrast: ").removeprefix("[1/1] ")
        code = one.process.returncode
        self.say(f"{title} {last if code == 0 else f'{one.job.title}: exit {code}: {last}'}")
        if code == 0 or self.stop is not None:
            return []
        kinds = {kind.exit_code: kind for kind in KontrastError.__subclasses__()}
        return [kinds.get(code, EnvironmentFault)(f"{one.job.title}: {last} (exit {code}, log {one.log})")]

    def note(self, number: int, frame: Any) -> None:
        self.stop = number
        for one in self.running:
            with contextlib.suppress(ProcessLookupError):
                one.process.send_signal(number)
