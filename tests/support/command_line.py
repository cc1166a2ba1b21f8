"""Run the command in this process or in a new one, and check that its errors are one line."""

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
    """Run the command in this process, which saves importing torch again."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = run(list(arguments))
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), error.getvalue())


def real(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a new process."""
    return subprocess.run(
        [sys.executable, "-m", "kontrast", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def one_line(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """Check that the command failed with this code and one line that contains these words, without a traceback."""
    assert done.returncode == code, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("kontrast: ") and "Traceback" not in done.stderr, done.stderr
    assert all(word in last for word in words), last
