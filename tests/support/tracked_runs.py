"""Tiny runs with trackers, killed and resumed, and what metrics.jsonl says of them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from kontrast.cli.main import run
from kontrast.files import read_json_lines

from support.commands import TINY, Command, after_step

OWN = str(Path(__file__).parent / "recording_trackers.py")
"""A file for `--import` with trackers for tests."""
STEPS = 24
SHORT = [
    *TINY, f"training.max_steps={STEPS}", "training.epochs=2", "training.log_every=2", "evaluation.every=0",
    "checkpoints.every=0.02", "--recipe", "quickstart",
]  # fmt: skip


def recorded(run: Path, name: str = "recording") -> list[dict]:
    return read_json_lines(run / f"{name}.jsonl") if (run / f"{name}.jsonl").exists() else []


def numbers_by_step(lines: list[dict]) -> list[tuple[int, dict[str, float]]]:
    """Return what records of metrics.jsonl say, step by step, in the form in which a tracker gets it."""
    steps: dict[int, dict[str, float]] = {}
    for line in lines:
        steps.setdefault(line["step"], {}).update({k: v for k, v in line.items() if k != "step"})
    return list(steps.items())


def pretrain(place: Path, *options: str, code: int = 0, instead=None) -> tuple[Path, str]:
    run = place / "run"
    command = Command(place / "log", *SHORT, *options, "--out", str(run), instead=instead)
    assert command.wait() == code, command.said
    return run, command.said


def logged(run: Path) -> list[tuple[int, dict[str, float]]]:
    return numbers_by_step(read_json_lines(run / "metrics.jsonl"))


def received(run: Path, name: str = "recording") -> list[tuple[int, dict[str, float]]]:
    """Return what a recording tracker was given, step by step, in the form of `logged`; each number may come once."""
    steps: dict[int, dict[str, float]] = {}
    for line in recorded(run, name):
        if "numbers" in line:
            have = steps.setdefault(line["step"], {})
            assert not set(have) & set(line["numbers"]), f"step {line['step']} came twice"
            have.update(line["numbers"])
    return list(steps.items())


def wait_for_trackers(run: Path, name: str, processes: int) -> None:
    """Wait until so many processes of a tracker have closed it: they outlive the training that was killed."""
    due = time.monotonic() + 600
    while sum("closed" in line for line in recorded(run, name)) < processes:
        assert time.monotonic() < due
        time.sleep(0.01)


def kill_after(step: int, place: Path, *options: str) -> None:
    """Train until the process kills itself after a step."""

    def work() -> int:
        after_step(step, lambda: os.kill(os.getpid(), signal.SIGKILL))
        return run(["pretrain", "--device", "cpu", "--no-probes", *SHORT, *options, "--out", str(place / "run")])

    pretrain(place, code=-signal.SIGKILL, instead=work)
