"""The Triton kernels, run on the CPU by Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kontrast.kernels import row_statistics


def test_in_the_interpreter():
    """Triton decides at its import whether it interprets, so these tests have a process of their own."""
    pytest.importorskip("triton")
    tests = Path(__file__).with_name("interpreted_rows.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(tests)],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


def test_a_tensor_that_triton_cannot_take_is_told():
    with pytest.raises(ValueError, match="triton can't take"):
        row_statistics(torch.zeros(4, 4, dtype=torch.float64), None, scale=1.0, implementation="triton")
