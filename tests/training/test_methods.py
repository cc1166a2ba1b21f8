"""Methods with prototypes, buffers, queues, labels or indices: trained, frozen, resumed, rolled back and exported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kontrast.config.recipe import Recipe, read_recipe, to_toml
from kontrast.data import ImageSet
from kontrast.errors import UsageError
from kontrast.files import write_json
from kontrast.networks import MemoryBank, Prototypes, Teacher
from kontrast.runs.export import beside_encoder
from kontrast.runs.run import Run
from kontrast.training.build import build_learner
from kontrast.training.loop import Loop
from kontrast.training.run_folder import RunFolder
from kontrast.training.signals import StopSignals

BASE = {
    "encoder": {"name": "small-conv", "width": 8},
    "head": {"name": "simclr", "outputs": 8},
    "views": {"count": 2, "size": 16, "policy": "digits"},
}
METHODS = {
    "swav": {
        "objective": {"name": "swav"},
        "prototypes": {"count": 6, "frozen_steps": 2},
        "bank": {"size": 16, "contents": "views", "start": 1},
        "views": {"count": 2, "size": 16, "policy": "digits", "local_count": 1, "local_size": 8},
    },
    "dino": {
        "objective": {"name": "dino", "ramp": "teacher_temperature", "ramp_from": 0.02, "ramp_epochs": 2},
        "prototypes": {"count": 6, "kind": "weight-norm", "learn_scale": True, "frozen_epochs": 1},
        "teacher": {"momentum": 0.9, "result": True},
        "views": {"count": 2, "size": 16, "policy": "digits", "local_count": 1, "local_size": 8},
    },
    "sogclr": {"objective": {"name": "sogclr", "gamma": 0.5}},
    "isogclr": {"objective": {"name": "isogclr"}},
    "nnclr": {
        "objective": {"name": "nnclr"},
        "predictor": {"name": "simsiam", "hidden": 4},
        "bank": {"size": 16},
        "training": {"stop_gradient": True},
    },
    "co2": {
        "objective": {"name": "co2", "consistency_weight": 0.3},
        "teacher": {"symmetric": False},
        "bank": {"size": 16},
    },
    "lejepa": {"objective": {"name": "lejepa", "directions": 8}},
    "zero-cl": {"objective": {"name": "zero-cl"}},
    "supervised": {"objective": {"name": "cross-entropy"}, "training": {"labels": True}},
    "supcon": {"objective": {"name": "nt-xent"}, "training": {"labels": True}},
    "with koleo": {
        "objective": {"name": "nt-xent", "weight": 0.5, "plus": [{"name": "koleo", "weight": 0.1, "on": "features"}]},
    },
}


def recipe(name: str, **training) -> Recipe:
    settings = {"batch": 8, "epochs": 3, "lr": 0.1, "log_every": 1, **training}
    own = METHODS[name]
    return read_recipe({**BASE, **own, "training": {**own.get("training", {}), **settings}})


def train(path: Path, chosen: Recipe, resume: bool = False) -> Loop:
    made = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (40, 3, 16, 16), dtype=torch.uint8, generator=made)
    images = ImageSet(pixels, [str(n) for n in range(40)], labels=torch.arange(40) % 3)
    folder = RunFolder(path / "run")
    if not resume:
        folder.create()
    loop = Loop(chosen, folder, images, torch.device("cpu"), lambda _: None)
    if resume:
        loop.restore()
    loop.run(None, StopSignals(), "")
    return loop


@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_run_has_the_same_bits(tmp_path, name):
    """Cut inside the second epoch, with the buffers of the objective, the queues and the prototypes."""
    constant = {"schedule": "constant"}  # others depend on the number of steps
    train(tmp_path / "whole", recipe(name, **constant))
    train(tmp_path / "halves", recipe(name, max_steps=7, **constant))
    train(tmp_path / "halves", recipe(name, **constant), resume=True)
    for file in ("checkpoints/step-00000015/state.safetensors", "metrics.jsonl"):
        assert (tmp_path / "halves/run" / file).read_bytes() == (tmp_path / "whole/run" / file).read_bytes()


@pytest.mark.parametrize("name, steps", [("swav", 2), ("dino", 5)])
def test_frozen_prototypes_do_not_move_and_have_no_optimizer_state(tmp_path, name, steps):
    loop = train(tmp_path / "frozen", recipe(name, max_steps=steps))
    torch.manual_seed(0)
    start = build_learner(recipe(name), 3, torch.device("cpu")).prototypes
    torch.testing.assert_close(loop.learner.prototypes(), start(), rtol=0, atol=1e-6)
    state = {key: t for key, t in loop.optimizer.state_dict().items() if "prototypes." in key}
    assert state and not any(t.any() for t in state.values())
    later = train(tmp_path / "later", recipe(name, max_steps=steps + 1))
    assert not torch.allclose(later.learner.prototypes(), start(), atol=1e-6)


def test_a_queue_is_filled_from_its_start(tmp_path):
    early = train(tmp_path / "early", recipe("swav", max_steps=5)).learner.bank
    assert early.rows.shape == (2, 16, 8) and not early.rows.any()
    late = train(tmp_path / "late", recipe("swav", max_steps=6)).learner.bank
    assert (late.rows != 0).any(-1).sum(-1).tolist() == [8, 8]


def test_a_step_that_is_not_finite_leaves_the_center_and_the_teachers_prototypes(tmp_path):
    loop = train(tmp_path, recipe("dino", max_steps=6))
    assert loop.learner.objective.center.any()
    before = {k: t.clone() for k, t in loop.learner.state_dict().items()}
    loop.step.skipping = True
    views = loop.step.views
    loop.step.views = lambda *inputs: tuple(x * float("nan") for x in views(*inputs))
    loop.take_step(next(iter(loop.feeder.batches(0))))
    after = loop.learner.state_dict()
    assert loop.step.check() is not None
    assert [key for key in before if not torch.equal(before[key], after[key]) and key != "steps"] == []


def test_the_teacher_can_be_the_result(tmp_path):
    learner = train(tmp_path, recipe("dino")).learner
    assert learner.result is learner.teacher.module
    pairs = zip(learner.result.parameters(), learner.student.parameters())
    assert any(not torch.equal(mine, theirs) for mine, theirs in pairs)


def test_the_teachers_prototypes_follow_in_training(tmp_path):
    """They start as the student's, and move with them once those are no longer frozen."""
    torch.manual_seed(0)
    start = build_learner(recipe("dino"), 3, torch.device("cpu")).prototypes.weight
    learner = train(tmp_path, recipe("dino")).learner
    followed = learner.teacher_prototypes.module.weight
    assert not torch.equal(followed, start) and not torch.equal(followed, learner.prototypes.weight)
    assert (followed - learner.prototypes.weight).norm() < (start - learner.prototypes.weight).norm()


