"""Decoding processes that are killed or hang, and a machine with hardly any shared memory."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kontrast.cli import main as cli
from kontrast.data import byte_source
from kontrast.data import decode_workers as workers
from kontrast.data import store_writer as packing
from kontrast.data.decode import PLAIN
from kontrast.data.listing import Item, scan_folder

from support import kill_storm
from support.commands import (
    TINY,
    Command,
    after_step,
    children_of,
    ends,
    resumed_step,
    saved_step,
    steps_logged,
    until,
)

LONG = [*TINY, "data.pack=false", "training.epochs=500", "training.log_every=1", "checkpoints.every=0"]
LONG += ["--recipe", "quickstart"]
two_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="with one core images are decoded in the process itself"
)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return kill_storm.make_pictures(tmp_path)[1]


def train_and_kill_workers(argv: list[str]) -> int:
    """Train, and kill all decoding processes after the third step."""
    after_step(3, lambda: [os.kill(child, signal.SIGKILL) for child in children_of(os.getpid())])
    return cli.run(["pretrain", *argv, "--device", "cpu", "--no-probes"])


@two_cores
@pytest.mark.fault(24)
def test_killed_decoding_process(shards, tmp_path, monkeypatch):
    """Exit 6 with the signal; the last step is saved, and the resumed run ends bit-equal."""
    run, argv = tmp_path / "run", [str(shards), *LONG, "training.max_steps=24", "--out"]
    said = Command(tmp_path / "log", instead=partial(train_and_kill_workers, [*argv, str(run)])).ended(6)
    assert "signal 9" in said and "cores" in said
    step = saved_step(said)
    assert [p.name for p in (run / "checkpoints").iterdir()] == [f"step-{step:08d}"]
    monkeypatch.setattr(workers, "usable_cores", lambda: 1)  # the same bits without processes
    assert resumed_step(Command(tmp_path / "log", "--resume", "--out", str(run)).ended(0)) == step
    Command(tmp_path / "log", *argv, str(tmp_path / "whole")).ended(0)
    assert ends(run) == ends(tmp_path / "whole")


def run_impatiently(argv: list[str], hung: Path) -> int:
    """Run with a patience of 4 seconds from the moment `hung` exists: starting workers may take longer."""
    workers.IN_PROCESS, packing.CHUNK = 8, 16

    def lose_patience() -> None:
        until(hung.exists)
        os.environ["KONTRAST_STORAGE_TIMEOUT"] = "4"

    threading.Thread(target=lose_patience, daemon=True).start()
    return cli.run(argv)


@two_cores
@pytest.mark.fault(25)
def test_hanging_decoding_process(shards, tmp_path):
    """Exit 6 after the patience (120 s, here 4) with the files in flight; the last step is saved."""
    run = tmp_path / "run"
    argv = ["pretrain", str(shards), *LONG, "--device", "cpu", "--no-probes", "--out", str(run)]
    command = Command(tmp_path / "log", instead=partial(run_impatiently, argv, tmp_path / "hung"))
    until(steps_logged(run, 3))
    stopped = children_of(command.process)
    for child in stopped:
        os.kill(child, signal.SIGSTOP)
    (tmp_path / "hung").touch()
    said = command.ended(6)
    assert re.search(r"\b4 s\b.* \S+\.png \S+ \S+\.png", said), said
    assert list((run / "checkpoints").glob(f"step-*{saved_step(said)}"))
    until(lambda: not any(Path(f"/proc/{child}").exists() for child in stopped))


def run_with_hanging_workers(argv: list[str], hung: Path) -> int:
    start = workers.Worker.__init__

    def stop(self: workers.Worker) -> None:
        start(self)
        self.process.send_signal(signal.SIGSTOP)

    workers.Worker.__init__ = stop
    return run_impatiently(argv, hung)


@two_cores
@pytest.mark.fault(25)
def test_hanging_decoding_process_while_packing(shards, tmp_path):
    """Exit 6 after the patience with the files in flight; the same command continues later."""
    argv = ["pack", str(tmp_path / "pictures"), str(tmp_path / "store")]
    (tmp_path / "hung").touch()
    said = Command(tmp_path / "log", instead=partial(run_with_hanging_workers, argv, tmp_path / "hung")).ended(6)
    assert re.search(r"\b4 s\b.*\.png", said), said
    Command(tmp_path / "log", instead=partial(cli.run, argv)).ended(0)


HEAD = '{"pixels": 0, "sizes": [], "kept": [], "bad": [[0, "slow"]], "notes": {}, "lost": []}'
BUSY = f"""#!{sys.executable}
import sys, time
sys.stdin.readline()
while time.process_time() < 1.5:
    pass
