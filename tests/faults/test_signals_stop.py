"""Being asked to stop: SIGTERM and Ctrl-C save and say how to go on; a second Ctrl-C leaves at once."""

from __future__ import annotations

import json
import os
import re
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
from kontrast.runs import probe as evaluation
from kontrast.training import checkpoints
from kontrast.training import online_probe as online

from support import kill_storm
from support.commands import TINY, Command, ends, steps_logged, until

LONG = [*TINY, "training.max_steps=300", "checkpoints.every=0"]
"""Without checkpoints of its own, so that what is saved was saved by the signal."""


@pytest.mark.fault(2)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, number, code):
    """Seen: the step it was saved at and the command to go on. Remains: a checkpoint of that very step."""
    run = tmp_path / "run"
    command = Command(tmp_path / "log", *LONG, "--out", str(run))
    until(steps_logged(run, 2))
    command.send(number)
    said = command.ended(code)
    told = re.search(r"stopped and saved at step (\d+) of 300; go on with: (kontrast pretrain .*)", said)
    assert told, said
    assert (run / "checkpoints" / f"step-{int(told[1]):08d}" / "manifest.json").exists()
    assert shlex.split(told[2]) == ["kontrast", "pretrain", "--resume", "--out", str(run), "--device", "cpu"]
    assert json.loads((run / "run.json").read_text())["resume"] == told[2]
    assert not (run / "encoder.safetensors").exists()


SHARDS = [*LONG, "data.pack=false", "training.max_steps=100", "training.epochs=100", "--recipe", "quickstart"]


def shards_run(folder: Path, workers: int, out: Path) -> int:
    """Train on shards that are decoded as they are needed, in a process group of its own, by so many processes."""
    os.setpgid(0, 0)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: max(1, workers)])
    return cli.run(["pretrain", str(folder), *SHARDS, "--device", "cpu", "--no-probes", "--out", str(out)])


@pytest.mark.fault(2)
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_sigterm_to_the_whole_group_saves_and_the_rest_is_the_same(tmp_path, workers):
    """Seen: exit 75, not that a worker was killed. Remains: a run that ends with the bits of an undisturbed one."""
    if workers > len(os.sched_getaffinity(0)):
        pytest.skip("needs two cores: with one, images are decoded in the process itself")
    _, shards = kill_storm.make_pictures(tmp_path)
    run, whole = tmp_path / "run", tmp_path / "whole"
    command = Command(tmp_path / "log", instead=partial(shards_run, shards, workers, run))
    until(steps_logged(run, 2))
    os.killpg(command.process, signal.SIGTERM)
    assert "stopped and saved at step" in command.ended(75)
    Command(tmp_path / "log", "--resume", "--out", str(run)).ended(0)
    Command(tmp_path / "log", str(shards), *SHARDS, "--out", str(whole)).ended(0)
    assert ends(run) == ends(whole)


def slow_probe(out: Path, where: str) -> int:
    """Train; the evaluation at an epoch's end, or the probes after training, then take a minute."""

    def sleep(*_: object, **__: object) -> None:
        (out / "probing").write_text("")
        for _ in range(6000):
            time.sleep(0.01)

    if where == "evaluation":
        online.knn = sleep
    else:
        evaluation.USUAL, evaluation.PROBES["knn"] = ("knn",), sleep
    argv = [*LONG, "training.batch=512", "training.max_steps=4", "evaluation.every=1", "--out", str(out)]
    return cli.run(["pretrain", *argv, "--device", "cpu"])


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
def test_a_signal_cuts_an_evaluation_and_the_probes(tmp_path, where, number, code):
    """Seen: exit 75 at once and how to go on. Remains: the step, or the whole run; the evaluation is made up for."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    command = Command(tmp_path / "log", instead=partial(slow_probe, run, where))
    until((run / "probing").exists)
    begin = time.monotonic()
    command.send(number)
    said = command.ended(code)
    assert time.monotonic() - begin < 10
    if where == "probes":
        assert f"go on with: kontrast probe {run}" in said
        assert (run / "encoder.safetensors").exists() and not (run / "probes.json").exists()
        return
    assert "go on with: kontrast pretrain --resume" in said
    Command(tmp_path / "log", "--resume", "--out", str(run)).ended(0)
    argv = [*LONG, "training.batch=512", "training.max_steps=4", "evaluation.every=1", "--out", str(whole)]
    Command(tmp_path / "log", *argv).ended(0)
    assert ends(run) == ends(whole)


def slow_save(out: Path, seconds: float) -> int:
    """Train; a checkpoint's writing takes so long, and a file says that it began."""
    sync = files.sync

    def slow(path: Path) -> None:
        if "step-" in str(path):
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
def test_a_second_signal_during_the_save_lets_it_finish(tmp_path, numbers):
    """Seen: exit 75 or 130 and where it was saved. Remains: that checkpoint, whole."""
    run = tmp_path / "run"
    command = Command(tmp_path / "log", instead=partial(slow_save, run, 1.0))
    until((run / "saving").exists)
    for number in numbers:
        command.send(number)
        time.sleep(0.1)
    said = command.ended(130 if numbers[-1] == signal.SIGINT else 75)
    step = int(re.search(r"stopped and saved at step (\d+) of", said)[1])
    assert checkpoints.load(run / "checkpoints" / f"step-{step:08d}")[1]["step"] == step


