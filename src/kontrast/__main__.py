"""The entry point of `kontrast` and `python -m kontrast`. It handles signals before it imports anything heavy."""

from __future__ import annotations

from kontrast.import_path import drop_current_folder

drop_current_folder()  # before any import that a file beside the data could take over

import contextlib  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
from types import FrameType  # noqa: E402


def exit_early(number: int, frame: FrameType | None) -> None:
    """Exit on a signal that arrives before any work has started, when there is nothing to save."""
    with contextlib.suppress(OSError):
        os.write(2, b"kontrast: stopped; run the same command again\n")
    os._exit(130 if number == signal.SIGINT else 75)


def main() -> None:
    """Run the command line."""
    launcher = os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, exit_early)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun started this process as a rank
        from kontrast.training.signals import end_with_launcher

        end_with_launcher(launcher)
    from kontrast.cli.main import main as run_command

    run_command()


if __name__ == "__main__":
    main()
