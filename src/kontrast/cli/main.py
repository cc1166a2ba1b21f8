"""The command `kontrast`. Every command imports what it needs when it runs, so `--help` does not wait for torch."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from kontrast import __version__, plugins
from kontrast.cli import classifiers, data, explain, papers, runs, studies, training, transfers
from kontrast.cli.output import fail, reopen_closed_streams
from kontrast.training.signals import StopSignals

app = typer.Typer(
    name="kontrast",
    help="Learn image representations without labels by contrast, and see what they learned. Add --debug to any "
    "command to see where an error came from.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group in (training, runs, classifiers, transfers, studies, papers, explain, data):
    group.register(app)


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--import",
            metavar="FILE.py",
            show_default=False,
            help="First import this Python file, which may register objectives, encoders, heads or view policies. "
            "Can be repeated. The variable KONTRAST_IMPORT lists such files too.",
        ),
    ] = None,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit()
    plugins.import_files(files or [])


command_of = functools.cache(typer.main.get_command)  # a process may run many commands


def run(argv: list[str]) -> int:
    """Run the command with these arguments and return its exit code. Every error is printed as one line."""
    reopen_closed_streams()
    debug = "--debug" in argv
    argv = [argument for argument in argv if argument != "--debug"] or ["--help"]
    try:
        with StopSignals("stopped; run the same command again"):
            code = command_of(app)(args=argv, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return fail("stopped by Ctrl-C", 130)
    except SystemExit:  # typer exits like this when the reader of --help has left (`| head`)
        return 0
    except Exception as error:
        if debug:
            traceback.print_exc()
        return report_error(error)


def report_error(error: Exception) -> int:
    """Print the one line for an error and return the exit code."""
    usage = getattr(error, "format_message", None)  # typer's own errors
    if usage is not None:
        return fail(f"{usage()} (see --help)", 2) if usage() else 2
    if type(error).__name__ == "Abort":
        return fail("stopped by Ctrl-C", 130)
    known = plugins.explain_error(error)
    return fail(str(known), known.exit_code)


def main() -> None:
    """Run the command of this process and exit."""
    code = run(sys.argv[1:])
    with contextlib.suppress(OSError, ValueError):  # whoever read it may have left
        sys.stdout.flush()
    for number in (signal.SIGINT, signal.SIGTERM):  # the work is done, so a late signal must not change the exit code
        signal.signal(number, lambda *_: os._exit(code))
    sys.exit(code)
