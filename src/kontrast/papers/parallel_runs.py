"""Runs several cells of a table at once on one device, because a small network does not fill a large GPU.

Each cell is a process of its own, `kontrast reproduce` for one cell and one seed, which stores its results itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kontrast.errors import EnvironmentFault, KontrastError, Stopped
from kontrast.files import disk_faults
from kontrast.import_path import python_environment
from kontrast.studies.cells import STOPPED, Cell
from kontrast.training.signals import Interrupted

RUNS_AT_ONCE = "KONTRAST_RUNS_AT_ONCE"
"""The environment variable with the number of runs that share the device, which a run records beside its seconds."""


def runs_at_once() -> int:
    return int(os.environ.get(RUNS_AT_ONCE, "1"))


@dataclass
class ParallelRuns:
    """Runs cells in processes. A signal is passed on to all running processes, and no more are started.

    Args:
        command: the arguments of `kontrast reproduce` that run one cell.
        folder: where the log of each process is written.
        at_once: the number of processes.
        say: receives progress lines.
        variables: environment variables to add.
    """

    command: Callable[[Any], list[str]]
    folder: Path
    at_once: int
    say: Callable[[str], None]
    variables: Mapping[str, str]
    running: list[tuple[Cell, subprocess.Popen[bytes]]] = field(default_factory=list)
    signal: int | None = None

    def run(self, cells: Sequence[Cell]) -> list[KontrastError]:
        """Run all cells and return the errors of those that failed."""
        waiting, errors = list(cells), []
        old = {number: signal.signal(number, self.pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            while self.running or (waiting and self.signal is None):
                while waiting and len(self.running) < self.at_once and self.signal is None:
                    self.start(waiting.pop(0))
                time.sleep(0.2)
                for cell, process in [one for one in self.running if one[1].poll() is not None]:
                    self.running.remove((cell, process))
                    ended = len(cells) - len(waiting) - len(self.running)
                    errors += self.finish(cell, process.returncode, f"[{ended}/{len(cells)}]")
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
        if self.signal is not None:
            raise (Interrupted if self.signal == signal.SIGINT else Stopped)(STOPPED)
        return errors

    def start(self, cell: Cell) -> None:
        log = self.log_file(cell)
        threads = str(max(1, (os.cpu_count() or 1) // self.at_once))
        environment = {"OMP_NUM_THREADS": threads, **python_environment(), **self.variables}
        environment[RUNS_AT_ONCE] = str(self.at_once)
        command = [sys.executable, "-m", "kontrast", "reproduce", *self.command(cell)]
        with disk_faults(log), open(log, "wb") as file:
            # In a process group of its own, so that Ctrl-C reaches only this process, which passes it on once.
            process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, process_group=0)
        self.running.append((cell, process))
        self.say(f"{cell.name}: started, see {log}")

    def log_file(self, cell: Cell) -> Path:
        return self.folder / f"{cell.name}.log"

    def finish(self, cell: Cell, code: int, title: str) -> list[KontrastError]:
        """Report how a process ended, by the last line of its log, and return its error."""
        log = self.log_file(cell)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        ends = [line.partition(" ")[2] for line in lines if line.startswith(("kontrast: ", "[1/1] "))]
        last = ends[-1] if ends else "its log does not say why"
        self.say(f"{title} {last if code == 0 else f'{cell.name}: exit code {code}: {last}'}")
        if code == 0 or self.signal is not None:
            return []
        kinds = {kind.exit_code: kind for kind in KontrastError.__subclasses__()}
        return [kinds.get(code, EnvironmentFault)(f"{cell.name}: {last} (exit code {code}, log {log})")]

    def pass_on(self, number: int, frame: Any) -> None:
        self.signal = number
        for _, process in self.running:
            process.send_signal(number)
