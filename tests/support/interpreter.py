"""Triton's interpreter. Triton decides at its import whether it interprets: such tests have a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def passes_interpreted(tests: Path) -> None:
    """Run a file of tests on the CPU with Triton interpreting; fail with what it said."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(tests)],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
