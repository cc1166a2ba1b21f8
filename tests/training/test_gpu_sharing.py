"""Runs that share a GPU: the service starts before them and ends after them, and its absence is reported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from kontrast.training import gpu_sharing
from kontrast.training.gpu_sharing import PIPES, control_program, shared_gpu


@pytest.fixture
def with_a_gpu(monkeypatch, tmp_path):
    """Pretend that there is a GPU without a running service, whose control program is in a temporary folder."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv(PIPES, raising=False)
    monkeypatch.setattr(gpu_sharing, "control_program", lambda: str(tmp_path / "control"))
    return tmp_path / "control"


def program(path, text: str) -> None:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


def test_the_service_runs_as_long_as_the_runs(with_a_gpu, tmp_path):
    """A script in place of the driver's program records how it is called."""
    calls = tmp_path / "calls"
    program(with_a_gpu, f'if [ "$1" = -d ]; then echo "start ${PIPES}" >> {calls}; else cat >> {calls}; fi\n')
    said: list[str] = []
    with shared_gpu("auto", said.append) as variables:
        place = variables[PIPES]
        assert calls.read_text() == f"start {place}\n" and os.path.isdir(place)
        assert PIPES not in os.environ, "the environment of this process does not change"
    assert calls.read_text() == f"start {place}\nquit\n"
    assert not os.path.exists(place) and said == []


def test_the_service_ends_after_an_error(with_a_gpu, tmp_path):
    calls = tmp_path / "calls"
    program(with_a_gpu, f'[ "$1" = -d ] || cat >> {calls}\n')
    with pytest.raises(KeyboardInterrupt), shared_gpu("cuda", print):
        raise KeyboardInterrupt
    assert calls.read_text() == "quit\n"


@pytest.mark.parametrize(
    "text, reason",
    [("echo no such thing >&2; exit 3\n", "no such thing"), ("exit 3\n", "exit code 3"), ("sleep 60\n", "timed out")],
)
def test_a_service_that_does_not_start_is_reported(with_a_gpu, monkeypatch, text, reason):
    monkeypatch.setattr(gpu_sharing, "SECONDS", 0.5)
    program(with_a_gpu, text)
    said: list[str] = []
    with shared_gpu("auto", said.append) as variables:
        assert variables == {}
    assert len(said) == 1 and "take turns" in said[0] and reason in said[0]


def test_a_missing_service_is_reported(with_a_gpu, monkeypatch):
    monkeypatch.setattr(gpu_sharing, "control_program", lambda: None)
    said: list[str] = []
    with shared_gpu("auto", said.append) as variables:
        assert variables == {} and "take turns" in said[0]


def test_no_service_is_started_on_a_cpu_or_if_one_is_running(with_a_gpu, monkeypatch):
    for device in ("cpu", "auto"):
        with shared_gpu(device, pytest.fail) as variables:
            assert variables == {}
        monkeypatch.setenv(PIPES, "/somewhere")


@pytest.mark.gpu
@pytest.mark.skipif(control_program() is None, reason="nvidia-cuda-mps-control is not installed")
def test_two_processes_share_a_real_gpu(monkeypatch):
    monkeypatch.delenv(PIPES, raising=False)
    work = "import torch; x = torch.eye(64, device='cuda'); print(int((x @ x).sum()))"
    with shared_gpu("cuda", pytest.fail) as variables:
        assert PIPES in variables
        two = [
            subprocess.Popen([sys.executable, "-c", work], env=os.environ | variables, stdout=subprocess.PIPE)
            for _ in range(2)
        ]
        assert [p.communicate()[0] for p in two] == [b"64\n", b"64\n"]
