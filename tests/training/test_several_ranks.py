"""Several ranks train like one process on the whole batch: the same losses, the same bank, one writer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kontrast import distributed
from kontrast.config.recipe import read_recipe
from kontrast.data import open_data
from kontrast.files import read_json_lines
from kontrast.networks.tokenizers import ByteTokenizer
from kontrast.optim.optimizers import build_optimizer
from kontrast.training.build import build_learner, build_views
from kontrast.training.run_folder import RunFolder, stored_recipe
from kontrast.training.step import Step
from kontrast.training.step_schedule import Schedule
from kontrast.views import keys

from support import tiny_run
from support.commands import TINY, Command, free_port, rank_environment
from support.made_images import folder_of

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
    return [line["loss"] for line in read_json_lines(run / "metrics.jsonl") if "loss" in line]


def test_two_ranks_have_the_losses_of_one_process(tmp_path):
    """The learning rate is small: if the input of a ReLU is within rounding of 0, its gradient may be that of either
    side, and the two runs diverge though neither is wrong. The next test checks the arithmetic itself, in float64."""
    options = [*OPTIONS, "--recipe", "digits/simclr", "training.lr=0.01"]
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
    "swav": {
        "objective": {"name": "swav"},
        "prototypes": {"count": 6},
        "bank": {"size": 32, "contents": "views"},
    },
    "dino": {
        "objective": {"name": "dino"},
        "prototypes": {"count": 6, "kind": "weight-norm"},
        "teacher": {"momentum": 0.9},
    },
    "dino in parts": {
        "objective": {"name": "dino"},
        "prototypes": {"count": 6, "kind": "weight-norm", "learn_scale": True},
        "teacher": {"momentum": 0.9},
        "batch_norm": {"kind": "plain"},
        "training": {"batch": 16, "accumulate": 4},
    },
    "sogclr": {"objective": {"name": "sogclr", "gamma": 0.5}},
    "nnclr": {
        "objective": {"name": "nnclr"},
        "predictor": {"name": "simsiam", "hidden": 4},
        "bank": {"size": 32},
        "training": {"batch": 16, "stop_gradient": True},
    },
    "co2": {"objective": {"name": "co2"}, "teacher": {"momentum": 0.9, "symmetric": False}, "bank": {"size": 32}},
    "lejepa": {"objective": {"name": "lejepa", "directions": 8}},
    "zero-cl": {"objective": {"name": "zero-cl"}, "head": {"name": "simclr", "outputs": 4}},
    "supervised": {"objective": {"name": "cross-entropy"}, "training": {"batch": 16, "labels": True}},
    "supcon": {"objective": {"name": "nt-xent"}, "training": {"batch": 16, "labels": True}},
    # Four parts in one process, two on each of two ranks: batch norm sees the same part of the images either way.
    "in parts": {
        "objective": {"name": "info-nce"},
        "teacher": {"momentum": 0.9},
        "bank": {"size": 100},
        "batch_norm": {"kind": "plain"},
        "training": {"batch": 16, "accumulate": 4},
    },
    "clip": {
        "objective": {"name": "info-nce", "symmetric": True, "temperature": "learned"},
        "views": {"count": 1, "size": 16, "policy": "digits"},
        "text": {"width": 8, "depth": 1, "heads": 2, "length": 8, "dropout": 0.0},
    },
    "siglip, in parts": {
        "objective": {"name": "siglip"},
        "views": {"count": 1, "size": 16, "policy": "digits"},
        "text": {"width": 8, "depth": 1, "heads": 2, "length": 8, "dropout": 0.0},
        "batch_norm": {"kind": "plain"},
        "training": {"batch": 16, "accumulate": 4},
    },
    "symmetric cacr of images and texts, with a teacher": {
        "objective": {"name": "cacr", "symmetric": True},
        "views": {"count": 1, "size": 16, "policy": "digits"},
        "teacher": {"momentum": 0.9},
        "text": {"width": 8, "depth": 1, "heads": 2, "length": 8, "dropout": 0.0},
    },
    # Two splits of the batch in one process, one of them on each of two ranks.
    "split batch norm": {
        "teacher": {"momentum": 0.9, "symmetric": False},
        "bank": {"size": 100},
        "batch_norm": {"kind": "split", "splits": 2},
    },
    "split batch norm, three key views shuffled": {
        "objective": {"name": "jcl"},
        "teacher": {"momentum": 0.9, "symmetric": False},
        "bank": {"size": 100, "contents": "means"},
        "views": {"count": 4, "size": 16, "policy": "digits"},
        "batch_norm": {"kind": "split", "splits": 2},
    },
    "split batch norm, two views": {"batch_norm": {"kind": "split", "splits": 2}},
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
    """Take eight steps of the learner in float64; the first rank writes the result. The learning rate is small: at 0.1
    the rounding errors of SWD grow fourfold per step, from 1e-14 to 1e-1."""
    distributed.initialize()
    recipe = read_recipe({**BASE, **CASES[case]})
    parts = max(1, recipe.training.accumulate // distributed.world())
    recipe = replace(recipe, training=replace(recipe.training, accumulate=parts))
    torch.manual_seed(0)
    learner = build_learner(recipe, 3, torch.device("cpu"), images=16, classes=3).double()
    make = build_views(recipe, torch.float32)
    optimizer = build_optimizer(learner, "sgd", 0.1)
    step = Step(learner, optimizer, lambda *x: make(*x).double(), device=torch.device("cpu"), accumulate=parts)
    share = slice(distributed.rank() * 16 // distributed.world(), (distributed.rank() + 1) * 16 // distributed.world())
    for number in range(8):
        made = torch.Generator().manual_seed(number)
        images = torch.randint(0, 256, (16, 3, 20, 20), dtype=torch.uint8, generator=made)
        given = {"indices": torch.arange(16)[share]}
        if recipe.training.labels:
            given["labels"] = given["indices"] % 3
        if recipe.text is not None:
            texts = [f"text {(number + i) % 11}" for i in range(16)]  # some images have equal captions
            given["tokens"] = ByteTokenizer(8)(texts)[share]
            given["labels"] = (number + given["indices"]) % 11
        step(images[share], keys(0, number, torch.arange(16))[share], Schedule(lr=0.01, momentum=0.9), **given)
    assert step.check() is None
    if distributed.is_main():
        save_file({k: t.contiguous() for k, t in learner.state_dict().items()}, out)
    distributed.finalize()
    return 0


SLOW = ("one query view", "simsiam", "barlow twins", "sim-whitening", "swd", "nt-xent", "co2", "zero-cl", "supcon")
"""Their learners have no parts that the other cases lack."""


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in CASES])
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
    apart = case.endswith("in parts") or "split" in case  # running statistics are each rank's own
    own = ("running_mean", "running_var", "num_batches_tracked") if apart else ()
    for name, tensor in whole.items():
        if name.endswith(own):
            continue
        torch.testing.assert_close(shared[name], tensor, rtol=1e-7, atol=1e-8, msg=lambda m, name=name: f"{name}: {m}")


def test_nan_on_two_ranks_stops_both(tmp_path):
    _, said = two(tmp_path, [*OPTIONS, "training.lr=1e30", "training.warmup=0"], codes=(5, 5))
    assert all("not finite at step" in text for text in said)


def test_accumulate_that_does_not_divide_the_share_of_a_rank_is_refused(tmp_path):
    _, said = two(tmp_path, [*OPTIONS, "training.batch=16", "training.accumulate=16"], codes=(2, 2))
    assert "2 ranks must divide the batch 16" in said[0]


SHARDED = [
    *TINY,
    "training.batch=16",
    "training.log_every=1",
    "training.optimizer=adamw",
    "training.lr=0.0001",
    "encoder.name=vit-tiny",
    "objective.name=info-nce",
    "teacher.momentum=0.9",
    "predictor.name=byol",
    "predictor.hidden=32",
    "batch_norm.kind=sync",
]


@pytest.mark.parametrize("parts", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_fsdp_takes_the_steps_of_ddp(tmp_path, parts):
    """FSDP2 with teacher and predictor has the losses, the encoder and the checkpoint of DDP, also after resuming."""
    images = folder_of(tmp_path / "images", 64)
    options = [str(images), *SHARDED, "training.max_steps=4", f"training.accumulate={parts}", "checkpoints.every=0"]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    copies, _ = two(tmp_path / "a", options)
    shards, _ = two(tmp_path / "b", [*options, "training.parallel=fsdp"])
    assert losses(shards) == pytest.approx(losses(copies), abs=1e-5, rel=0) and len(losses(shards)) == 4
    places = [run / "checkpoints" / "step-00000004" / "state.safetensors" for run in (copies, shards)]
    ours, theirs = (load_file(place) for place in places)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
    encoder = load_file(shards / "encoder.safetensors")
    assert encoder.keys() == load_file(copies / "encoder.safetensors").keys()


@pytest.mark.slow
def test_a_run_with_fsdp_resumes_to_the_same_bits(tmp_path):
    options = [str(folder_of(tmp_path / "images", 64)), *SHARDED, "training.parallel=fsdp"]
    for name in ("whole", "halves"):
        (tmp_path / name).mkdir()
    whole, _ = two(tmp_path / "whole", [*options, "training.max_steps=4"])
    halves, _ = two(tmp_path / "halves", [*options, "training.max_steps=2"])
    two(tmp_path / "halves", ["--resume", "training.max_steps=4"])
    for name in ("encoder.safetensors", "checkpoints/step-00000004/state.safetensors"):
        assert (halves / name).read_bytes() == (whole / name).read_bytes(), name


def test_fsdp_is_refused_with_options_that_it_does_not_support(tmp_path):
    _, said = two(tmp_path, [*OPTIONS, "training.parallel=fsdp"], codes=(2, 2))
    assert "not a transformer" in said[0]
    _, said = two(tmp_path, [*SHARDED, "training.parallel=fsdp", "training.optimizer=lars"], codes=(2, 2))
    assert "LARS needs the norm of whole layers" in said[0]


@pytest.mark.slow
def test_ranks_agree_on_the_plan_of_minutes(tmp_path):
    """Both ranks train the epochs that the first one planned, and end like one process with these epochs."""
    options = [option for option in OPTIONS if not option.startswith(("training.max_steps", "training.epochs"))]
    run, said = two(tmp_path, [*options, "--minutes", "0.6", "--no-probes"])
    assert sum(text.count("plan: 0.6 minutes") for text in said) == 1
    recipe = stored_recipe(RunFolder(run))
    per_epoch = len(open_data(recipe.data.source)) // recipe.training.batch
    steps = recipe.training.max_steps or recipe.training.epochs * per_epoch
    assert [line["step"] for line in read_json_lines(run / "metrics.jsonl") if "loss" in line] == [*range(1, steps + 1)]


@pytest.mark.slow
def test_all_ranks_stop_when_the_first_one_finds_that_the_measures_are_flat(tmp_path):
    """With a learning rate of 0 only the statistics of batch norm still change."""
    options = [str(tiny_run.images()), "--recipe", "quickstart", *TINY, "training.epochs=60", "training.batch=32"]
    options += ["training.lr=0", "training.warmup=0", "training.stop=auto", "evaluation.every=1", "evaluation.k=5"]
    out, said = two(tmp_path, options)
    (reason,) = [line for line in said[0].splitlines() if line.startswith("stopped at epoch")]
    assert "of 60: RankMe" in reason and "stopped" not in said[1]
    steps = [line["step"] for line in read_json_lines(out / "metrics.jsonl") if "rankme" in line]
    assert 3 <= len(steps) < 60 and steps == sorted(set(steps))
