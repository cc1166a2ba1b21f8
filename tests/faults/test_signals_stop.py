"""SIGTERM and Ctrl-C save and print how to resume; a second Ctrl-C exits at once."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from kontrast import files
from kontrast.cli import main as cli
from kontrast.data import decode_workers
from kontrast.runs import probe as evaluation
from kontrast.training import checkpoints
from kontrast.training import online_probe as online

from support import kill_storm
from support.commands import TINY, Command, after_step, ends, printed_command, saved_step, steps_logged, until

LONG = [*TINY, "training.max_steps=300", "checkpoints.every=0"]
"""A run without regular checkpoints, so that only the signal saves."""


@pytest.mark.fault(2)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_signal_saves_and_prints_how_to_resume(tmp_path, number, code):
    """The message has the saved step and the command to resume; a checkpoint of that step exists."""
    run = tmp_path / "run"
    command = Command(tmp_path / "log", *LONG, "--out", str(run))
    until(steps_logged(run, 2))
    command.send(number)
    said = command.ended(code)
    assert (run / "checkpoints" / f"step-{saved_step(said):08d}" / "manifest.json").exists()
    command_to_resume = printed_command(said)
    assert shlex.split(command_to_resume) == ["kontrast", "pretrain", "--resume", "--out", str(run), "--device", "cpu"]
    assert json.loads((run / "run.json").read_text())["resume"] == command_to_resume
    assert not (run / "encoder.safetensors").exists()


SHARDS = [*LONG, "data.pack=false", "training.max_steps=12", "training.epochs=100", "--recipe", "quickstart"]


def train_on_shards(folder: Path, workers: int, out: Path) -> int:
    """Train on shards that `workers` processes decode as needed, in a new process group that then gets SIGTERM."""
    os.setpgid(0, 0)
    after_step(3, lambda: os.killpg(0, signal.SIGTERM))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: max(1, workers)])
    return cli.run(["pretrain", str(folder), *SHARDS, "--device", "cpu", "--no-probes", "--out", str(out)])


@pytest.mark.fault(2)
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_sigterm_to_the_whole_group(tmp_path, monkeypatch, workers):
    """Exit 75 rather than an error about a killed worker; the resumed run ends bit-equal."""
    if workers > len(os.sched_getaffinity(0)):
        pytest.skip("needs two cores: with one, images are decoded in the process itself")
    _, shards = kill_storm.make_pictures(tmp_path)
    run, whole = tmp_path / "run", tmp_path / "whole"
    said = Command(tmp_path / "log", instead=partial(train_on_shards, shards, workers, run)).ended(75)
    assert saved_step(said) >= 3
    monkeypatch.setattr(decode_workers, "usable_cores", lambda: 1)  # the same bits without processes
    Command(tmp_path / "log", "--resume", "--out", str(run)).ended(0)
    Command(tmp_path / "log", str(shards), *SHARDS, "--out", str(whole)).ended(0)
    assert ends(run) == ends(whole)


TWO_EPOCHS = [*LONG, "--recipe", "quickstart", "training.batch=32", "training.epochs=2", "evaluation.every=1"]
"""Two steps per epoch of the pictures."""


def train_with_a_slow_probe(pictures: Path, out: Path, where: str) -> int:
    """Train, with an evaluation or with probes that take an hour."""

    def sleep(*_: object, **__: object) -> None:
        (out / "probing").write_text("")
        for _ in range(360_000):
            time.sleep(0.01)

    if where == "evaluation":
        online.knn = sleep
    else:
        evaluation.DEFAULT_PROBES, evaluation.PROBES["knn"] = ("knn",), sleep
    return cli.run(["pretrain", str(pictures), *TWO_EPOCHS, "--out", str(out), "--device", "cpu"])


@pytest.mark.fault(2)
@pytest.mark.parametrize(
    ("where", "number", "code"),
    [
        ("evaluation", signal.SIGTERM, 75),
        ("probes", signal.SIGTERM, 75),
        pytest.param("evaluation", signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param("probes", signal.SIGINT, 130, marks=pytest.mark.slow),
    ],
)
def test_signal_interrupts_evaluation_and_probes(tmp_path, where, number, code):
    """Exit 75 at once, with the command to resume; the interrupted evaluation is repeated."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    pictures, _ = kill_storm.make_pictures(tmp_path)
    command = Command(tmp_path / "log", instead=partial(train_with_a_slow_probe, pictures, run, where))
    until((run / "probing").exists)
    command.send(number)
    said = command.ended(code)
    if where == "probes":
        assert printed_command(said).startswith(f"kontrast probe {run}")
        assert (run / "encoder.safetensors").exists() and not (run / "probes.json").exists()
        return
    assert printed_command(said).startswith("kontrast pretrain --resume")
    Command(tmp_path / "log", "--resume", "--out", str(run)).ended(0)
    Command(tmp_path / "log", str(pictures), *TWO_EPOCHS, "--out", str(whole)).ended(0)
    assert ends(run) == ends(whole)


