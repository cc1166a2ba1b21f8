"""Being asked to stop: SIGTERM and Ctrl-C finish the step, save and leave; a second Ctrl-C leaves at once."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

from kontrast.registry import KontrastError, Stopped


class Interrupted(KontrastError):
    """Ctrl-C; the work is saved and can be resumed."""

    exit_code = 130


class StopWatch:
    """`with StopWatch() as stop: ...; stop.patient = True; ...; if stop.asked: save; raise stop.error(where, command)`.

    Until it is patient there is nothing to save, and a signal ends the work where it is. From then on a signal is noted
    and the loop asks for it after each step.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self.patient = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> StopWatch:
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                self._old[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread: whoever runs us there keeps the signals
                return self
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.asked == signal.SIGINT:
            os._exit(130)
        self.asked = number
        if not self.patient:
            raise self._kind("stopped before training began; run the same command again")

    def error(self, where: str, command: str) -> KontrastError:
        return self._kind(f"stopped and saved at {where}; go on with: {command}")

    @property
    def _kind(self) -> type[KontrastError]:
        return Interrupted if self.asked == signal.SIGINT else Stopped
