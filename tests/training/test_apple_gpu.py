"""Training on Apple's GPU, as far as a machine without one can show it: on a stand-in that has no float64 either."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration as backends

from kontrast.errors import EnvironmentFault, UsageError
from kontrast.training import device as devices

stand_in_device = pytest.importorskip("support.stand_in_device", reason="needs torch's backends in Python")


@pytest.mark.parametrize(
    ("name", "cuda", "mps", "world", "chosen"),
    [
        ("auto", False, True, "1", "mps"),
        ("auto", False, False, "1", "cpu"),
        ("auto", False, True, "2", "cpu"),
        ("auto", True, True, "1", "cuda"),
        ("mps", True, True, "1", "mps"),
        ("cpu", False, True, "1", "cpu"),
    ],
)
def test_the_device_is_chosen(monkeypatch, name, cuda, mps, world, chosen):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(cuda))
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert devices.choose_device(name).type == chosen


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(EnvironmentFault, match="no usable GPU of Apple; use --device cpu"):
        devices.choose_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(EnvironmentFault, match="serves one process"):
        devices.choose_device("mps")
    with pytest.raises(UsageError, match="allowed: auto, cpu, mps, cuda"):
        devices.choose_device("metal")


@pytest.mark.skipif(not hasattr(backends, "_setup_privateuseone_for_python_backend"), reason="torch before 2.10")
def test_views_and_objectives_need_no_float64():
    """They give what they give on the CPU, with every objective, and no float64 tensor is made on the device."""
    support = Path(__file__).parents[1] / "support"
    path = os.pathsep.join([str(support.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(support / "stand_in_device.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0 and " 0 failed" in done.stdout, done.stdout + done.stderr
