"""Being asked to stop: SIGTERM and Ctrl-C save and say how to go on; a second Ctrl-C leaves at once."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
from forked import TINY, Command, steps_logged, until

LONG = [*TINY, "training.max_steps=300", "checkpoints.every=0"]
"""Without checkpoints of its own, so that what is saved was saved by the signal."""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, number, code):
    run = tmp_path / "run"
    command = Command(tmp_path / "log", *LONG, "--out", str(run))
    until(steps_logged(run, 2))
    command.send(number)
    assert command.wait() == code, command.said
    told = re.search(r"stopped and saved at step (\d+) of 300; go on with: (kontrast pretrain .*)", command.said)
    assert told, command.said
    assert (run / "checkpoints" / f"step-{int(told[1]):08d}" / "manifest.json").exists()
    assert shlex.split(told[2]) == ["kontrast", "pretrain", "--resume", "--out", str(run), "--device", "cpu"]
    assert json.loads((run / "run.json").read_text())["resume"] == told[2]
    assert not (run / "encoder.safetensors").exists()


def test_a_run_that_was_stopped_ends_like_one_that_was_not(tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    argv = [*LONG, "training.max_steps=40", "--out"]
    assert Command(tmp_path / "log", *argv, str(whole)).wait() == 0
    command = Command(tmp_path / "log", *argv, str(run))
    until(steps_logged(run, 1))
    command.send(signal.SIGTERM)
    assert command.wait() == 75, command.said
    assert Command(tmp_path / "log", "--resume", "--out", str(run)).wait() == 0
    for name in ("encoder.safetensors", "metrics.jsonl"):
        assert (run / name).read_bytes() == (whole / name).read_bytes()


def test_a_second_ctrl_c_leaves_at_once(tmp_path):
    """Within a step that takes long, the first is noted and the second does not wait for the step's end."""
    run = tmp_path / "run"
    slow = ["encoder.width=512", "views.size=64", "training.batch=1024", "training.epochs=1", "evaluation.every=0"]
    command = Command(tmp_path / "log", *slow, "--out", str(run))
    until((run / "recipe.toml").exists)
    time.sleep(1.0)
    command.send(signal.SIGINT)
    time.sleep(0.2)
    begin = time.monotonic()
    command.send(signal.SIGINT)
    assert command.wait() == 130
    assert time.monotonic() - begin < 2.0


def test_sigterm_before_training_leaves_no_run(tmp_path):
    run = tmp_path / "run"
    command = Command(tmp_path / "log", *LONG, "--out", str(run))
    until((run / "checkpoints").exists)
    command.send(signal.SIGTERM)
    code = command.wait()
    assert code == 75, command.said
    if not run.exists():
        assert "stopped before training began; run the same command again" in command.said


@pytest.mark.slow
def test_the_printed_command_works_as_printed(tmp_path):
    run = tmp_path / "a run"
    argv = [sys.executable, "-m", "kontrast", "pretrain", *LONG, "--no-probes", "--out", str(run)]
    command = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    until(steps_logged(run, 1), 120)
    command.send_signal(signal.SIGTERM)
    _, said = command.communicate(timeout=60)
    assert command.returncode == 75, said
    told = shlex.split(said.split("go on with: kontrast ")[1])
    again = [sys.executable, "-m", "kontrast", *told, "--no-probes", "training.max_steps=60"]
    assert subprocess.run(again, timeout=200).returncode == 0
    assert (run / "encoder.safetensors").exists()
