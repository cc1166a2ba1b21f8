"""Let ranks fail under torchrun and compare what the restarted jobs end with.

    PYTHONPATH=src:tests python tests/support/rank_storm.py --failures 20 --log FILE

Each job has two gloo ranks under `torchrun --max-restarts`. One of them is killed, raises, hangs (SIGSTOP) or gets a
NaN at a random step. torchrun starts both again, they resume by themselves, and the end is compared byte for byte with
that of an undisturbed job. The log has one line per failure; the exit code is 0 if all are equal.

With `--rank` this script is one of those ranks: the real command, with the failure built in.
"""

from __future__ import annotations

import argparse
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
FAILURES = ("kill", "exception", "hang", "nan")
TIMEOUT = 5


def be_a_rank(how: str, who: int, step: int, out: str) -> int:
    """Run the command; in torchrun's first attempt rank `who` fails at step `step`."""
    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == 0 and int(os.environ["RANK"]) == who:
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
        code, said, seconds = self.job("none", 0, 0, folder / "whole")
        assert code == 0, said
        self.whole = ends(folder / "whole")
        self.say(f"undisturbed, {seconds:.0f} s: {' '.join(f'{k} {v}' for k, v in self.whole.items())}")

    def job(self, how: str, who: int, step: int, out: Path) -> tuple[int, str, float]:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--monitor-interval", "0.1"]
        command += [__file__, "--rank", how, str(who), str(step), str(out)]
        environment = {**os.environ, "KONTRAST_RANK_TIMEOUT": str(TIMEOUT), "OMP_NUM_THREADS": "1"}
        begin = time.monotonic()
        done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        return done.returncode, done.stderr, time.monotonic() - begin

    def fail(self, how: str) -> None:
        self.failures += 1
        who, step = self.chance.randrange(2), self.chance.randrange(5, STEPS - 5)
        out = self.folder / f"run-{self.failures}"
        code, said, seconds = self.job(how, who, step, out)
        resumed = [int(n) for n in re.findall(r"from step (\d+)", said)]
        mine = ends(out) if code == 0 else {}
        wrong = [f"{what} differs" for what in self.whole if mine.get(what) != self.whole[what]]
        wrong += [] if resumed else ["it did not resume"]
        self.unequal += [f"{self.failures}, {how}: {'; '.join(wrong)}: {said[-1500:]}"] if wrong else []
        words = "bit-equal" if not wrong else "; ".join(wrong)
        what = f"{self.failures:>3}  {how:<10} rank {who} at step {step:>2} of {STEPS}"
        self.say(f"{what}, resumed from {resumed}, exit {code}, {seconds:.0f} s: {words}")
        shutil.rmtree(out, ignore_errors=True)


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

    say(f"# {time.strftime('%Y-%m-%d')}: python tests/support/rank_storm.py --failures {asked.failures}")
    say(f"# kontrast {__version__}, torch {torch.__version__}, Python {platform.python_version()}, 2 gloo ranks, CPU")
    folder = Path(tempfile.mkdtemp(prefix="rank-storm-"))
    try:
        storm = Storm(folder, asked.seed, say)
        for number in range(asked.failures):
            storm.fail(FAILURES[number % len(FAILURES)])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    say(f"{storm.failures} failures, {storm.failures - len(storm.unequal)} resumed by themselves to equal bits")
    for line in storm.unequal:
        print(line, file=sys.stderr)
    return int(bool(storm.unequal))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        torch.set_num_threads(1)
        sys.exit(be_a_rank(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]))
    sys.exit(main())
