"""Parameters of an objective, such as a learned temperature: trained, logged, saved, and the same on every rank."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from kontrast import distributed
from kontrast.config.recipe import Recipe, read_recipe
from kontrast.data import ImageSet
from kontrast.errors import UsageError
from kontrast.files import read_json_lines
from kontrast.objectives import OBJECTIVES, Objective, Pairs, Terms
from kontrast.training.build import build_learner, optimizer_of
from kontrast.training.loop import Loop
from kontrast.training.resolve import temperature_of
from kontrast.training.run_folder import RunFolder
from kontrast.training.signals import StopSignals
from kontrast.training.step import Step
from kontrast.training.step_schedule import Schedule

from support.commands import TINY, Command, free_port, rank_environment

LEARNED = {"name": "nt-xent", "temperature": "learned", "initial_temperature": 0.5}


def recipe(**sections) -> Recipe:
    training = {"batch": 8, "epochs": 3, "lr": 0.1, "log_every": 1, **sections.pop("training", {})}
    networks = {"encoder": {"name": "small-conv", "width": 8}, "head": {"name": "simclr", "outputs": 8}}
    views = {"count": 2, "size": 16, "policy": "digits"}
    return read_recipe({"objective": LEARNED, **networks, "views": views, **sections, "training": training})


def train(path: Path, chosen: Recipe, resume: bool = False) -> Loop:
    made = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (40, 3, 16, 16), dtype=torch.uint8, generator=made)
    folder = RunFolder(path / "run")
    if not resume:
        folder.create()
    loop = Loop(chosen, folder, ImageSet(pixels, [str(n) for n in range(40)]), torch.device("cpu"), lambda _: None)
    if resume:
        loop.restore()
    loop.run(None, StopSignals(), "")
    return loop


def temperatures(path: Path) -> list[float]:
    return [line["temperature"] for line in read_json_lines(path / "run" / "metrics.jsonl") if "loss" in line]


def test_a_learned_temperature_moves_is_logged_and_saved(tmp_path):
    loop = train(tmp_path, recipe(training={"lr": 0.01}))
    logged = temperatures(tmp_path)
    assert len(logged) == 15 and len(set(logged)) == 15 and all(0.01 <= t <= 1.0 for t in logged)
    assert logged[-1] == pytest.approx(float(loop.learner.objective.temperature))
    assert temperature_of(loop.recipe, tmp_path / "run" / "metrics.jsonl") == logged[-1]
    assert temperature_of(loop.recipe, tmp_path / "none") == pytest.approx(0.5)
    saved = load_file(tmp_path / "run" / "checkpoints" / "step-00000015" / "state.safetensors")
    assert saved["learner.objective.temperature.log_scale"] == loop.learner.objective.temperature.log_scale
    assert "optimizer.momentum.objective.temperature.log_scale" in saved


def test_a_fixed_temperature_is_not_logged(tmp_path):
    train(tmp_path, recipe(objective={"name": "nt-xent"}, training={"max_steps": 2}))
    assert all("temperature" not in line for line in read_json_lines(tmp_path / "run" / "metrics.jsonl"))


@pytest.mark.parametrize(
    ("optimizer", "objective"), [("sgd", LEARNED), ("adamw", LEARNED), ("adamw", {"name": "lejepa", "directions": 8})]
)
def test_a_resumed_run_has_the_same_bits(tmp_path, optimizer, objective):
    """With a learned temperature, and with random directions whose counter is a buffer."""
    training = {"optimizer": optimizer, "lr": 0.01, "schedule": "constant"}
    for name in ("whole", "halves"):
        (tmp_path / name).mkdir()
    train(tmp_path / "whole", recipe(objective=objective, training={**training, "max_steps": 9}))
    train(tmp_path / "halves", recipe(objective=objective, training={**training, "max_steps": 4}))
    train(tmp_path / "halves", recipe(objective=objective, training={**training, "max_steps": 9}), resume=True)
    for name in ("checkpoints/step-00000009/state.safetensors", "metrics.jsonl"):
        assert (tmp_path / "halves" / "run" / name).read_bytes() == (tmp_path / "whole" / "run" / name).read_bytes()


@pytest.mark.parametrize("optimizer", ["sgd", "lars", "adamw", "adam"])
def test_weight_decay_does_not_touch_it(optimizer):
    """With a gradient of 0, the networks shrink and the temperature stays; LARS takes the plain step of SGD."""
    learner = build_learner(recipe(), 3, torch.device("cpu"))
    theta = learner.objective.temperature.log_scale
    rule = optimizer_of(recipe(training={"optimizer": optimizer, "weight_decay": 0.5, "decay_all": True}), learner)
    before = theta.item(), learner.student.encoder.state_dict()["layers.0.weight"].norm().item()
    for p in learner.parameters():
        p.grad = torch.zeros_like(p)
    rule.step()
    after = theta.item(), learner.student.encoder.state_dict()["layers.0.weight"].norm().item()
    assert after[0] == before[0] and after[1] < before[1]
    if optimizer in ("sgd", "lars"):
        theta.grad = torch.ones(())
        rule.step()
        assert before[0] - theta.item() == pytest.approx(0.1)


def test_the_command_line_takes_the_word(tmp_path):
    options, out = [*TINY, "training.max_steps=3", "training.log_every=1"], str(tmp_path / "run")
    learned = ["objective.temperature=learned", "objective.temperature_bounds=[0.05, 0.9]"]
    command = Command(tmp_path / "log", *options, *learned, "--out", out)
    assert command.wait() == 0, command.said
    assert len(temperatures(tmp_path)) == 3
    text = (tmp_path / "run" / "recipe.toml").read_text()
    assert 'temperature = "learned"' in text and "temperature_bounds = [0.05, 0.9]" in text
    refused = Command(tmp_path / "log", "objective.name=dcl", learned[0], "--out", str(tmp_path / "other"))
    assert refused.wait() == 2 and "falls without bound as tau shrinks" in refused.said


class Weighted(Objective):
    """An objective of a user's own: dimensions have learned weights, and the loss a learned bias."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.directions = nn.Parameter(torch.randn(width, width))
        self.bias = nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Parameter(torch.zeros(3))

    def contrast(self, pairs: Pairs) -> Terms:
        weights = torch.sigmoid(self.bias + (pairs.z @ self.directions).mean(-1))
        return Terms(attraction=-weights * pairs.positive, repulsion=pairs.negatives(scale=torch.exp(self.bias)).lse)


