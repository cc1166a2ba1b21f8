"""A run killed at any moment and resumed ends with the bits of a run that was left alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from forked import TINY, Command, steps_logged, until

STORM = Path(__file__).with_name("kill_storm.py")
PLAIN = [*TINY, "training.max_steps=24"]
MOCO = [
    *PLAIN,
    "objective.name=info-nce",
    "teacher.momentum=0.9",
    "teacher.schedule=cosine",
    "teacher.symmetric=false",
    "bank.size=100",
    "batch_norm.kind=split",
    "batch_norm.splits=4",
]
ADAM_SWD = [*PLAIN, "objective.name=swd", "training.optimizer=adamw", "training.lr=0.001", "evaluation.every=1"]


def storm(folder: Path, kills: int, overrides: list[str], seed: int = 0) -> dict:
    command = [sys.executable, str(STORM), str(folder), str(kills), str(seed), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def ends(folder: Path) -> list[bytes]:
    last = sorted((folder / "checkpoints").glob("step-*"))[-1]
    return [
        p.read_bytes() for p in (folder / "encoder.safetensors", folder / "metrics.jsonl", last / "state.safetensors")
    ]


def check(folder: Path, facts: dict, kills: int) -> None:
    whole, killed = ends(folder / "whole"), sorted(folder.glob("killed-*"))
    assert facts["kills"] == kills and killed
    for run in killed:
        for name, mine, theirs in zip(("encoder", "metrics", "checkpoint"), ends(run), whole):
            assert mine == theirs, f"{name} of {run.name} differs"
        assert not list((run / "checkpoints").glob(".*")), "half-written checkpoints were left"


def test_a_run_with_teacher_bank_and_split_batch_norm_killed_four_times(tmp_path):
    facts = storm(tmp_path, 4, MOCO)
    check(tmp_path, facts, 4)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [PLAIN, MOCO, ADAM_SWD], ids=["plain", "teacher and bank", "adamw and swd"])
def test_a_run_killed_twenty_times(tmp_path, overrides):
    facts = storm(tmp_path, 20, overrides, seed=1)
    check(tmp_path, facts, 20)
    assert facts["torn"] >= 3, "too few kills fell inside a checkpoint's writing"


def test_a_damaged_newest_checkpoint_is_named_and_the_older_one_used(tmp_path):
    run = tmp_path / "run"
    assert Command(tmp_path / "log", *PLAIN, "--out", str(run)).wait() == 0
    whole, newest = ends(run), sorted((run / "checkpoints").glob("step-*"))[-1]
    data = bytearray((newest / "state.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "state.safetensors").write_bytes(data)
    again = Command(tmp_path / "log", "--resume", "--out", str(run))
    assert again.wait() == 0, again.said
    assert again.said.count("skipped checkpoint step-00000024: state.safetensors is damaged") == 1
    assert ends(run) == whole


def test_with_every_checkpoint_damaged_resuming_is_refused(tmp_path):
    run = tmp_path / "run"
    assert Command(tmp_path / "log", *PLAIN, "--out", str(run)).wait() == 0
    for path in (run / "checkpoints").glob("step-*/state.json"):
        path.write_text("{}")
    again = Command(tmp_path / "log", "--resume", "--out", str(run))
    assert again.wait() == 4 and "no valid checkpoint" in again.said


def test_a_restarted_rank_goes_on_by_itself(tmp_path):
    """torchrun starts the same command again and counts: no --resume is given."""
    run, argv = tmp_path / "run", [*MOCO, "--recipe", "quickstart", "--out"]
    assert Command(tmp_path / "log", *argv, str(tmp_path / "whole")).wait() == 0
    first = Command(tmp_path / "log", *argv, str(run))
    until(steps_logged(run, 1))
    first.send(9)
    first.wait()
    again = Command(tmp_path / "log", *argv, str(run), environment={"TORCHELASTIC_RESTART_COUNT": "1"})
    assert again.wait() == 0, again.said
    assert "going on from step" in again.said
    assert ends(run) == ends(tmp_path / "whole")


def test_a_restart_before_the_run_began_starts_it(tmp_path):
    command = Command(
        tmp_path / "log", *PLAIN, "--out", str(tmp_path / "run"), environment={"TORCHELASTIC_RESTART_COUNT": "1"}
    )
    assert command.wait() == 0, command.said


@pytest.mark.slow
def test_a_killed_rank_under_torchrun_resumes_to_the_same_bits(tmp_path):
    """Twice as long as it needs to be killed in: the kill falls when some lines are logged."""
    argv = [*MOCO, "training.max_steps=60", "--recipe", "quickstart", "--device", "cpu", "--no-probes"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3"]
    torchrun += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "kontrast"]

    def start(out: Path) -> subprocess.Popen:
        return subprocess.Popen(
            [*torchrun, "pretrain", *argv, "--out", str(out)], stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    assert start(tmp_path / "whole").wait(250) == 0
    job, run = start(tmp_path / "run"), tmp_path / "run"
    until(steps_logged(run, 2), 200)
    pids = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout.split()
    subprocess.run(["kill", "-9", pids[-1]], check=True)
    code, said = job.wait(250), job.stderr.read()
    assert code == 0, said[-2000:]
    assert "going on from step" in said
    assert ends(run) == ends(tmp_path / "whole")