def train_with_slow_saves(out: Path, seconds: float, after: str = "") -> int:
    """Train with slow saves, once the file `after` exists; the file `saving` shows that a save has begun."""
    sync = files.sync

    def slow(path: Path) -> None:
        if "step-" in str(path) and (out / after).exists():
            (out / "saving").write_text("")
            due = time.monotonic() + seconds / 4
            while time.monotonic() < due:
                time.sleep(0.01)
        sync(path)

    files.sync = slow
    argv = [*LONG, "checkpoints.every=0.02", "--out", str(out)]
    return cli.run(["pretrain", *argv, "--device", "cpu", "--no-probes"])


@pytest.mark.fault(3)
@pytest.mark.parametrize(
    "numbers",
    [(15, 15), pytest.param((15, 2), marks=pytest.mark.slow), pytest.param((2, 15), marks=pytest.mark.slow)],
)
def test_second_sigterm_lets_the_save_finish(tmp_path, numbers):
    """Exit 75 or 130 with the saved step, whose checkpoint is complete."""
    run = tmp_path / "run"
    command = Command(tmp_path / "log", instead=partial(train_with_slow_saves, run, 1.0))
    until((run / "saving").exists)
    for number in numbers:
        command.send(number)
        time.sleep(0.1)
    said = command.ended(130 if numbers[-1] == signal.SIGINT else 75)
    step = saved_step(said)
    assert checkpoints.load(run / "checkpoints" / f"step-{step:08d}")[1]["step"] == step


@pytest.mark.fault(3)
def test_second_ctrl_c_during_the_save_exits_at_once(tmp_path):
    """Exit 130 without finishing the save; the previous checkpoint is intact, and resuming removes the partial one."""
    run = tmp_path / "run"
    command = Command(tmp_path / "log", instead=partial(train_with_slow_saves, run, 3600.0, "slow"))
    until(lambda: list((run / "checkpoints").glob("step-*")))
    (run / "slow").touch()
    until((run / "saving").exists)
    saved = list((run / "checkpoints").glob("step-*"))
    command.send(signal.SIGINT)
    time.sleep(0.05)
    command.send(signal.SIGINT)
    assert command.wait() == 130 and list((run / "checkpoints").glob("step-*")) == saved
    assert checkpoints.newest(run / "checkpoints", pytest.fail) is not None
    Command(tmp_path / "log", "--resume", "training.max_steps=20", "--out", str(run)).ended(0)
    assert not list((run / "checkpoints").glob(".*"))


@pytest.mark.fault(3)
def test_second_ctrl_c_exits_inside_a_long_step(tmp_path):
    """Exit 130 in the middle of the step; the first Ctrl-C would wait for its end."""
    run = tmp_path / "run"
    slow = ["encoder.width=512", "views.size=64", "training.batch=1024", "training.epochs=1", "evaluation.every=0"]
    command = Command(tmp_path / "log", *slow, "--out", str(run))
    until((run / "recipe.toml").exists)
    time.sleep(1.0)
    command.send(signal.SIGINT)
    time.sleep(0.2)
    command.send(signal.SIGINT)
    assert command.wait() == 130 and not list((run / "checkpoints").glob("step-*"))


@pytest.mark.fault(2)
def test_sigterm_before_training(tmp_path):
    """Exit 75; either no folder, or a run that was saved."""
    run = tmp_path / "run"
    command = Command(tmp_path / "log", *LONG, "--out", str(run))
    until((run / "checkpoints").exists)
    command.send(signal.SIGTERM)
    said = command.ended(75)
    assert run.exists() or "same command" in said


@pytest.mark.fault(2)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_signal_during_imports(tmp_path, number, code):
    """Exit 75 or 130 and one line, without a traceback or a run folder."""
    # Short sleeps: a signal that comes just before a sleep is handled after it.
    (tmp_path / "typer.py").write_text(
        "import pathlib, time\npathlib.Path(__file__).with_name('importing').touch()\nwhile True: time.sleep(0.01)\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(Path(cli.__file__).parents[2])])
    argv = [sys.executable, "-m", "kontrast", "pretrain", "--out", str(tmp_path / "run")]
    command = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths})
    until((tmp_path / "importing").exists)
    command.send_signal(number)
    _, said = command.communicate()
    assert command.returncode == code and said.startswith("kontrast: stopped") and said.count("\n") == 1
    assert not (tmp_path / "run").exists()


ENDED = """
import atexit, os, signal, sys
from kontrast.__main__ import main
atexit.register(os.kill, os.getpid(), int(sys.argv.pop()))
main()
"""


@pytest.mark.fault(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_after_the_end_changes_nothing(number):
    """The result and its exit code stay."""
    argv = [sys.executable, "-c", ENDED, "--version", str(int(number))]
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2]), "PYTHONUNBUFFERED": ""}
    done = subprocess.run(argv, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout


@pytest.mark.slow
@pytest.mark.fault(2)
def test_printed_command_resumes(tmp_path):
    """The command can be pasted, and it finishes the run."""
    run = tmp_path / "a run"
    argv = [sys.executable, "-m", "kontrast", "pretrain", *LONG, "--no-probes", "--out", str(run)]
    command = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    until(steps_logged(run, 1))
    command.send_signal(signal.SIGTERM)
    _, said = command.communicate()
    assert command.returncode == 75, said
    resume = shlex.split(printed_command(said))[1:]
    again = [sys.executable, "-m", "kontrast", *resume, "--no-probes", "training.max_steps=60"]
    assert subprocess.run(again).returncode == 0
