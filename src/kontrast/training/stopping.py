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
    """`with StopWatch() as stop: ... if stop.asked: save; raise stop.error(command)`."""

    def __init__(self) -> None:
        self.asked: int | None = None
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

    def error(self, where: str, command: str) -> KontrastError:
        kind = Interrupted if self.asked == signal.SIGINT else Stopped
        return kind(f"stopped and saved at {where}; go on with: {command}")
