"""A rank that dies, hangs, goes wrong or has other data: the others say which, and a restarted job goes on."""

from __future__ import annotations

import io
import os
import signal
import tarfile
import time
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


def two(tmp_path: Path, *argv: str, instead: list | None = None, timeout: str = "120") -> list[Command]:
    """Two ranks of one job, as torchrun would start them."""
    port = free_port()
    made = []
    for rank in range(2):
        told = rank_environment(rank, 2, port) | {"KONTRAST_RANK_TIMEOUT": timeout}
        out = ["--out", str(tmp_path / "run")]
        made.append(Command(tmp_path / f"log-{rank}", *argv, *out, environment=told, instead=instead and instead[rank]))
    return made


@pytest.mark.fault(27)
@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_when_a_rank_is_killed_the_other_says_so_within_five_seconds(tmp_path, killed):
    """Seen: exit 6 and the number of the rank that is gone. Remains: the newest checkpoint."""
    ranks = two(tmp_path, *LONG)
    until(steps_logged(tmp_path / "run", 9))
    begin = time.monotonic()
    ranks[killed].send(signal.SIGKILL)
    said = ranks[1 - killed].ended(6)
    assert time.monotonic() - begin < 5.0
    assert f"rank {killed} of 2 ended or does not answer" in said
    assert ranks[killed].wait() == -signal.SIGKILL
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.fault(28)
def test_a_rank_that_hangs_is_named_when_its_time_is_up(tmp_path):
    """Seen: exit 6 and the number of the rank that does not answer, after the timeout. Remains: the checkpoint."""
    ranks = two(tmp_path, *LONG, timeout="2")
    until(steps_logged(tmp_path / "run", 9))
    begin = time.monotonic()
    ranks[1].send(signal.SIGSTOP)
    try:
        said = ranks[0].ended(6)
        assert 1.5 < time.monotonic() - begin < 12.0
        assert "rank 1 of 2 ended or does not answer" in said
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
def test_ranks_with_other_images_are_refused(tmp_path):
    """Seen: exit 3 on every rank, naming the odd one. Remains: no run."""
    argv = ["pictures", *LONG, "--out", str(tmp_path / "run")]
    places = [pictures(tmp_path / str(rank) / "pictures", seed=rank).parent for rank in range(2)]
    for rank in two(tmp_path, instead=[partial(in_folder, place, argv) for place in places]):
        assert "rank 1 has other images than rank 0" in rank.ended(3)
    assert not (tmp_path / "run").exists()


@pytest.mark.fault(29)
def test_ranks_with_other_recipes_are_refused(tmp_path):
    """Seen: exit 3 on every rank, naming the odd one. Remains: no run."""
    argv = [[*LONG, f"seed={rank}", "--out", str(tmp_path / "run")] for rank in range(2)]
    for rank in two(tmp_path, instead=[partial(in_folder, tmp_path, words) for words in argv]):
        assert "rank 1 has another recipe than rank 0" in rank.ended(3)
    assert not (tmp_path / "run").exists()


def poisoned(argv: list[str], rank: int, steps: set[int]) -> int:
    """Train; on rank 1 alone a gradient becomes NaN at these steps, after the ranks have joined their gradients."""
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
def test_nan_on_one_rank_stops_all_before_any_weight_moves(tmp_path):
    """Seen: exit 5 on every rank with the same step. Remains: the checkpoint before it, finite."""
    argv = [*LONG, "--out", str(tmp_path / "run")]
    for rank in two(tmp_path, instead=[partial(poisoned, argv, rank, {7}) for rank in range(2)]):
        assert "not finite at step 7 " in rank.ended(5)
    last = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[-1]
    assert 0 < int(last.name[5:]) < 7
    assert all(torch.isfinite(t).all() for t in load_file(last / "state.safetensors").values() if t.is_floating_point())


@pytest.mark.fault(21)
def test_nan_on_one_rank_may_be_skipped_by_all(tmp_path):
    """Seen: one line for the step that was skipped. Remains: a run that goes on to its end with finite weights."""
    argv = [*LONG, "training.max_steps=12", "--on-nan", "skip", "--out", str(tmp_path / "run")]
    ranks = two(tmp_path, instead=[partial(poisoned, argv, rank, {7}) for rank in range(2)])
    said = [rank.ended(0) for rank in ranks]
    assert said[0].count("skipped a step, 1 of 10 allowed: the loss or a gradient is not finite at step 7") == 1
    assert all(torch.isfinite(t).all() for t in load_file(tmp_path / "run" / "encoder.safetensors").values())


@pytest.mark.fault(11)
@pytest.mark.parametrize("allowed", [30, 19])
def test_images_that_any_rank_finds_bad_count_on_all(tmp_path, allowed):
    """Seen: all bad images, though each rank reads half of the shard; over the share allowed, exit 3 on every rank.
    Remains: all of them in bad.jsonl, and the last step."""
    shard, buffer = tmp_path / "shard.tar", io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(buffer, "png")
    with tarfile.open(shard, "w") as tar:
        for number in range(2400):  # of which the first rank alone reads 512 more, to measure the encoder by
            content = buffer.getvalue()[: 40 if number % 120 == 0 else None]
            about = tarfile.TarInfo(f"{number}.png")
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))
    options = ["training.batch=600", "training.max_steps=4", "data.pack=false", f"data.max_bad={allowed / 2400}"]
    ranks = two(tmp_path, str(shard), *LONG, *options)
    said = [rank.ended(0 if allowed >= 20 else 3) for rank in ranks]
    assert "skipped 20 of 2400 images" in said[0]
    assert len((tmp_path / "run" / "bad.jsonl").read_text().splitlines()) == 20
    assert (tmp_path / "run" / "checkpoints" / "step-00000004").exists()


@pytest.mark.slow
@pytest.mark.fault(27, 28)
@pytest.mark.parametrize("how", rank_storm.FAILURES)
def test_a_job_under_torchrun_restarts_itself_to_the_same_bits(tmp_path, tally, how):
    """Seen: torchrun starts the ranks again and they say where they go on. Remains: the bits of an undisturbed job."""
    storm = rank_storm.Storm(tmp_path)
    storm.fail(how)
    tally("rank failures", storm.failures)
    assert not storm.unequal, storm.unequal
