"""Let ranks fail under torchrun and compare what the restarted jobs end with.

    PYTHONPATH=src:tests python tests/support/rank_storm.py --failures 20 --log FILE

Each job has two gloo ranks under `torchrun --max-restarts`. One of them is killed, raises, hangs (SIGSTOP) or gets a
NaN at a random step, or both are killed at any moment after their start. torchrun starts both again, they resume by
themselves, and the end is compared byte for byte with that of an undisturbed job. Every process of the job must then
have ended. The log has one line per failure; the exit code is 0 if all jobs end so.

With `--rank` this script is one of those ranks: the real command, with the failure built in.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kontrast import __version__
from kontrast.cli import main as cli
from kontrast.training.loop import Loop
from kontrast.training.step import Step

STEPS = 40
ARGUMENTS = [
    "--recipe", "quickstart", "--device", "cpu", "--no-probes", "encoder.width=16", "views.size=16", "head.outputs=16",
    "training.batch=16", "training.epochs=1", f"training.max_steps={STEPS}", "training.log_every=1",
    "evaluation.every=0", "checkpoints.every=0.01", "objective.name=info-nce", "teacher.momentum=0.9", "bank.size=100",
]  # fmt: skip
FAILURES = ("kill", "exception", "hang", "nan", "kill both")
TIMEOUT = 5
PATIENCE = 1800
"""Seconds after which torchrun is taken to have survived its ranks."""


def be_a_rank(how: str, who: int, step: int, out: str) -> int:
    """Run the command; in torchrun's first attempt rank `who` fails at step `step`."""
    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == 0 and int(os.environ["RANK"]) == who and how in FAILURES[:4]:
        inner = Loop.take_step

        def take(self: Loop, batch: object) -> None:
            if self.position.step == step:
                fail(how, self.step)
            inner(self, batch)

        Loop.take_step = take  # type: ignore[method-assign]
    return cli.run(["pretrain", *ARGUMENTS, "--out", out])


def fail(how: str, step: Step) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "exception":
        raise OSError("a failure that nobody foresaw")
    if how == "nan":
        weights = next(iter(step.optimizer.parameters.values()))
        weights.register_hook(lambda gradient: gradient * float("nan"))


class Storm:
    """Lets ranks of jobs in `folder` fail; `say` receives the lines of the log."""

    def __init__(self, folder: Path, seed: int = 0, say: Callable[[str], None] = print):
        self.folder, self.say, self.chance = folder, say, random.Random(seed)
        self.failures, self.unequal = 0, []
        code, said, self.seconds = self.job("none", 0, 0, folder / "whole")
        assert code == 0, said
        self.whole = ends(folder / "whole")
        self.say(f"undisturbed, {self.seconds:.0f} s: {' '.join(f'{k} {v}' for k, v in self.whole.items())}")

    def job(self, how: str, who: int, step: int, out: Path) -> tuple[int, str, float]:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--monitor-interval", "0.1"]
        command += [__file__, "--rank", how, str(who), str(step), str(out)]
        environment = {**os.environ, "KONTRAST_RANK_TIMEOUT": str(TIMEOUT), "OMP_NUM_THREADS": "1"}
        begin, log = time.monotonic(), out.with_suffix(".log")
        with log.open("wb") as file:
            job = subprocess.Popen(command, env=environment, stderr=file, stdout=subprocess.DEVNULL)
        if how == "kill both":
            self.kill_ranks(job, out, self.chance.choice([0, self.chance.randrange(1, STEPS)]))
        try:
            code = job.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            code = -1
        seconds, left = time.monotonic() - begin, processes_of(out)
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        said = f"left running: {left}" if left else ""
        return -1 if left else code, log.read_text(errors="replace") + said, seconds

    def kill_ranks(self, job: subprocess.Popen, out: Path, steps: int) -> None:
        """Kill all ranks of torchrun, after so many steps, or while they start if it is 0."""
        while job.poll() is None and (not children(job.pid) or logged(out) < steps):
            time.sleep(0.01)
        if steps == 0:
            time.sleep(self.chance.uniform(0, 0.4) * self.seconds)
        for rank in children(job.pid) if job.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)

    def fail(self, how: str) -> None:
        self.failures += 1
        who, step = self.chance.randrange(2), self.chance.randrange(5, STEPS - 5)
        out = self.folder / f"run-{self.failures}"
        code, said, seconds = self.job(how, who, step, out)
        resumed = [int(n) for n in re.findall(r"from step (\d+)", said)]
        mine = ends(out) if code == 0 else {}
        wrong = [f"{what} differs" for what in self.whole if mine.get(what) != self.whole[what]]
        wrong += [] if resumed or how == "kill both" else ["it did not resume"]  # there may have been no checkpoint yet
        self.unequal += [f"{self.failures}, {how}: {'; '.join(wrong)}: {said[-1500:]}"] if wrong else []
        words = "bit-equal" if not wrong else "; ".join(wrong)
        where = "both ranks, at any moment" if how == "kill both" else f"rank {who} at step {step:>2} of {STEPS}"
        what = f"{self.failures:>3}  {how:<10} {where}"
        self.say(f"{what}, resumed from {resumed}, exit {code}, {seconds:.0f} s: {words}")
        shutil.rmtree(out, ignore_errors=True)


def children(process: int) -> list[int]:
    lists = Path(f"/proc/{process}/task").glob("*/children")
    return [int(word) for path in lists for word in path.read_text().split()]


def logged(out: Path) -> int:
    """Return how many lines the log of a run has."""
    return (out / "metrics.jsonl").read_bytes().count(b"\n") if (out / "metrics.jsonl").exists() else 0


def processes_of(out: Path) -> list[int]:
    """Return the processes that have the run folder among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if os.fsencode(out) in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def ends(out: Path) -> dict[str, str]:
    """Return the SHA-256 of the files that the recipe determines."""
    last = sorted((out / "checkpoints").glob("step-*"))[-1]
    paths = {"encoder": out / "encoder.safetensors", "checkpoint": last / "state.safetensors"}
    paths["metrics"] = out / "metrics.jsonl"
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Let ranks fail under torchrun, compare bits.")
    parser.add_argument("--failures", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path)
    asked = parser.parse_args()
    file = asked.log.open("w") if asked.log else None

    def say(line: str) -> None:
        print(line, flush=True)
        if file:
            file.write(line + "\n")
            file.flush()

    command = f"python tests/support/rank_storm.py --failures {asked.failures} --seed {asked.seed}"
    say(f"# {time.strftime('%Y-%m-%d')}: {command}")
    say(f"# kontrast {__version__}, torch {torch.__version__}, Python {platform.python_version()}, 2 gloo ranks, CPU")
    folder = Path(tempfile.mkdtemp(prefix="rank-storm-"))
    try:
        storm = Storm(folder, asked.seed, say)
        for number in range(asked.failures):
            storm.fail(FAILURES[number % len(FAILURES)])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    right = storm.failures - len(storm.unequal)
    say(f"{storm.failures} failures, {right} jobs ended by themselves with equal bits and left no process")
    for line in storm.unequal:
        print(line, file=sys.stderr)
    return int(bool(storm.unequal))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        torch.set_num_threads(1)
        sys.exit(be_a_rank(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]))
    sys.exit(main())