CASES = {
    "learned": {"objective": LEARNED},
    "in parts": {"objective": LEARNED, "training": {"batch": 16, "accumulate": 4}, "batch_norm": {"kind": "plain"}},
    "teacher and bank": {
        "objective": {"name": "info-nce", "temperature": "learned"},
        "teacher": {"momentum": 0.9},
        "bank": {"size": 32},
    },
    "own": {"objective": {"name": "weighted"}},
    "sharded": {
        "objective": LEARNED,
        "encoder": {"name": "vit-tiny"},
        "training": {"batch": 16, "parallel": "fsdp", "optimizer": "adamw", "lr": 0.01},
    },
}


def steps_in_float64(case: str, out: Path) -> int:
    """Take ten steps and write the learner; ranks begin with different parameters of the objective."""
    OBJECTIVES["weighted"] = Weighted
    distributed.initialize()
    tree = {"batch_norm": {"kind": "sync"}, "encoder": {"name": "small-conv", "width": 16}, **CASES[case]}
    tree["training"] = {"batch": 16, "lr": 0.1, "optimizer": "sgd", **tree.get("training", {})}
    tree["training"]["accumulate"] = max(1, tree["training"].get("accumulate", 1) // distributed.world())
    chosen = read_recipe({**tree, "head": {"name": "simclr", "outputs": 16}, "views": {"count": 2, "size": 16}})
    torch.manual_seed(0)
    learner = build_learner(chosen, 3, torch.device("cpu")).double()
    with torch.no_grad():
        for p in learner.objective.parameters():
            p += 0.1 * distributed.rank()
    optimizer, parts = optimizer_of(chosen, learner), chosen.training.accumulate
    share = slice(distributed.rank() * 16 // distributed.world(), (distributed.rank() + 1) * 16 // distributed.world())
    made = torch.Generator().manual_seed(1)
    views = torch.randn(10, 2, 16, 3, 16, 16, dtype=torch.float64, generator=made)
    step = Step(learner, optimizer, lambda n, *_: views[n][:, share], device=torch.device("cpu"), accumulate=parts)
    for number in range(10):
        step(number, None, Schedule(lr=0.1 if chosen.training.optimizer == "sgd" else 0.01, momentum=0.9))
    assert step.check() is None
    save_file({k: t.detach().contiguous() for k, t in learner.objective.state_dict().items()}, out)
    distributed.finalize()
    return 0


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case == "sharded" else case for case in CASES]
)
def test_two_ranks_learn_what_one_process_learns(tmp_path, case):
    port = free_port()
    runs = {"one": {}, "r0": rank_environment(0, 2, port), "r1": rank_environment(1, 2, port)}
    commands = [
        Command(tmp_path / f"log-{n}", environment=e, instead=partial(steps_in_float64, case, tmp_path / n))
        for n, e in runs.items()
    ]
    for command in commands:
        assert command.wait() == 0, command.said
    one, first, second = (load_file(tmp_path / name) for name in runs)
    torch.manual_seed(0)
    start = Weighted().double().bias if case == "own" else torch.tensor(-math.log(0.2 if "bank" in case else 0.5))
    for name, tensor in one.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], tensor, rtol=1e-7, atol=1e-8)
        assert tensor.ndim or abs(tensor - start) > 1e-3


