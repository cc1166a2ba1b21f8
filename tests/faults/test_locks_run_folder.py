"""Two processes on one run folder: the first continues and the second names it; a dead process loses its lock."""

from __future__ import annotations

import os
import re
import signal
import socket

import pytest

from kontrast.files import take_lock

from support.commands import TINY, Command, saved_step, steps_logged, until

LONG = [*TINY, "training.max_steps=300", "training.log_every=1"]


@pytest.mark.fault(7)
@pytest.mark.parametrize("how", ["resumed", "started"])
def test_second_process_on_a_run_folder(tmp_path, how):
    """The second process exits 6 (a new start: 2) with pid, host and time of the first, which continues."""
    run = tmp_path / "run"
    holder = Command(tmp_path / "held", *LONG, "--out", str(run))
    until(steps_logged(run, 1))
    if how == "resumed":
        said = Command(tmp_path / "log", "--resume", "--out", str(run)).ended(6)
        facts = rf"pid {holder.process}\b.*{re.escape(socket.gethostname())}.*\d{{4}}-\d\d-\d\dT"
        assert re.search(facts, said), said
    else:
        assert str(run) in Command(tmp_path / "log", *LONG, "--out", str(run)).ended(2)
    holder.send(signal.SIGTERM)
    assert saved_step(holder.ended(75)) >= 1


@pytest.mark.fault(7)
def test_second_process_leaves_what_the_first_is_writing(tmp_path):
    """The second process exits 6, and a checkpoint that the first is about to finish stays."""
    run = tmp_path / "run"
    Command(tmp_path / "first", *TINY, "training.max_steps=1", "--out", str(run)).ended(0)
    lock = take_lock(run / ".lock")
    half_written = run / "checkpoints" / f".tmp-{os.getpid()}-step-00000002"
    half_written.mkdir()
    Command(tmp_path / "second", "--resume", "--out", str(run)).ended(6)
    os.close(lock)
    assert half_written.is_dir()


@pytest.mark.fault(7)
def test_two_processes_that_start_at_once(tmp_path):
    """One trains, the other exits 6 or 2; one complete run remains."""
    argv = [*TINY, "training.max_steps=30", "--out", str(tmp_path / "run")]
    both = [Command(tmp_path / f"log-{n}", *argv) for n in range(2)]
    codes = sorted(command.wait() for command in both)
    assert codes[0] == 0 and codes[1] in (2, 6), [command.said for command in both]
    assert (tmp_path / "run" / "encoder.safetensors").exists()


@pytest.mark.fault(7)
def test_lock_of_a_dead_process(tmp_path):
    """Another process takes over the lock and resumes."""
    run = tmp_path / "run"
    dead = Command(tmp_path / "log", *LONG, "--out", str(run))
    until(steps_logged(run, 6))
    dead.send(signal.SIGKILL)
    dead.wait()
    assert f"pid {dead.process} " in (run / ".lock").read_text()
    again = Command(tmp_path / "log", "--resume", "training.max_steps=20", "--out", str(run))
    again.ended(0)
    assert f"pid {again.process} " in (run / ".lock").read_text()
