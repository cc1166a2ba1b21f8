"""Real commands in forked copies of this process: like subprocesses, but without importing everything again.

Modules that a run imports lazily are imported here, once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import sklearn.datasets  # noqa: F401
import torch
import torch._dynamo

from kontrast.cli import main as cli
from kontrast.runs import probe as evaluation  # noqa: F401
from kontrast.training import pretrain as start  # noqa: F401
from kontrast.training.loop import Loop

TINY = [
    "encoder.width=16",
    "views.size=16",
    "head.outputs=16",
    "training.batch=16",
    "training.epochs=1",
    "evaluation.every=0",
    "checkpoints.every=0.01",
]
"""Overrides with which a step of the quick start takes milliseconds."""
LIMIT = 3600.0
"""Seconds that a test waits for another process. That takes up to 5 seconds on an idle machine; the limit only keeps a
broken test from hanging, and no machine is so busy that it is reached."""


class Command:
    """A command that starts at once: `wait` returns its exit code and `said` is what it has printed."""

    running: list[Command] = []

    def __init__(
        self,
        log: Path,
        *argv: str,
        environment: dict[str, str] | None = None,
        instead: Callable[[], int] | None = None,
    ):
        """Fork and run `kontrast pretrain argv`, or the function `instead`, with its output in the file `log`."""
        self.log = log
        self.process = os.fork()
        self.test = current_test()
        Command.running = [*Command.running, self] if self.process else []
        if self.process == 0:
            code = 1
            try:
                os.environ.update(environment or {})
                out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                os.dup2(out, 1)
                os.dup2(out, 2)
                sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
                torch.set_num_threads(1)
                code = instead() if instead else cli.run(["pretrain", "--device", "cpu", "--no-probes", *argv])
            except BaseException:
                traceback.print_exc()
            finally:
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(AttributeError, OSError):  # the command closed it, or nobody reads it
                        stream.flush()
                os._exit(code)

    def send(self, number: int) -> None:
        os.kill(self.process, number)

    def wait(self) -> int:
        Command.running = [command for command in Command.running if command is not self]
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])

    @property
    def has_ended(self) -> bool:
        return os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def ended(self, code: int) -> str:
        """Check that it ends with this exit code, no traceback and, if it fails, one error line; return its output."""
        found, said = self.wait(), self.said
        assert found == code, f"ended with {found}, not {code}: {said}"
        assert "Traceback" not in said, said
        lines = [line for line in said.splitlines() if line.startswith("kontrast: ")]
        assert len(lines) == (code != 0), said
        return said

    @property
    def said(self) -> str:
        return self.log.read_text()


def current_test() -> str:
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]


def until(happened: Callable[[], object]) -> None:
    """Wait until another process has done something; fail if a command ends before."""
    due = time.monotonic() + LIMIT
    while not happened():
        ended = [one for one in Command.running if one.test == current_test() and one.has_ended]
        assert not ended or happened(), f"a command ended too early: {ended[0].said}"
        assert time.monotonic() < due, f"it did not happen within {LIMIT:.0f} s"
        time.sleep(0.002)


def after_step(number: int, act: Callable[[], object]) -> None:
    """In a process that is about to train, call `act` once, after that step and before the next.

    A busy machine can't delay it until the run has ended, as it could delay what a test does from outside.
    """
    inner = Loop.take_step

    def take(self: Loop, batch: object) -> None:
        if self.position.step == number:
            act()
        inner(self, batch)

    Loop.take_step = take  # type: ignore[method-assign,assignment]


def children_of(process: int) -> list[int]:
    """Return the processes that the threads of a process started."""
    lists = Path(f"/proc/{process}/task").glob("*/children")
    return [int(word) for path in lists for word in path.read_text().split()]


def saved_step(output: str) -> int:
    """Return the step that a stopped command says it saved."""
    return int(re.search(r"saved (?:at )?step (\d+)", output)[1])


def resumed_step(output: str) -> int:
    """Return the step from which a command says it resumes."""
    return int(re.search(r"from step (\d+)", output)[1])


def printed_command(output: str) -> str:
    """Return the command that a stopped command prints for resuming."""
    return re.search(r"kontrast (?:pretrain|probe|embed) .*", output)[0]


def steps_logged(run: Path, count: int) -> Callable[[], bool]:
    return lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_bytes().count(b"\n") >= count


def ends(run: Path) -> dict[str, bytes]:
    """Return the files that the recipe determines: those of two runs are equal byte for byte."""
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    paths = {"encoder": run / "encoder.safetensors", "metrics": run / "metrics.jsonl"}
    return {name: path.read_bytes() for name, path in {**paths, "checkpoint": last / "state.safetensors"}.items()}


def rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a rank."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def as_nobody(work):
    """Run `work` as a user without root's rights and return its result, passed as JSON."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            os.write(writer, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as answer:
        return json.loads(answer.read() or b"null")
