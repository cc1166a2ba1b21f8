"""Runs that share a GPU: the service is started for them and ended after them, and its absence is said."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from kontrast.papers import gpu_sharing
from kontrast.papers.gpu_sharing import PIPES, control_program, shared_gpu


@pytest.fixture
def with_a_gpu(monkeypatch, tmp_path):
    """As on a machine with a GPU, where no service runs and only the given folder has programs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv(PIPES, raising=False)
    monkeypatch.setattr(gpu_sharing, "control_program", lambda: str(tmp_path / "control"))
    return tmp_path / "control"


def program(path, text: str) -> None:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


def test_the_service_runs_while_the_runs_do(with_a_gpu, tmp_path):
    """A stand-in for the driver's program writes down how it is called."""
    told = tmp_path / "told"
    program(with_a_gpu, f'if [ "$1" = -d ]; then echo "start ${PIPES}" >> {told}; else cat >> {told}; fi\n')
    said: list[str] = []
    with shared_gpu("auto", said.append) as variables:
        place = variables[PIPES]
        assert told.read_text() == f"start {place}\n" and os.path.isdir(place)
        assert PIPES not in os.environ, "this process itself stays as it was"
    assert told.read_text() == f"start {place}\nquit\n"
    assert not os.path.exists(place) and said == []


def test_it_is_ended_after_an_error_too(with_a_gpu, tmp_path):
    told = tmp_path / "told"
    program(with_a_gpu, f'[ "$1" = -d ] || cat >> {told}\n')
    with pytest.raises(KeyboardInterrupt), shared_gpu("cuda", print):
        raise KeyboardInterrupt
    assert told.read_text() == "quit\n"


@pytest.mark.parametrize(
    "text, reason",
    [("echo no such thing >&2; exit 3\n", "no such thing"), ("exit 3\n", "exit 3"), ("sleep 60\n", "timed out")],
)
def test_a_service_that_does_not_start_is_said(with_a_gpu, monkeypatch, text, reason):
    monkeypatch.setattr(gpu_sharing, "SECONDS", 0.5)
    program(with_a_gpu, text)
    said: list[str] = []
    with shared_gpu("auto", said.append) as variables:
        assert variables == {}
    assert len(said) == 1 and "take turns" in said[0] and reason in said[0]


def test_without_the_program_it_is_said(with_a_gpu, monkeypatch):
    monkeypatch.setattr(gpu_sharing, "control_program", lambda: None)
    said: list[str] = []
    with shared_gpu("auto", said.append) as variables:
        assert variables == {} and "take turns" in said[0]


def test_on_a_cpu_or_with_a_service_there_nothing_is_done(with_a_gpu, monkeypatch):
    for device in ("cpu", "auto"):
        with shared_gpu(device, pytest.fail) as variables:
            assert variables == {}
        monkeypatch.setenv(PIPES, "/somewhere")


@pytest.mark.gpu
@pytest.mark.skipif(control_program() is None, reason="there is no nvidia-cuda-mps-control")
def test_two_processes_share_the_real_one(monkeypatch):
    monkeypatch.delenv(PIPES, raising=False)
    work = "import torch; x = torch.eye(64, device='cuda'); print(int((x @ x).sum()))"
    with shared_gpu("cuda", pytest.fail) as variables:
        assert PIPES in variables
        two = [
            subprocess.Popen([sys.executable, "-c", work], env=os.environ | variables, stdout=subprocess.PIPE)
            for _ in range(2)
        ]
        assert [p.communicate()[0] for p in two] == [b"64\n", b"64\n"]
