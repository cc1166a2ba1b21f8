"""Run tests in Triton's interpreter. Triton reads the setting when it is imported, so they need their own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def assert_tests_pass_interpreted(*tests: Path, marks: str = "not slow") -> None:
    """Run the tests of files that have these marks on the CPU in Triton's interpreter; fail with their output."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", marks, *map(str, tests)],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
