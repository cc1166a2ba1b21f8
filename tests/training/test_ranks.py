"""Several ranks are one process on the joined batch: the same losses, the same bank, one writer."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from forked import TINY, Command, free_port, rank_environment
from safetensors.torch import load_file, save_file

from kontrast import distributed
from kontrast.settings import read_recipe
from kontrast.training.folder import read_lines
from kontrast.training.loop import build_learner, build_views
from kontrast.training.optimizers import build_optimizer
from kontrast.training.step import Step
from kontrast.views import keys

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


def test_two_ranks_have_the_losses_of_one_process(tmp_path):
    """A small learning rate: where a ReLU's input is within rounding of 0, its gradient is either side's, and the two
    runs part company without either being wrong. The next test, in float64, holds the arithmetic itself to account."""
    options = [*OPTIONS, "training.lr=0.01"]
    whole, (shared, _) = one(tmp_path, options), two(tmp_path, options)
    assert len(losses(shared)) == 20
    assert losses(shared) == pytest.approx(losses(whole), abs=1e-5, rel=0)


CASES = {
    "teacher, bank, SyncBN": {"teacher": {"momentum": 0.9}, "bank": {"size": 100, "contents": "all"}},
    "one query view": {"teacher": {"momentum": 0.9, "symmetric": False}, "bank": {"size": 100}},
    "jcl": {
        "objective": {"name": "jcl"},
        "teacher": {"momentum": 0.9, "symmetric": False},
        "bank": {"size": 100, "contents": "means"},
        "views": {"count": 4, "size": 16, "policy": "digits"},
    },
    "cacr": {
        "objective": {"name": "cacr"},
        "teacher": {"momentum": 0.9},
        "bank": {"size": 100},
        "views": {"count": 3, "size": 16, "policy": "digits"},
    },
    "byol": {
        "objective": {"name": "alignment"},
        "teacher": {"momentum": 0.9},
        "predictor": {"name": "byol", "hidden": 16},
    },
    "simsiam": {
        "objective": {"name": "alignment"},
        "training": {"batch": 16, "stop_gradient": True},
        "predictor": {"name": "simsiam", "hidden": 8},
    },
    "barlow twins": {"objective": {"name": "barlow-twins"}},
    "sim-whitening": {"objective": {"name": "sim-whitening"}},
    "swd": {"objective": {"name": "swd"}},
    "nt-xent": {"objective": {"name": "nt-xent"}},
}
BASE = {
    "objective": {"name": "info-nce"},
    "encoder": {"name": "small-conv", "width": 16},
    "head": {"name": "simclr", "outputs": 16},
    "views": {"count": 2, "size": 16, "policy": "digits"},
    "batch_norm": {"kind": "sync"},
    "training": {"batch": 16},
}


def train_in_float64(case: str, out: Path) -> int:
    """Twenty steps of the learner in float64; the first rank writes the end. The learning rate is small: at 0.1 SWD's
    rounding grows fourfold a step, to 1e-1 from 1e-14."""
    recipe = read_recipe({**BASE, **CASES[case]})
    distributed.initialize()
    torch.manual_seed(0)
    learner = build_learner(recipe, 3, torch.device("cpu")).double()
    make = build_views(recipe, torch.float32)
    step = Step(learner, build_optimizer(learner, "sgd", 0.1), lambda *x: make(*x).double(), device=torch.device("cpu"))
    share = slice(distributed.rank() * 16 // distributed.world(), (distributed.rank() + 1) * 16 // distributed.world())
    for number in range(20):
        made = torch.Generator().manual_seed(number)
        images = torch.randint(0, 256, (16, 3, 20, 20), dtype=torch.uint8, generator=made)
        step(images[share], keys(0, number, torch.arange(16))[share], None, 0.01, 0.9)
    assert step.check() is None
    if distributed.is_main():
        save_file({k: t.contiguous() for k, t in learner.state_dict().items()}, out)
    distributed.finalize()
    return 0


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_take_the_steps_of_one_process(tmp_path, case):
    port = free_port()
    runs = {"one": {}, "r0": rank_environment(0, 2, port), "r1": rank_environment(1, 2, port)}
    commands = [
        Command(tmp_path / f"log-{n}", environment=e, instead=partial(train_in_float64, case, tmp_path / n))
        for n, e in runs.items()
    ]
    for command in commands:
        assert command.wait() == 0, command.said
    whole, shared = load_file(tmp_path / "one"), load_file(tmp_path / "r0")
    for name, tensor in whole.items():
        torch.testing.assert_close(shared[name], tensor, rtol=1e-7, atol=1e-8, msg=lambda m, name=name: f"{name}: {m}")


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
