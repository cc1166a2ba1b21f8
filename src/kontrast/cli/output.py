"""Options that commands share, and how commands print: results to standard output, all else to standard error."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kontrast.errors import EnvironmentFault, UsageError, printable, shorten

Json = Annotated[bool, typer.Option("--json", help="Print the result as one line of JSON.")]
MaxBad = Annotated[
    float | None, typer.Option(help="The share of damaged images to tolerate (default 0.05).", min=0, max=1)
]
Device = Annotated[str, typer.Option(help="auto, cpu, mps, cuda or cuda:N.")]
Engine = Annotated[str, typer.Option(help="local, or ray: the workers of a Ray cluster.")]
Workers = Annotated[
    int | None, typer.Option(help="ray: how many processes (default: one per GPU).", show_default=False)
]
FollowLinks = Annotated[bool, typer.Option("--follow-links", help="Follow symbolic links in folders.")]
FloatRange = Annotated[
    str, typer.Option(metavar="LOW,HIGH", help="The values of black and white in floating-point images.")
]


def say(text: str) -> None:
    """Print a line to standard error. If nobody reads it any more (`2>&1 | head`), the work continues."""
    with contextlib.suppress(OSError):
        print(_writable(text, sys.stderr), file=sys.stderr, flush=True)


def fail(text: str, code: int) -> int:
    """Print the error of a failed command as one line, and return its exit code."""
    say(f"kontrast: {' '.join(str(text).split())}")
    return code


def emit(tree: dict[str, Any], lines: list[str], as_json: bool) -> None:
    """Print a command's result: the tree as one line of JSON, or the lines for people."""
    text = json.dumps(tree) if as_json else "\n".join(_writable(line, sys.stdout) for line in lines)
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again at exit
        if not isinstance(error, BrokenPipeError):  # a reader that left (`| head`) is not an error
            raise EnvironmentFault(f"can't write the result to standard output: {error.strerror}") from None


def reopen_closed_streams() -> None:
    """Open /dev/null in place of closed standard streams (`>&-`), or the next file opened would become standard
    output."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


def _writable(text: str, stream: Any) -> str:
    """Return the text as one line that the stream can encode; file names may contain any bytes."""
    encoding = getattr(stream, "encoding", None) or "utf-8"  # a closed stream is None
    return printable(text).encode(encoding, "backslashreplace").decode(encoding)


def split_arguments(arguments: list[str] | None) -> tuple[str | None, list[str]]:
    """Split `[DATA] [key=value ...]` into data and overrides. An existing path is data even if it contains "="."""
    data, overrides = split_overrides(arguments)
    if len(data) > 1:
        raise UsageError(f"unexpected argument {data[1]!r}: give one DATA, and overrides as key=value")
    return (data[0] if data else None), overrides


def split_overrides(arguments: list[str] | None) -> tuple[list[str], list[str]]:
    """Split `[DATA]... [key=value]...` into data and overrides. An existing path is data even if it contains "="."""
    given = arguments or []
    overrides = [
        text for text in given if "=" in text and not os.path.exists(text)
    ]  # Path.exists raises for long names
    return [text for text in given if text not in overrides], overrides


def two_numbers(text: str) -> tuple[float, float] | None:
    """Read the range of floating-point images, such as `0,1`; None if the option is not given."""
    if not text:
        return None
    try:
        low, high = map(float, text.strip("[]").split(","))
    except ValueError:
        low = high = math.nan
    if not -math.inf < low < high < math.inf:
        raise UsageError(f"--float-range {shorten(text)}: give two increasing numbers, for example 0,1")
    return low, high


def write_page(runs: list[Path], out: Path | None = None, study: Path | None = None) -> Path:
    """Write the report of some runs, with errors that have the command's exit codes."""
    from kontrast.files import disk_faults
    from kontrast.reports.report import ReportError, report
    from kontrast.reports.run_files import UnreadableFile

    try:
        with disk_faults(out or runs[0]):
            return report(runs, out, study)
    except ReportError as error:
        raise UsageError(str(error)) from None
    except UnreadableFile as error:
        raise EnvironmentFault(str(error)) from None
