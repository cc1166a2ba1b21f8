"""How commands speak: results on standard output, everything else on standard error; options that several share."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kontrast.registry import UsageError

Json = Annotated[bool, typer.Option("--json", help="One JSON line on standard output for machines.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]


def say(text: str) -> None:
    """A line for people; standard output is for results."""
    print(_writable(text, sys.stderr), file=sys.stderr, flush=True)


def emit(tree: dict[str, Any], lines: list[str], as_json: bool) -> None:
    """A command's result: one JSON line for machines, or lines for people."""
    print(json.dumps(tree) if as_json else _writable("\n".join(lines), sys.stdout), flush=True)


def _writable(text: str, stream: Any) -> str:
    """The text in what the stream can write: a file's name may hold anything."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def split_arguments(arguments: list[str] | None) -> tuple[str | None, list[str]]:
    """`[DATA] [key=value ...]` as data and overrides; a path that exists is data even if it holds an equals sign."""
    data, overrides = None, []
    for text in arguments or []:
        if "=" in text and not Path(text).exists():
            overrides.append(text)
        elif data is None:
            data = text
        else:
            raise UsageError(f"unexpected argument {text!r}: give one DATA and overrides as key=value")
    return data, overrides


def write_page(runs: list[Path], out: Path, study: Path | None = None) -> Path:
    """The report of some runs; its errors are the command's."""
    from kontrast.reports import ReportError, write_report

    try:
        return write_report(runs, out, study)
    except ReportError as error:
        raise UsageError(str(error)) from None
