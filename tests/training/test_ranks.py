"""Several ranks are one process on the joined batch: the same losses, the same bank, one writer."""

from __future__ import annotations

import pytest
import torch
from forked import TINY, Command, free_port, rank_environment
from safetensors.torch import load_file

from kontrast.training.folder import read_lines

OPTIONS = [
    *TINY,
    "training.max_steps=20",
    "training.log_every=1",
    "objective.name=info-nce",
    "teacher.momentum=0.9",
    "bank.size=100",
    "bank.contents=all",
    "batch_norm.kind=sync",
]


def one(tmp_path, options: list[str]):
    command = Command(tmp_path / "log-one", *options, "--out", str(tmp_path / "one"))
    assert command.wait() == 0, command.said
    return tmp_path / "one"


def two(tmp_path, options: list[str], codes: tuple[int, int] = (0, 0)):
    port, out = free_port(), tmp_path / "two"
    ranks = [
        Command(tmp_path / f"log-{r}", *options, "--out", str(out), environment=rank_environment(r, 2, port))
        for r in range(2)
    ]
    found = tuple(rank.wait() for rank in ranks)
    assert found == codes, "\n".join(rank.said for rank in ranks)
    return out, [rank.said for rank in ranks]


def losses(run) -> list[float]:
    return [line["loss"] for line in read_lines(run / "metrics.jsonl") if "loss" in line]


def last(run) -> dict[str, torch.Tensor]:
    return load_file(sorted((run / "checkpoints").glob("step-*"))[-1] / "state.safetensors")


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["teacher.symmetric=false", "bank.contents=last"],
        ["objective.name=cacr", "views.count=3", "bank.contents=means"],
        ["objective.name=barlow-twins", "bank=false", "teacher=false"],
        ["objective.name=swd", "bank=false", "teacher=false", "training.optimizer=lars"],
    ],
    ids=["teacher, bank, SyncBN", "one query view", "cacr, three views", "barlow twins", "swd, lars"],
)
def test_two_ranks_have_the_losses_of_one_process(tmp_path, more):
    whole, (shared, _) = one(tmp_path, OPTIONS + more), two(tmp_path, OPTIONS + more)
    mine, theirs = losses(shared), losses(whole)
    assert len(mine) == 20
    assert mine == pytest.approx(theirs, abs=1e-5, rel=1e-5)
    for name, tensor in last(whole).items():
        torch.testing.assert_close(last(shared)[name], tensor, rtol=2e-3, atol=2e-4, msg=name)


def test_a_recipe_that_differs_between_ranks_is_refused(tmp_path):
    port, out = free_port(), tmp_path / "run"
    commands = []
    for rank in range(2):
        argv = [*OPTIONS, f"seed={rank}", "--out", str(out)]
        commands.append(Command(tmp_path / f"log-{rank}", *argv, environment=rank_environment(rank, 2, port)))
    assert [c.wait() for c in commands] == [3, 3]
    assert "rank 1 has another recipe" in commands[0].said


def test_nan_on_two_ranks_stops_both(tmp_path):
    _, said = two(tmp_path, [*OPTIONS, "training.lr=1e30", "training.warmup=0"], codes=(5, 5))
    assert all("not finite at step" in text for text in said)


def test_accumulation_on_several_ranks_is_refused(tmp_path):
    _, said = two(tmp_path, [*OPTIONS, "training.accumulate=2"], codes=(2, 2))
    assert "several ranks already share the batch" in said[0]