def test_an_objective_of_ones_own_trains_its_parameters(tmp_path):
    """Registered with --import: its matrix is decayed like a network's, its numbers are logged by name."""
    file = tmp_path / "own_loss.py"
    source = Path(__file__).read_text()
    body = re.search(r"class Weighted\(Objective\):.*?\n\n\n", source, re.DOTALL)[0]
    head = ["import torch", "from torch import nn", "from kontrast.objectives import *", "", ""]
    file.write_text("\n".join([*head, '@OBJECTIVES.register("weighted")', body]))
    options = [*TINY, "training.max_steps=4", "training.log_every=1", "objective.name=weighted"]
    environment = {"KONTRAST_IMPORT": str(file)}
    command = Command(tmp_path / "log", *options, "--out", str(tmp_path / "run"), environment=environment)
    assert command.wait() == 0, command.said
    lines = [line for line in read_json_lines(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert len({line["bias"] for line in lines}) == 4
    saved = load_file(tmp_path / "run" / "checkpoints" / "step-00000004" / "state.safetensors")
    assert saved["optimizer.momentum.objective.directions"].abs().max() > 0
    assert saved["learner.objective.unused"].tolist() == [0, 0, 0]


def test_a_parameter_named_like_a_logged_number_does_not_replace_it(tmp_path, monkeypatch):
    class Misnamed(Objective):
        def __init__(self):
            super().__init__()
            self.lr, self.step = nn.Parameter(torch.tensor(7.0)), nn.Parameter(torch.tensor(8.0))

        def contrast(self, pairs: Pairs) -> Terms:
            return Terms(attraction=-pairs.positive * self.lr.exp() + self.step)

    monkeypatch.setitem(OBJECTIVES, "misnamed", Misnamed)
    train(tmp_path, recipe(objective={"name": "misnamed"}, training={"max_steps": 2, "schedule": "constant"}))
    first = read_json_lines(tmp_path / "run" / "metrics.jsonl")[0]
    assert first["step"] == 1 and first["lr"] == pytest.approx(0.1)


def test_a_recipe_with_a_wrong_word_is_refused():
    with pytest.raises(UsageError, match="temperature is 'lerned'"):
        build_learner(recipe(objective={"name": "nt-xent", "temperature": "lerned"}), 3, torch.device("cpu"))
