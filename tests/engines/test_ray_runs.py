"""Training and embedding on a Ray cluster of this machine equal those without Ray, also after failures and signals."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support import tiny_run
from support.command_line import TINY, one_line

pytest.importorskip("ray")
pytestmark = pytest.mark.integration

OPTIONS = [*TINY, "training.max_steps=20", "training.log_every=1", "checkpoints.every=0.01", "--device", "cpu"]
RAY = ["--engine", "ray", "--workers", "2"]
FAILING = """
import os, signal
from kontrast.training.loop import Loop

inner = Loop.take_step

def take(self, batch):
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
    if (rank, self.position.step) == ("1", 10) and attempt < int(os.environ["KONTRAST_TEST_FAILURES"]):
        os.kill(os.getpid(), signal.SIGKILL)
    inner(self, batch)

Loop.take_step = take
"""
MISTAKEN = """
from kontrast.training.loop import Loop

def take(self, batch):
    return {}["nowhere"]

Loop.take_step = take
"""


def command(*arguments: str, start: tuple[str, ...] = (), **options) -> subprocess.Popen[str]:
    """Start the command in a process of its own."""
    words = [sys.executable, *start, "-m", "kontrast", *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    options["env"] = {**os.environ, "OMP_NUM_THREADS": "1"} | options.get("env", {})
    return subprocess.Popen(words, **options)


def done(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Wait for a command, and check that it leaves nothing beside the run folder."""
    out, error = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)


def digest(run: Path) -> str:
    return hashlib.sha256((run / "encoder.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory) -> str:
    """The digest of an encoder that two ranks of torchrun trained."""
    run = tmp_path_factory.mktemp("torchrun") / "run"
    start = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d")
    start += ("--rdzv-endpoint", "127.0.0.1:0")
    finished = done(command("pretrain", *OPTIONS, "--no-probes", "--out", run, start=start))
    assert finished.returncode == 0, finished.stderr
    return digest(run)


def test_two_workers_train_like_two_ranks_of_torchrun(under_torchrun, tmp_path):
    """Standard output is one line of JSON, with the probes of the first rank; nothing but the run folder is left."""
    finished = done(command("pretrain", *OPTIONS, *RAY, "--out", tmp_path / "run", "--json"))
    assert finished.returncode == 0, finished.stderr
    facts = json.loads(finished.stdout)
    assert facts["run"] == str(tmp_path / "run") and {p["probe"] for p in facts["probes"]} == {"knn", "linear"}
    assert digest(tmp_path / "run") == under_torchrun
    assert os.listdir(tmp_path) == ["run"]
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["world"] == 2 and about["command"].startswith("kontrast pretrain training.epochs=1")


def test_a_killed_worker_is_restarted_to_the_same_weights(under_torchrun, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    arguments = ["--import", tmp_path / "failing.py", "pretrain", *OPTIONS, *RAY, "--no-probes"]
    one_failure = {"env": {"KONTRAST_TEST_FAILURES": "1"}}
    finished = done(command(*arguments, "--out", tmp_path / "run", **one_failure))
    assert finished.returncode == 0, finished.stderr
    assert "a worker failed: restart 1 of 3" in finished.stderr and "resuming from step" in finished.stderr
    assert digest(tmp_path / "run") == under_torchrun
    refused = done(command(*arguments, "--max-restarts", "0", "--out", tmp_path / "other", **one_failure))
    one_line(refused, 6, "without --max-restarts", "Resume with: kontrast", "--engine ray --workers 2")


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_stops_the_run_and_the_printed_command_resumes_it(under_torchrun, tmp_path, number, code):
    run = tmp_path / "run"
    endless = [*OPTIONS, "training.max_steps=100000", "training.epochs=1000"]
    process = command("pretrain", *endless, *RAY, "--no-probes", "--out", run)
    while process.poll() is None and not ((run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size):
        time.sleep(0.05)
    process.send_signal(number)
    stopped = done(process)
    one_line(stopped, code, "stopped and saved at step", "resume with: kontrast pretrain --resume", *RAY)
    step = int(re.search(r"saved at step (\d+)", stopped.stderr)[1])
    again = re.search("resume with: kontrast (.*)", stopped.stderr)[1].split()
    resumed = done(command(*again, "--no-probes", f"training.max_steps={step + 3}"))
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming from step {step}" in resumed.stderr and "not bit-exact" not in resumed.stderr


def test_errors_of_workers_are_those_of_the_command(tmp_path):
    """One line and the exit code, without a traceback of Ray; a wrong recipe leaves no run folder."""
    refused = done(command("pretrain", *OPTIONS, *RAY, "training.batch=15", "--out", tmp_path / "run"))
    one_line(refused, 2, "a batch of 15 can't be shared by 2 ranks")
    (tmp_path / "mistaken.py").write_text(MISTAKEN)
    mistaken = ["--import", tmp_path / "mistaken.py", "pretrain", *OPTIONS, *RAY, "--max-restarts", "0"]
    one_line(done(command(*mistaken, "--out", tmp_path / "run")), 2, "mistaken.py, line 5: KeyError: 'nowhere'")
    assert sorted(os.listdir(tmp_path)) == ["mistaken.py", "run"]


def test_an_embedding_equals_that_of_one_process(tmp_path):
    """Nothing beside the data is imported by the workers."""
    (tmp_path / "numpy.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
    run, images = tiny_run.trained(), tiny_run.images()
    for name in ("vectors.npy", "vectors.parquet"):
        for folder, options in (("alone", []), ("ray", RAY)):
            (tmp_path / folder).mkdir(exist_ok=True)
            arguments = ["embed", run, images, "--out", tmp_path / folder / name, "--device", "cpu", "--json"]
            finished = done(command(*arguments, *options, cwd=tmp_path))
            assert finished.returncode == 0, finished.stderr
            assert json.loads(finished.stdout)["images"] == tiny_run.IMAGES
        assert (tmp_path / "ray" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    assert sorted(os.listdir(tmp_path / "ray")) == ["vectors.names.jsonl", "vectors.npy", "vectors.parquet"]
    assert not (tmp_path / "canary").exists()


def test_a_cluster_that_does_not_answer_is_one_line(tmp_path):
    absent = {"env": {"RAY_ADDRESS": "127.0.0.1:9"}}
    refused = done(command("pretrain", *OPTIONS, *RAY, "--out", tmp_path / "run", **absent))
    one_line(refused, 6, "no Ray cluster answers at RAY_ADDRESS=127.0.0.1:9")
    assert not os.listdir(tmp_path)
