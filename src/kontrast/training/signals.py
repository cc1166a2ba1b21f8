"""Stop on SIGTERM or Ctrl-C: finish the step, save and exit. A second Ctrl-C exits at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from kontrast.errors import KontrastError, Stopped
from kontrast.operating_system import KILL

GRACE_SECONDS = 30.0
"""How long a rank may take to stop after its launcher has died; torchrun itself waits as long before it kills."""
_requested: int | None = None
"""The signal that `request_stop` was called with."""


def request_stop(number: int) -> None:
    """Let the work of this process stop after its step as if by this signal, whichever thread it runs in.

    The signal is only recorded, and interrupts nothing: Python can't raise an exception in another thread safely.
    """
    global _requested
    _requested = number


def end_with_launcher(launcher: int) -> None:
    """Watch the process that started this one: if it dies, stop as if by SIGTERM, and after a while by SIGKILL.

    Otherwise the ranks of a killed torchrun would train on, or wait for each other, and hold the run folder's lock.

    Args:
        launcher: the process id of torchrun, the parent of this process.
    """

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_SECONDS)  # a rank that waits for another inside torch does not notice the signal
        os.kill(os.getpid(), KILL)

    threading.Thread(target=watch, name="kontrast-launcher-watch", daemon=True).start()


class Interrupted(KontrastError):
    """The user pressed Ctrl-C; the work is saved and can be resumed."""

    exit_code = 130


class Cut(BaseException):
    """A signal interrupted work that has nothing to save or can be repeated later, such as an evaluation.

    It is not an Exception: it may be raised at any line, and handlers there, for example of damaged images, must not
    catch it.
    """


class StopSignals:
    """Handle SIGTERM and Ctrl-C: `with StopSignals() as stop: ...; stop.patient = True; ...`.

    At first there is nothing to save, and a signal ends the work at once with the message `unsaved`. Once `patient` is
    true, a signal is only recorded in `stop.signal`; the loop looks at it after each step, saves, and raises
    `stop.error(...)`. Work that can be repeated later, such as an evaluation, runs inside `with stop.cutting()`, and a
    signal interrupts it with `Cut`.

    Python runs a signal handler only between bytecode instructions, and one backward pass of a large network is a
    single instruction. So that a second Ctrl-C is not delayed, a thread reads the bytes that the interpreter writes at
    the moment of a signal, and exits.

    Args:
        unsaved: the message if a signal arrives before `patient` is set.
    """

    def __init__(self, unsaved: str = "stopped before training began; run the same command again") -> None:
        self._received: int | None = None
        self.patient, self._cutting, self.unsaved = False, False, unsaved
        self._old: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._old_pipe = -1

    @property
    def signal(self) -> int | None:
        """The signal that arrived or was requested, if any."""
        return self._received if self._received is not None else _requested

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                self._old[number] = signal.signal(number, self._record)
            except ValueError:  # not the main thread, which keeps the signals
                return self
        self._pipe = os.pipe()
        if hasattr(os, "set_blocking"):  # Windows has it from Python 3.12 on
            os.set_blocking(self._pipe[1], False)
        self._old_pipe = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        threading.Thread(target=self._exit_at_second_interrupt, args=(self._pipe[0],), daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        if self._pipe is not None:
            signal.set_wakeup_fd(self._old_pipe, warn_on_full_buffer=False)
            os.close(self._pipe[1])  # the thread then reads the end of the pipe and closes its side
            self._pipe = None
        if isinstance(error, Cut) and not self.patient:
            raise self._kind(self.unsaved) from None

    @staticmethod
    def _exit_at_second_interrupt(pipe: int) -> None:
        interrupts = 0
        while data := os.read(pipe, 64):
            interrupts += data.count(signal.SIGINT)
            if interrupts > 1:
                os._exit(130)
        os.close(pipe)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        if self._cutting or not self.patient:
            raise Cut

    @contextlib.contextmanager
    def cutting(self) -> Iterator[None]:
        """Run work that a signal may interrupt."""
        if self.signal is not None:
            raise Cut
        self._cutting = True
        try:
            yield
        finally:
            self._cutting = False

    def error(self, where: str, command: str) -> KontrastError:
        """Return the exception for saved work: where it stopped, and the command that resumes it."""
        return self._kind(f"stopped and saved at {where}; resume with: {command}")

    @property
    def _kind(self) -> type[KontrastError]:
        return Interrupted if self.signal == signal.SIGINT else Stopped
