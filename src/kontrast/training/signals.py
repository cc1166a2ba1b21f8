"""Being asked to stop: SIGTERM and Ctrl-C finish the step, save and leave; a second Ctrl-C leaves at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from kontrast.errors import KontrastError, Stopped


class Interrupted(KontrastError):
    """Ctrl-C; the work is saved and can be resumed."""

    exit_code = 130


class Cut(BaseException):
    """Work that need not be finished was cut by a signal. No Exception: it may come from any line, and a handler there,
    for example of a damaged image, must not take it for its own."""


class _Left(BaseException):
    """A signal ended the work where it was; the watch that raised it says so in words when it is left."""


class StopSignals:
    """`with StopSignals() as stop: ...; stop.patient = True; ...; if stop.asked: save; raise stop.error(...)`.

    Until it is patient there is nothing to save, and a signal ends the work where it is, saying what `unsaved` says.
    From then on a signal is noted and the loop asks for it after each step; what can be done again another time, such
    as an evaluation, stands in `with stop.cutting()` and is cut by `Cut`.

    Python runs a signal's handler only between its own instructions, and one backward pass of a large network is one of
    them. So a thread reads the bytes that the interpreter writes at the very moment of a signal, and it is that thread
    which leaves at the second Ctrl-C.
    """

    def __init__(self, unsaved: str = "stopped before training began; run the same command again") -> None:
        self.asked: int | None = None
        self.patient, self.unsaved = False, unsaved
        self._cutting = False
        self._old: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._old_pipe = -1

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                self._old[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread: whoever runs us there keeps the signals
                return self
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._old_pipe = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        threading.Thread(target=self._leave_at_the_second, args=(self._pipe[0],), daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        if self._pipe is not None:
            signal.set_wakeup_fd(self._old_pipe, warn_on_full_buffer=False)
            os.close(self._pipe[1])  # the thread reads the end and closes its own side
            self._pipe = None
        if isinstance(error, _Left):
            raise self._kind(self.unsaved) from None

    @staticmethod
    def _leave_at_the_second(pipe: int) -> None:
        interrupts = 0
        while data := os.read(pipe, 64):
            interrupts += data.count(signal.SIGINT)
            if interrupts > 1:
                os._exit(130)
        os.close(pipe)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = number
        if self._cutting:
            raise Cut
        if not self.patient:
            raise _Left

    @contextlib.contextmanager
    def cutting(self) -> Iterator[None]:
        """Work that a signal cuts where it is."""
        if self.asked is not None:
            raise Cut
        self._cutting = True
        try:
            yield
        finally:
            self._cutting = False

    def error(self, where: str, command: str) -> KontrastError:
        return self._kind(f"stopped and saved at {where}; go on with: {command}")

    @property
    def _kind(self) -> type[KontrastError]:
        return Interrupted if self.asked == signal.SIGINT else Stopped
