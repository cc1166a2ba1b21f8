"""Decoding processes that are killed or hang, and a machine with hardly any shared memory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from kontrast.cli import main as cli
from kontrast.data import decode_workers as workers
from kontrast.data import store_writer as packing

from support import kill_storm
from support.commands import TINY, Command, ends, steps_logged, until

LONG = [*TINY, "data.pack=false", "training.epochs=500", "training.log_every=1", "checkpoints.every=0"]
LONG += ["--recipe", "quickstart"]
two_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="with one core images are decoded in the process itself"
)


def children_of(process: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True).stdout.split()
    return [int(pid) for pid in found]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return kill_storm.make_pictures(tmp_path)[1]


@two_cores
@pytest.mark.fault(24)
def test_a_killed_decoding_process_is_named_and_the_last_step_saved_first(shards, tmp_path):
    """Seen: exit 6, the signal and what to lower. Remains: a checkpoint of the last step; the rest is bit-equal."""
    run, steps = tmp_path / "run", "training.max_steps=100"
    command = Command(tmp_path / "log", str(shards), *LONG, steps, "--out", str(run))
    until(steps_logged(run, 3))
    for child in children_of(command.process):
        os.kill(child, signal.SIGKILL)
    said = command.ended(6)
    assert "a decoding process was killed by signal 9 at " in said and "fewer cores" in said
    step = int(re.search(r"saved step (\d+) of 100", said)[1])
    assert [p.name for p in (run / "checkpoints").iterdir()] == [f"step-{step:08d}"]
    assert f"going on from step {step} of" in Command(tmp_path / "log", "--resume", "--out", str(run)).ended(0)
    Command(tmp_path / "log", str(shards), *LONG, steps, "--out", str(tmp_path / "whole")).ended(0)
    assert ends(run) == ends(tmp_path / "whole")


def impatient(argv: list[str]) -> int:
    workers.PATIENCE, workers.IN_PROCESS, packing.CHUNK = 4.0, 8, 16
    return cli.run(argv)


@two_cores
@pytest.mark.fault(25)
def test_a_decoding_process_that_hangs_is_given_up_with_the_files_in_flight(shards, tmp_path):
    """Seen: exit 6 after the patience (120 s, here 4) and the files it was at. Remains: a checkpoint; no process."""
    run = tmp_path / "run"
    argv = ["pretrain", str(shards), *LONG, "--device", "cpu", "--no-probes", "--out", str(run)]
    command = Command(tmp_path / "log", instead=partial(impatient, argv))
    until(steps_logged(run, 3))
    stopped = children_of(command.process)
    for child in stopped:
        os.kill(child, signal.SIGSTOP)
    said = command.ended(6)
    assert re.search(r"no answer in 4 s while reading \S+\.png \.\. \S+\.png: storage hangs\?", said), said
    assert "saved step" in said and list((run / "checkpoints").glob("step-*"))
    until(lambda: not any(Path(f"/proc/{child}").exists() for child in stopped))


def stopped_from_birth(argv: list[str]) -> int:
    start = workers.Worker.__init__

    def stop(self: workers.Worker) -> None:
        start(self)
        self.process.send_signal(signal.SIGSTOP)

    workers.Worker.__init__ = stop
    return impatient(argv)


@two_cores
@pytest.mark.fault(25)
def test_a_packing_whose_processes_hang_is_given_up(shards, tmp_path):
    """Seen: exit 6 after the patience and the files in flight. Remains: what was packed; it is gone on with later."""
    argv = ["pack", str(tmp_path / "pictures"), str(tmp_path / "store")]
    said = Command(tmp_path / "log", instead=partial(stopped_from_birth, argv)).ended(6)
    assert "no answer in 4 s while reading" in said
    Command(tmp_path / "log", instead=partial(cli.run, argv)).ended(0)


@two_cores
@pytest.mark.fault(26)
def test_a_tiny_shared_memory_is_no_matter(shards, tmp_path):
    """Seen: nothing, for images come through pipes and never through /dev/shm. Remains: the run of any machine."""
    argv = [str(shards), *LONG, "training.max_steps=12", "--device", "cpu", "--no-probes", "--out"]
    inside = 'mount -t tmpfs -o size=4k tmpfs /dev/shm && exec "$0" -m kontrast pretrain "$@"'
    tried = subprocess.run(["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=4k tmpfs /dev/shm"])
    if tried.returncode:
        pytest.skip("needs the right to mount over /dev/shm in a namespace of its own (root)")
    small = ["unshare", "-m", "sh", "-c", inside, sys.executable, *argv, str(tmp_path / "small")]
    told = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(small, capture_output=True, text=True, timeout=120, env=told)
    assert done.returncode == 0, done.stderr
    Command(tmp_path / "log", *argv, str(tmp_path / "usual")).ended(0)
    assert ends(tmp_path / "small") == ends(tmp_path / "usual")
