"""Two processes on one run folder: the first goes on, the second is told who holds it; a dead one's lock falls."""

from __future__ import annotations

import re
import signal
import socket

import pytest

from support.commands import TINY, Command, steps_logged, until

LONG = [*TINY, "training.max_steps=300", "training.log_every=1"]


@pytest.mark.fault(7)
@pytest.mark.parametrize("how", ["resumed", "started"])
def test_a_second_process_is_told_who_holds_the_folder(tmp_path, how):
    """Seen: the second exits 6 (a new start: 2) with pid, host and time. Remains: the first, undisturbed."""
    run = tmp_path / "run"
    holder = Command(tmp_path / "held", *LONG, "--out", str(run))
    until(steps_logged(run, 1))
    if how == "resumed":
        said = Command(tmp_path / "log", "--resume", "--out", str(run)).ended(6)
        words = rf"by pid {holder.process} on {re.escape(socket.gethostname())} since \d{{4}}-\d\d-\d\dT"
        assert re.search(words, said), said
    else:
        assert "already contains a run" in Command(tmp_path / "log", *LONG, "--out", str(run)).ended(2)
    holder.send(signal.SIGTERM)
    assert "stopped and saved at step" in holder.ended(75)


@pytest.mark.fault(7)
def test_two_that_start_at_once_leave_one_run(tmp_path):
    """Seen: one trains, the other exits 6 or 2. Remains: one whole run."""
    argv = [*TINY, "training.max_steps=30", "--out", str(tmp_path / "run")]
    both = [Command(tmp_path / f"log-{n}", *argv) for n in range(2)]
    codes = sorted(command.wait() for command in both)
    assert codes[0] == 0 and codes[1] in (2, 6), [command.said for command in both]
    assert (tmp_path / "run" / "encoder.safetensors").exists()


@pytest.mark.fault(7)
def test_the_lock_of_a_dead_process_is_taken_over(tmp_path):
    """Seen: nothing but where it goes on. Remains: the run, under the new process."""
    run = tmp_path / "run"
    dead = Command(tmp_path / "log", *LONG, "--out", str(run))
    until(steps_logged(run, 6))
    dead.send(signal.SIGKILL)
    dead.wait()
    assert f"pid {dead.process} " in (run / ".lock").read_text()
    again = Command(tmp_path / "log", "--resume", "training.max_steps=20", "--out", str(run))
    again.ended(0)
    assert f"pid {again.process} " in (run / ".lock").read_text()
