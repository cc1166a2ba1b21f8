"""Run commands in which one system call fails: in forks of a process that has imported torch, or as whole processes.

`FaultyCommands` starts this file as a script, which forks for every command that it is asked for. With `--process` the
script is one command itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from support.failing_calls import LIBRARY, FailingCalls, Point, environment_with

LIMIT = 3600
"""Seconds after which a command is taken to hang."""
CHUNK = 16
"""Images per chunk of a store that a whole process packs: of few images there are several chunks all the same."""


class Ended(NamedTuple):
    """How a command ended: its exit code, what it printed, its calls by kind, and the path of the one that failed."""

    code: int
    said: str
    counts: dict[str, int]
    failed: str

    @property
    def line(self) -> str:
        return next((line for line in self.said.splitlines() if line.startswith("kontrast: ")), "")


def run_in_fork(argv: Sequence[str], below: Path, point: Point | None, log: Path) -> Ended:
    """Run a command in a fork of this process, with one failing call below a folder if a point is given."""
    from kontrast.cli import main as cli

    calls = FailingCalls()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(out, 1)
            os.dup2(out, 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            signal.alarm(LIMIT)
            sys.argv = ["kontrast", *map(str, argv)]  # the header of a recipe has the command line
            calls.arm(below, *(point or ()))
            code = cli.run(list(argv))
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            seen = calls.seen()
            calls.disarm()
            os.write(writer, json.dumps(seen).encode())
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        seen = json.loads(answer.read() or b'{"counts": {}, "failed": ""}')
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return Ended(code, log.read_text(errors="replace"), seen["counts"], seen["failed"])


def run_as_process(argv: Sequence[str], below: Path, point: Point | None, log: Path) -> Ended:
    """Run a command as a process of its own, as a shell would, with one failing call below a folder."""
    seen = log.with_suffix(".seen")
    seen.write_text('{"counts": {}, "failed": ""}')
    request = json.dumps({"argv": list(argv), "below": str(below), "point": point, "seen": str(seen)})
    words = [sys.executable, __file__, "--process", request]
    with log.open("wb") as file:
        code = subprocess.run(
            words, env=environment_with(Path(os.environ[LIBRARY])), stdout=file, stderr=file
        ).returncode
    return Ended(code, log.read_text(errors="replace"), **json.loads(seen.read_text()))


def be_a_process(request: str) -> None:
    """Be the command of `run_as_process`: the library is on before anything of kontrast is imported."""
    asked, calls = json.loads(request), FailingCalls()
    calls.arm(Path(asked["below"]), *(asked["point"] or ()))
    from kontrast.__main__ import main
    from kontrast.data import store_writer

    store_writer.CHUNK = CHUNK
    sys.argv = ["kontrast", *asked["argv"]]
    try:
        main()
    finally:
        seen = calls.seen()
        calls.disarm()
        Path(asked["seen"]).write_text(json.dumps(seen))


class FaultyCommands:
    """A process that runs commands in which one call fails. It imports torch once and forks for every command."""

    def __init__(self, library: Path):
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment_with(library),
        )  # fmt: skip

    def run(self, argv: Sequence[object], below: Path, point: Point | None = None) -> Ended:
        """Run a command; the call of `point` is counted among those on files below a folder, or on one file."""
        assert self.process.stdin is not None and self.process.stdout is not None
        request = {"argv": [str(word) for word in argv], "below": str(below), "point": point}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return Ended(**json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        self.process.communicate()


def serve() -> None:
    """Run a command, with a failing call, for every line of standard input: the other end of `FaultyCommands`."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="faulty-commands-") as folder:
        for line in sys.stdin:
            asked = json.loads(line)
            point = Point(*asked["point"]) if asked["point"] else None
            ended = run_in_fork(asked["argv"], Path(asked["below"]), point, Path(folder) / "log")
            print(json.dumps(ended._asdict()), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        be_a_process(sys.argv[2])
    else:
        serve()
