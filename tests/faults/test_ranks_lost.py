"""A rank that dies, hangs, goes wrong or has other data: the others name it, and a restarted job resumes."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from kontrast.cli import main as cli
from kontrast.training import signals
from kontrast.training.signals import end_with_launcher
from kontrast.training.step import Step

from support import rank_storm
from support.commands import TINY, Command, free_port, rank_environment, steps_logged, until

LONG = [*TINY, "training.max_steps=400", "training.log_every=1", "--recipe", "quickstart"]


def two_ranks(tmp_path: Path, *argv: str, instead: list | None = None, timeout: str = "120") -> list[Command]:
    """Start two ranks of one job, as torchrun would."""
    port = free_port()
    made = []
    for rank in range(2):
        environment = rank_environment(rank, 2, port) | {"KONTRAST_RANK_TIMEOUT": timeout}
        out = ["--out", str(tmp_path / "run")]
        made.append(
            Command(tmp_path / f"log-{rank}", *argv, *out, environment=environment, instead=instead and instead[rank])
        )
    return made


@pytest.mark.fault(27)
@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_killed_rank(tmp_path, killed):
    """The other rank exits 6 with the number of the lost rank; the newest checkpoint remains."""
    ranks = two_ranks(tmp_path, *LONG)
    until(steps_logged(tmp_path / "run", 9))
    ranks[killed].send(signal.SIGKILL)
    said = ranks[1 - killed].ended(6)
    assert f"rank {killed} of 2" in said
    assert ranks[killed].wait() == -signal.SIGKILL
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.fault(28)
def test_hanging_rank(tmp_path):
    """The other rank exits 6 with its number after the timeout."""
    ranks = two_ranks(tmp_path, *LONG, timeout="3")  # a step takes milliseconds
    until(steps_logged(tmp_path / "run", 9))
    ranks[1].send(signal.SIGSTOP)
    try:
        said = ranks[0].ended(6)
        assert "rank 1 of 2" in said
    finally:
        ranks[1].send(signal.SIGKILL)
        ranks[1].wait()


@pytest.mark.fault(49)
def test_stopped_ranks_print_a_command_that_starts_as_many(tmp_path):
    """Exit 75; the printed command starts torchrun with the right number of ranks."""
    ranks = two_ranks(tmp_path, *LONG)
    until(steps_logged(tmp_path / "run", 3))
    ranks[1].send(signal.SIGTERM)
    said = [rank.ended(75) for rank in ranks]
    command = f"torchrun --nproc-per-node 2 -m kontrast pretrain --resume --out {tmp_path / 'run'} --device cpu"
    assert said[0].strip().endswith(f"resume with: {command}"), said[0]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["resume"] == command


@pytest.mark.slow
@pytest.mark.fault(49)
def test_the_printed_command_resumes_all_ranks(tmp_path):
    """The command that stopped ranks print, given to a shell, trains to the end without a word about ranks."""
    ranks = two_ranks(tmp_path, *LONG)
    until(steps_logged(tmp_path / "run", 3))
    ranks[0].send(signal.SIGTERM)
    command = ranks[0].ended(75).rpartition("resume with: ")[2].strip()
    ranks[1].ended(75)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    again = f"{command} --no-probes training.max_steps=60"
    done = subprocess.run(again, shell=True, capture_output=True, text=True, env={**os.environ, "PATH": path})
    assert done.returncode == 0 and "not bit-exact" not in done.stderr, done.stderr[-2000:]


def launch(rank: partial, log: Path) -> int:
    """Be a launcher: start a rank that watches this process, and wait for it."""
    return Command(log, instead=rank).wait()


def train_under_a_launcher(argv: list[str]) -> int:
    end_with_launcher(os.getppid())
    return cli.run(["pretrain", *argv, "--device", "cpu", "--no-probes"])


def is_locked(run: Path) -> bool:
    with open(run / ".lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.fault(47)
def test_killed_launcher(tmp_path):
    """The rank saves its step and ends with 75, and the run folder is free."""
    run = tmp_path / "run"
    rank = partial(train_under_a_launcher, [*LONG, "training.max_steps=100000", "--out", str(run)])
    launcher = Command(tmp_path / "launcher", instead=partial(launch, rank, tmp_path / "log"))
    until(steps_logged(run, 3))
    assert is_locked(run)
    launcher.send(signal.SIGKILL)
    launcher.wait()
    until(lambda: not is_locked(run))
    until(lambda: "stopped and saved at step" in (tmp_path / "log").read_text())


def ignore_the_end_of_the_launcher(marker: Path) -> int:
    signals.GRACE_SECONDS = 0.2
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # like a rank that waits for another inside torch
    end_with_launcher(os.getppid())
    marker.write_text(str(os.getpid()))
    while True:
        time.sleep(1)


@pytest.mark.fault(47)
def test_rank_that_does_not_notice_the_end_of_its_launcher(tmp_path):
    """It is killed after a while."""
    marker = tmp_path / "pid"
    rank = partial(ignore_the_end_of_the_launcher, marker)
    launcher = Command(tmp_path / "launcher", instead=partial(launch, rank, tmp_path / "log"))
    until(lambda: marker.exists() and marker.read_text())
    launcher.send(signal.SIGKILL)
    launcher.wait()
    until(lambda: not is_running(int(marker.read_text())))


def is_running(process: int) -> bool:
    """Whether a process exists and has not ended; nobody may have asked for its exit code yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.fault(47)