def test_head_and_prototypes_are_exported_under_their_own_names(tmp_path):
    loop = train(tmp_path, recipe("dino", max_steps=6))
    folder = tmp_path / "run"
    (folder / "recipe.toml").write_text(to_toml(loop.recipe))
    write_json(folder / "run.json", {"version": 1, "data": {"channels": 3}})
    found = beside_encoder(Run(folder))
    assert {key.split(".")[1] for key in found} == {"head", "prototypes"}
    assert torch.equal(found["kontrast.prototypes.weight"], loop.learner.prototypes.weight.detach())
    saved = load_file(next((folder / "checkpoints").glob("step-*/state.safetensors")))
    assert "learner.teacher_prototypes.module.weight" in saved


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"prototypes": False}, "it needs prototypes: set prototypes.count"),
        ({"objective": {"name": "nt-xent"}, "bank": False}, "nt-xent has none"),
        ({"bank": {"contents": "last"}}, "one queue per view"),
        ({"prototypes": {"count": 6, "learn_scale": True}}, "learn_scale needs prototypes.kind='weight-norm'"),
        ({"objective": {"name": "cross-entropy"}, "prototypes": False, "bank": False}, "it needs labels: set training"),
        ({"objective": {"name": "co2"}, "prototypes": False, "bank": False}, "it needs a bank: set bank.size"),
        ({"training": {"labels": True}}, "the images have no labels"),
        ({"objective": {"name": "swav", "width": 3}}, "it is the width of the head"),
    ],
)
def test_options_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        build_learner(read_recipe({**BASE, **METHODS["swav"], **changes}), 3, torch.device("cpu"))


def test_unit_prototypes_stay_on_the_sphere_and_weight_norm_differentiates_through_the_length():
    unit = Prototypes(5, 3)
    with torch.no_grad():
        unit.weight.mul_(3)
    torch.testing.assert_close(unit().norm(dim=1), torch.ones(5))
    torch.testing.assert_close(unit.weight.norm(dim=1), torch.ones(5))
    assert unit() is unit.weight
    directions = Prototypes(5, 3, kind="weight-norm", learn_scale=True).double()
    given = torch.randn(5, 3, dtype=torch.float64)
    (directions() * given).sum().backward()
    across = (directions.weight.grad * directions.weight).sum(1)
    torch.testing.assert_close(across, torch.zeros(5, dtype=torch.float64), atol=1e-12, rtol=0)
    unit_rows = torch.nn.functional.normalize(directions.weight.detach(), dim=1)
    torch.testing.assert_close(directions.scale.grad, (unit_rows * given).sum(1))


def test_a_teachers_prototypes_follow_and_are_normalized_when_they_are_used():
    student = Prototypes(4, 3)
    teacher = Teacher(student)
    with torch.no_grad():
        student.weight.copy_(torch.nn.functional.normalize(torch.randn(4, 3), dim=1))
    before = teacher.module.weight.clone()
    teacher.update(student, 0.75)
    torch.testing.assert_close(teacher.module.weight, 0.75 * before + 0.25 * student.weight)
    torch.testing.assert_close(teacher().norm(dim=1), torch.ones(4))


def test_queues_are_first_in_first_out_per_view():
    bank = MemoryBank(4, 3, queues=2)
    keys = torch.nn.functional.normalize(torch.randn(2, 6, 3), dim=-1)
    bank.enqueue(keys[:, :3])
    bank.enqueue(keys[:, 3:])
    torch.testing.assert_close(bank.rows, keys[:, [4, 5, 2, 3]])
