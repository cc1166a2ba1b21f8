"""Terminals that go away or can't show much, and a clock that goes back."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from kontrast.cli import main as cli
from kontrast.files import read_json_lines

from support import kill_storm
from support.commands import TINY, Command

SHORT = [*TINY, "training.max_steps=6", "training.log_every=1", "--device", "cpu", "--no-probes"]


def close_streams(argv: list[str], *streams: int) -> int:
    """Run with closed streams, as a shell does with `>&-`."""
    for number in streams:
        os.close(number)
        if number == 1:
            sys.stdout = None
        else:
            sys.stderr = None
    return cli.run(argv)


def break_streams(argv: list[str], *streams: int) -> int:
    """Run with streams whose reader is gone, as after `| head -0`."""
    read, write = os.pipe()
    os.close(read)
    for number in streams:
        os.dup2(write, number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    return cli.run(argv)


@pytest.mark.fault(40)
@pytest.mark.parametrize(
    ("way", "streams"),
    [
        (close_streams, (1, 2)),
        (break_streams, (1,)),
        (break_streams, (2,)),
        pytest.param(close_streams, (1,), marks=pytest.mark.slow),
        pytest.param(close_streams, (2,), marks=pytest.mark.slow),
        pytest.param(break_streams, (1, 2), marks=pytest.mark.slow),
    ],
)
def test_closed_or_broken_streams(tmp_path, way, streams):
    """No traceback, and the complete run: training doesn't stop because nobody reads its output."""
    run = tmp_path / "run"
    command = Command(tmp_path / "log", instead=partial(way, ["pretrain", *SHORT, "--out", str(run)], *streams))
    assert command.wait() == 0, command.said
    assert "Traceback" not in command.said and (run / "encoder.safetensors").exists()
    assert len(read_json_lines(run / "metrics.jsonl")) == 7


def on_a_terminal(argv: list[str], environment: dict[str, str]) -> tuple[int, bytes]:
    """Return the exit code and what a terminal received."""
    leader, follower = pty.openpty()
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", **environment}
    command = [sys.executable, "-m", "kontrast", *argv]
    process = subprocess.Popen(command, stdout=follower, stderr=follower, stdin=follower, env=variables)
    os.close(follower)
    seen = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:
            break
        if not part:
            break
        seen += part
    os.close(leader)
    return process.wait(), seen


@pytest.mark.fault(40)
def test_plain_terminal_gets_ascii_without_colors(tmp_path):
    """With LANG=C and NO_COLOR the progress bar is ASCII without colors; the run folder may have a strange name."""
    run = tmp_path / "rün ✓"
    plain = {"LANG": "C", "LC_ALL": "C", "NO_COLOR": "1", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    pictures, _ = kill_storm.make_pictures(tmp_path)
    code, seen = on_a_terminal(["pretrain", str(pictures), "--recipe", "quickstart", *SHORT, "--out", str(run)], plain)
    assert code == 0, seen
    assert b"Traceback" not in seen and b"train" in seen
    assert max(seen) < 128
    assert b"\x1b[3" not in seen and b"\x1b[9" not in seen
    assert (run / "encoder.safetensors").exists()


def with_a_clock_that_goes_back(argv: list[str]) -> int:
    """Run while the wall clock loses an hour per reading."""
    begin, readings = time.time(), [0]

    def back() -> float:
        readings[0] += 1
        return begin - 3600.0 * readings[0]

    time.time = back
    return cli.run(argv)


@pytest.mark.fault(40)
def test_clock_that_goes_back(tmp_path):
    """Durations and rates stay positive, since they come from the monotonic clock."""
    run: Path = tmp_path / "run"
    argv = ["pretrain", *SHORT, "--out", str(run)]
    Command(tmp_path / "log", instead=partial(with_a_clock_that_goes_back, argv)).ended(0)
    assert 0 < json.loads((run / "run.json").read_text())["seconds"] < 1800  # the clock loses an hour per reading
    speeds = read_json_lines(run / "speed.jsonl")
    assert speeds and all(line["images_per_second"] > 0 for line in speeds)
    assert speeds[0]["time"] > speeds[-1]["time"]  # the clock did go back
