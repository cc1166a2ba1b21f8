"""The program's door, `kontrast` and `python -m kontrast`: signals are answered before anything heavy is imported."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType


def leave(number: int, frame: FrameType | None) -> None:
    """Nothing has begun yet, so there is nothing to save."""
    with contextlib.suppress(OSError):
        os.write(2, b"kontrast: stopped; give the same command again\n")
    os._exit(130 if number == signal.SIGINT else 75)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    from kontrast.cli.main import main as command

    command()


if __name__ == "__main__":
    main()
