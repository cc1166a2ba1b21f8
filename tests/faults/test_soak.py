"""A process that works for a long time holds no more at its end than at its beginning."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile

import pytest

from support import soak
from support.failing_calls import environment

COUNTED = ("descriptors", "python_threads", "children", "shared_memory", "temporary_files")


@pytest.mark.fault(67)
def test_rounds_leave_nothing_behind(tmp_path, monkeypatch):
    """After each round of all commands there are as many descriptors, threads, processes and files as before."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    work = soak.Soak(tmp_path, tmp_path / "temporary", images=96)
    for _ in range(4):  # the fourth has the same source of images as the first
        work.round()
    first, last = ({name: work.samples[n][name] for name in COUNTED} for n in (0, -1))
    assert last == first


@pytest.mark.slow
@pytest.mark.fault(67)
def test_soak_of_ten_minutes():
    """Memory and everything else that is counted stay flat."""
    command = [sys.executable, soak.__file__, "--minutes", "10"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("name, leak", [("descriptors", 0.02), ("memory_mib", 0.1), ("objects", 5.0)])
def test_a_leak_is_seen_and_noise_is_not(name, leak):
    draw = random.Random(0)
    noise = [draw.gauss(100, 1) for _ in range(300)]
    assert not soak.fit(name, noise).grows
    assert soak.fit(name, [value + leak * number for number, value in enumerate(noise)]).grows