@pytest.mark.parametrize("victim", ["torchrun", "ranks", "one rank"])
def test_nothing_is_left_of_a_torchrun_job(tmp_path, victim):
    """If torchrun, all of its ranks or one of them is killed, every process of the job ends and the folder is free."""
    run = tmp_path / "run"
    start = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command = [sys.executable, "-m", "torch.distributed.run", *start, "-m", "kontrast", "pretrain", *LONG]
    options = ["training.max_steps=100000", "--device", "cpu", "--no-probes", "--out", str(run)]
    job = subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL)
    while job.poll() is None and not steps_logged(run, 3)():
        time.sleep(0.05)
    ranks = [int(pid) for pid in subprocess.check_output(["pgrep", "-P", str(job.pid)], text=True).split()]
    for process in {"torchrun": [job.pid], "ranks": ranks, "one rank": ranks[1:]}[victim]:
        os.kill(process, signal.SIGKILL)
    assert job.wait() != 0
    until(lambda: not any(is_running(rank) for rank in ranks))
    assert not is_locked(run)
    assert list((run / "checkpoints").glob("step-*"))


def pictures(place: Path, seed: int) -> Path:
    place.mkdir(parents=True)
    made = torch.Generator().manual_seed(seed)
    for number in range(40):
        pixels = torch.randint(0, 256, (20, 20, 3), dtype=torch.uint8, generator=made)
        Image.fromarray(pixels.numpy()).save(place / f"{number}.png")
    return place


def in_folder(place: Path, argv: list[str]) -> int:
    os.chdir(place)
    return cli.run(["pretrain", *argv, "--device", "cpu", "--no-probes"])


@pytest.mark.fault(29)
def test_ranks_with_different_images(tmp_path):
    """Exit 3 on every rank names the one that differs; there is no run."""
    argv = ["pictures", *LONG, "--out", str(tmp_path / "run")]
    places = [pictures(tmp_path / str(rank) / "pictures", seed=rank).parent for rank in range(2)]
    for rank in two_ranks(tmp_path, instead=[partial(in_folder, place, argv) for place in places]):
        assert re.search("rank 1 .*images.*rank 0", rank.ended(3))
    assert not (tmp_path / "run").exists()