@pytest.mark.fault(3)
def test_a_second_ctrl_c_during_the_save_leaves_at_once(tmp_path):
    """Seen: exit 130 within the second. Remains: the checkpoint before, whole; the torn one is swept on resuming."""
    run = tmp_path / "run"
    command = Command(tmp_path / "log", instead=partial(slow_save, run, 1.0))
    until(lambda: list((run / "checkpoints").glob("step-*")))
    (run / "saving").unlink(missing_ok=True)
    until((run / "saving").exists)
    command.send(signal.SIGINT)
    time.sleep(0.05)
    begin = time.monotonic()
    command.send(signal.SIGINT)
    assert command.wait() == 130 and time.monotonic() - begin < 1.0
    assert checkpoints.newest(run / "checkpoints", pytest.fail) is not None
    Command(tmp_path / "log", "--resume", "training.max_steps=20", "--out", str(run)).ended(0)
    assert not list((run / "checkpoints").glob(".*"))


@pytest.mark.fault(3)
def test_a_second_ctrl_c_leaves_at_once_inside_one_long_step(tmp_path):
    """Seen: exit 130 at the second. Remains: the folder as it was; the first does not wait for the step's end."""
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


@pytest.mark.fault(2)
def test_sigterm_before_training_leaves_no_run(tmp_path):
    """Seen: exit 75 and that training had not begun. Remains: no folder, or a run that was saved."""
    run = tmp_path / "run"
    command = Command(tmp_path / "log", *LONG, "--out", str(run))
    until((run / "checkpoints").exists)
    command.send(signal.SIGTERM)
    said = command.ended(75)
    assert run.exists() or "stopped before training began; run the same command again" in said


@pytest.mark.fault(2)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_while_the_program_still_imports_is_one_line(tmp_path, number, code):
    """Seen: exit 75 or 130 and one line, no traceback of an import. Remains: nothing."""
    (tmp_path / "typer.py").write_text(
        "import pathlib, time\npathlib.Path(__file__).with_name('importing').touch()\ntime.sleep(60)\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(Path(cli.__file__).parents[1])])
    argv = [sys.executable, "-m", "kontrast", "pretrain", "--out", str(tmp_path / "run")]
    command = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths})
    until((tmp_path / "importing").exists)
    command.send_signal(number)
    _, said = command.communicate(timeout=30)
    assert (command.returncode, said) == (code, "kontrast: stopped; give the same command again\n")
    assert not (tmp_path / "run").exists()


ENDED = """
import atexit, os, signal, sys
from kontrast.cli import main
atexit.register(os.kill, os.getpid(), int(sys.argv.pop()))
main()
"""


@pytest.mark.fault(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_the_end_changes_nothing(number):
    """Seen: the result and its exit code, which came before the signal."""
    argv = [sys.executable, "-c", ENDED, "--version", str(int(number))]
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    done = subprocess.run(argv, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout


@pytest.mark.slow
@pytest.mark.fault(2)
def test_the_printed_command_works_as_printed(tmp_path):
    """Seen: a command that can be pasted. Remains: a run that it finishes."""
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
