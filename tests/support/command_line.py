"""The command in this process, or as a process of its own, and what its errors must look like."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys

from kontrast.cli.main import run

TINY = [
    "training.epochs=1",
    "training.batch=16",
    "training.max_steps=4",
    "encoder.name=small-conv",
    "encoder.width=16",
    "evaluation.every=0",
    "evaluation.k=5",
    "evaluation.gallery=60",
]


def kontrast(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in this process: the same code path from its arguments to its exit code, without a new torch."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = run(list(arguments))
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), error.getvalue())


def real(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "kontrast", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def one_line(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """The command failed with this code, said so in one line with these words, and printed no traceback."""
    assert done.returncode == code, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("kontrast: ") and "Traceback" not in done.stderr, done.stderr
    assert all(word in last for word in words), last
