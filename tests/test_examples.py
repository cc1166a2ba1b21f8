"""The examples of the README run as they are."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_an_example_runs_and_prints_its_numbers(path):
    if "lightning" in path.name and importlib.util.find_spec("pytorch_lightning") is None:
        pytest.skip("pytorch_lightning is not installed")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    words = ("accuracy", "from scratch") if path.name == "fine_tune.py" else ("attraction", "repulsion")
    assert all(word in done.stdout for word in words), done.stdout
    if path.name != "fine_tune.py":  # where all rows are alike the loss is log 254, or 0 for CACR
        pull, push = (float(x) for x in re.findall(r"-?\d+\.\d+", done.stdout.splitlines()[-1]))
        assert pull + push < -0.2, done.stdout
