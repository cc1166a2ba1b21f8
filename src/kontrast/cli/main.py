"""The command. It answers `--help` without importing torch: every command imports what it needs when it runs."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kontrast import __version__, plugins
from kontrast.cli import catalog, papers, pretrain, runs, studies
from kontrast.cli.output import (
    fail,
    keep_streams,
)
from kontrast.errors import KontrastError
from kontrast.training.signals import StopSignals

if TYPE_CHECKING:
    pass


app = typer.Typer(
    name="kontrast",
    help="Learn image representations without labels by contrast, and see what they learned. With --debug anywhere, an "
    "error shows where it came from.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


for group in (pretrain, runs, studies, papers, catalog):
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
            help="Import a file of your own first, which registers objectives, encoders, heads or view policies; may "
            "be repeated. KONTRAST_IMPORT names such files too.",
        ),
    ] = None,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit()
    plugins.import_files(files or [])


def is_out_of_memory(error: Exception) -> bool:
    """Of the processor's memory; the GPU's has its own line."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def run(argv: list[str]) -> int:
    """Run the command and return its exit code; every error is one line."""
    keep_streams()
    debug = "--debug" in argv
    argv = [a for a in argv if a != "--debug"] or ["--help"]
    try:
        with StopSignals("stopped; give the same command again"):
            code = app(args=argv, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except KontrastError as error:
        if debug:
            traceback.print_exc()
        return fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return fail("stopped by Ctrl-C", 130)
    except OSError as error:
        if debug:
            traceback.print_exc()
        what = f"{error.filename}: " if error.filename is not None else ""
        return fail(f"{what}{error.strerror or error}", 6)
    except SystemExit:  # typer's way to leave where the reader of --help went away (`| head`)
        return 0
    except Exception as error:
        if is_out_of_memory(error):
            return fail(f"out of memory ({error}): give less to do at once, for example a smaller encoder or batch", 6)
        usage = getattr(error, "format_message", None)  # typer's own usage errors
        if usage is not None:
            return fail(f"{usage()} (see --help)", 2) if usage() else 2
        if type(error).__name__ == "Abort":
            return fail("stopped by Ctrl-C", 130)
        if debug:
            traceback.print_exc()
            return 1
        return fail(f"unexpected {type(error).__name__}: {error} (run again with --debug and report it)", 1)


def main() -> None:
    code = run(sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):  # all is done: a signal from here on changes nothing
        signal.signal(number, lambda *_: os._exit(code))
    sys.exit(code)
