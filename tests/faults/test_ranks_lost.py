"""A rank that dies, hangs, goes wrong or has other data: the others name it, and a restarted job resumes."""

from __future__ import annotations

import io
import os
import re
import signal
import tarfile
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from kontrast.cli import main as cli
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
@pytest.mark.parametrize("allowed", [30, 19])
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