@pytest.mark.fault(29)
def test_ranks_with_different_recipes(tmp_path):
    """Exit 3 on every rank names the one that differs; there is no run."""
    argv = [[*LONG, f"seed={rank}", "--out", str(tmp_path / "run")] for rank in range(2)]
    for rank in two_ranks(tmp_path, instead=[partial(in_folder, tmp_path, words) for words in argv]):
        assert re.search("rank 1 .*recipe.*rank 0", rank.ended(3))
    assert not (tmp_path / "run").exists()


def train_with_nan(argv: list[str], rank: int, steps: set[int]) -> int:
    """Train, and make a gradient NaN on rank 1 only at these steps, after the ranks have averaged their gradients."""
    inner, taken = Step._forward_backward, [0]

    def outer(self: Step, *views: object) -> object:
        outcome = inner(self, *views)
        taken[0] += 1
        if rank == 1 and taken[0] in steps:
            next(iter(self.optimizer.parameters.values())).grad[0] = float("nan")
        return outcome

    Step._forward_backward = outer
    return cli.run(["pretrain", *argv, "--device", "cpu", "--no-probes"])


@pytest.mark.fault(21)
def test_nan_on_one_rank_stops_all_ranks(tmp_path):
    """Exit 5 on every rank with the same step; the previous checkpoint is finite."""
    argv = [*LONG, "--out", str(tmp_path / "run")]
    for rank in two_ranks(tmp_path, instead=[partial(train_with_nan, argv, rank, {7}) for rank in range(2)]):
        assert "not finite at step 7" in rank.ended(5)
    last = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[-1]
    assert 0 < int(last.name[5:]) < 7
    assert all(torch.isfinite(t).all() for t in load_file(last / "state.safetensors").values() if t.is_floating_point())


@pytest.mark.fault(21)
def test_nan_on_one_rank_is_skipped_by_all(tmp_path):
    """One line for the skipped step; the run ends with finite weights."""
    argv = [*LONG, "training.max_steps=12", "--on-nan", "skip", "--out", str(tmp_path / "run")]
    ranks = two_ranks(tmp_path, instead=[partial(train_with_nan, argv, rank, {7}) for rank in range(2)])
    said = [rank.ended(0) for rank in ranks]
    assert len(re.findall("1 of 10.*not finite at step 7", said[0])) == 1
    assert all(torch.isfinite(t).all() for t in load_file(tmp_path / "run" / "encoder.safetensors").values())


@pytest.mark.fault(11)
@pytest.mark.parametrize("allowed", [pytest.param(30, marks=pytest.mark.slow), 19])
def test_bad_images_of_any_rank_count_on_all(tmp_path, allowed):
    """All bad images are reported and in bad.jsonl, though each rank reads only half of the shard.

    If there are more than allowed, every rank exits 3 after saving the last step.
    """
    shard, buffer = tmp_path / "shard.tar", io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(buffer, "png")
    with tarfile.open(shard, "w") as tar:
        for number in range(2400):  # the first rank also reads 512 images to evaluate the encoder
            content = buffer.getvalue()[: 40 if number % 120 == 0 else None]
            about = tarfile.TarInfo(f"{number}.png")
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))
    options = ["training.batch=600", "training.max_steps=4", "data.pack=false", f"data.max_bad={allowed / 2400}"]
    ranks = two_ranks(tmp_path, str(shard), *LONG, *options)
    said = [rank.ended(0 if allowed >= 20 else 3) for rank in ranks]
    assert re.search("20 of 2,?400 images", said[0])
    assert len((tmp_path / "run" / "bad.jsonl").read_text().splitlines()) == 20
    assert (tmp_path / "run" / "checkpoints" / "step-00000004").exists()


@pytest.mark.slow
@pytest.mark.fault(27, 28)
@pytest.mark.parametrize("how", rank_storm.FAILURES)
def test_job_under_torchrun_resumes_to_the_same_bits(tmp_path, tally, how):
    """torchrun starts the ranks again and they resume; the end equals that of an undisturbed job."""
    storm = rank_storm.Storm(tmp_path)
    storm.fail(how)
    tally("rank failures", storm.failures)
    assert not storm.unequal, storm.unequal
