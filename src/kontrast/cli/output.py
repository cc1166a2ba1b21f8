"""How commands speak: results on standard output, everything else on standard error; options that several share."""

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

Json = Annotated[bool, typer.Option("--json", help="One JSON line on standard output for machines.")]
MaxBad = Annotated[float | None, typer.Option(help="The share of damaged images to go on with; 0.05.", min=0, max=1)]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
FollowLinks = Annotated[bool, typer.Option("--follow-links", help="Follow links in folders.")]
FloatRange = Annotated[str, typer.Option(metavar="LOW,HIGH", help="Of float images: the values of black and white.")]


def say(text: str) -> None:
    """A line for people; standard output is for results. Where nobody reads it (`2>&1 | head`), work goes on."""
    with contextlib.suppress(OSError):
        print(_writable(text, sys.stderr), file=sys.stderr, flush=True)


def fail(text: str, code: int) -> int:
    """The one line of a command that failed, and its exit code."""
    say(f"kontrast: {' '.join(str(text).split())}")
    return code


def emit(tree: dict[str, Any], lines: list[str], as_json: bool) -> None:
    """A command's result: one JSON line for machines, or lines for people."""
    text = json.dumps(tree) if as_json else "\n".join(_writable(line, sys.stdout) for line in lines)
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing more can be said there
        if not isinstance(error, BrokenPipeError):  # a reader that went away (`| head`) is no error
            raise EnvironmentFault(f"can't write the result to standard output: {error.strerror}") from None


def keep_streams() -> None:
    """Where a standard stream is closed (`>&-`), put nothing in its place, lest the next file opened stand there."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one


def _writable(text: str, stream: Any) -> str:
    """The text as one line in what the stream can write: a file's name may hold anything."""
    encoding = getattr(stream, "encoding", None) or "utf-8"  # a closed standard output is None
    return printable(text).encode(encoding, "backslashreplace").decode(encoding)


def split_arguments(arguments: list[str] | None) -> tuple[str | None, list[str]]:
    """`[DATA] [key=value ...]` as data and overrides; a path that exists is data even if it holds an equals sign."""
    data, overrides = None, []
    for text in arguments or []:
        if "=" in text and not os.path.exists(text):  # Path.exists raises for a very long name
            overrides.append(text)
        elif data is None:
            data = text
        else:
            raise UsageError(f"unexpected argument {text!r}: give one DATA and overrides as key=value")
    return data, overrides


def two_numbers(text: str) -> tuple[float, float] | None:
    """The range of float images, `0,1`; None where none is given."""
    if not text:
        return None
    try:
        low, high = map(float, text.strip("[]").split(","))
    except ValueError:
        low = high = math.nan
    if not -math.inf < low < high < math.inf:
        raise UsageError(f"--float-range {shorten(text)}: give two rising numbers, for example 0,1")
    return low, high


def write_page(runs: list[Path], out: Path, study: Path | None = None) -> Path:
    """The report of some runs; its errors are the command's."""
    from kontrast.files import disk_faults
    from kontrast.reports import ReportError, write_report

    try:
        with disk_faults(out):
            return write_report(runs, out, study)
    except ReportError as error:
        raise UsageError(str(error)) from None