print({HEAD!r})
"""


@pytest.mark.fault(45)
def test_a_decoding_process_that_computes_does_not_hang(shards, tmp_path, monkeypatch):
    """One image may take longer than the patience, on a busy machine for instance: the answer is awaited."""
    items = scan_folder(str(tmp_path / "pictures")).items[:1]
    (tmp_path / "busy.py").write_text(BUSY)
    (tmp_path / "busy.py").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "busy.py"))
    monkeypatch.setattr(byte_source, "PATIENCE", 1.0)
    decoders = workers.Decoders(PLAIN, 2)
    assert workers.wait_for(decoders.submit(items), items, decoders).bad == [[0, "slow"]]
    decoders.close()


@pytest.mark.fault(45)
def test_a_thread_that_computes_does_not_hang(shards, tmp_path, monkeypatch):
    """The same with a single core, on which a thread decodes."""
    items = scan_folder(str(tmp_path / "pictures")).items[:1]

    def compute(*_: object) -> tuple[np.ndarray, str]:
        end = time.thread_time() + 1.0
        while time.thread_time() < end:
            pass
        return np.zeros((3, 1, 1), np.uint8), ""

    monkeypatch.setattr(workers, "decode_file", compute)
    monkeypatch.setattr(byte_source, "PATIENCE", 0.5)
    decoders = workers.Decoders(PLAIN, 1)
    assert workers.wait_for(decoders.submit(items), items, decoders).kept == [0]
    decoders.close()


def stop_longer_than_the_patience(items: list[Item]) -> int:
    """Stop this process, as Ctrl-Z does, while a worker that is stopped too has work."""
    byte_source.PATIENCE = 2.0
    decoders = workers.Decoders(PLAIN, 2)
    decoders.submit(items).result()
    worker = decoders._started[0].process
    worker.send_signal(signal.SIGSTOP)
    until(lambda: is_stopped(worker.pid))
    future = decoders.submit(items)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    return 0 if len(workers.wait_for(future, items, decoders).kept) == len(items) else 1


def is_stopped(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.fault(46)
def test_time_in_which_the_job_was_stopped_does_not_count(shards, tmp_path):
    """Ctrl-Z, a pause longer than the patience, then `fg`: the work goes on."""
    items = scan_folder(str(tmp_path / "pictures")).items[:4]
    command = Command(tmp_path / "log", instead=partial(stop_longer_than_the_patience, items))
    until(lambda: is_stopped(command.process))
    children = children_of(command.process)
    time.sleep(2.5)
    for process in (*children, command.process):
        os.kill(process, signal.SIGCONT)
    command.ended(0)


def train_with_tiny_shared_memory(argv: list[str]) -> int:
    """Train with a /dev/shm of one page, in a namespace of this process alone; 42 if that is not allowed."""
    if ctypes.CDLL(None).unshare(CLONE_NEWNS):
        return 42
    for mount in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", "size=4k", "tmpfs", "/dev/shm"]):
        if subprocess.run(["mount", *mount]).returncode:
            return 42
    return cli.run(argv)


CLONE_NEWNS = 0x20000


@two_cores
@pytest.mark.fault(26)
def test_tiny_shared_memory(shards, tmp_path):
    """Training gives the same bits, since images come through pipes and never through /dev/shm."""
    argv = ["pretrain", str(shards), *LONG, "training.max_steps=4", "--device", "cpu", "--no-probes", "--out"]
    small, usual = (
        Command(tmp_path / name, instead=partial(train, [*argv, str(tmp_path / f"{name}-run")]))
        for name, train in (("small", train_with_tiny_shared_memory), ("usual", cli.run))
    )
    usual.ended(0)
    code = small.wait()
    if code == 42:
        pytest.skip("needs the right to mount over /dev/shm in a namespace of its own (root)")
    assert code == 0, small.said
    assert ends(tmp_path / "small-run") == ends(tmp_path / "usual-run")
