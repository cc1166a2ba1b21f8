"""The real command in a forked copy of this process: what a subprocess does, without importing everything again.

What a run imports where it needs it is imported here, once.
"""

from __future__ import annotations

import contextlib
import json
import os
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

TINY = [
    "encoder.width=16",
    "views.size=16",
    "head.outputs=16",
    "training.batch=16",
    "training.epochs=1",
    "evaluation.every=0",
    "checkpoints.every=0.01",
]
"""Overrides that make the quick start's step take milliseconds."""


class Command:
    """`Command(log, "pretrain", ...)` runs at once; `wait` gives its exit code, `said` what it wrote."""

    def __init__(
        self,
        log: Path,
        *argv: str,
        environment: dict[str, str] | None = None,
        instead: Callable[[], int] | None = None,
    ):
        """`instead` is run in the command's place."""
        self.log = log
        self.process = os.fork()
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
                    with contextlib.suppress(AttributeError, OSError):  # closed by the command, or read by nobody
                        stream.flush()
                os._exit(code)

    def send(self, number: int) -> None:
        os.kill(self.process, number)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])

    def ended(self, code: int) -> str:
        """Wait for its end with this exit code: what it said, which holds no traceback and, if it failed, one line."""
        found, said = self.wait(), self.said
        assert found == code, f"ended with {found}, not {code}: {said}"
        assert "Traceback" not in said, said
        lines = [line for line in said.splitlines() if line.startswith("kontrast: ")]
        assert len(lines) == (code != 0), said
        return said

    @property
    def said(self) -> str:
        return self.log.read_text()


def until(happened: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait for something that another process does."""
    due = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < due, "it did not happen"
        time.sleep(0.002)


def steps_logged(run: Path, count: int) -> Callable[[], bool]:
    return lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_bytes().count(b"\n") >= count


def ends(run: Path) -> dict[str, bytes]:
    """What a run leaves that the recipe determines: two runs of it are equal byte for byte."""
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    paths = {"encoder": run / "encoder.safetensors", "metrics": run / "metrics.jsonl"}
    return {name: path.read_bytes() for name, path in {**paths, "checkpoint": last / "state.safetensors"}.items()}


def rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def as_nobody(work):
    """What `work` returns, as JSON, done by a user who may not read everything as the superuser may."""
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
