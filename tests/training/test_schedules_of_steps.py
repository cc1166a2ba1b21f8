"""What a schedule does to a step: rates per part, weight decay, clipping, frozen prototypes, the start of a bank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kontrast.config.recipe import read_recipe
from kontrast.errors import UsageError
from kontrast.optim import build_optimizer, clip_gradients
from kontrast.training.step_schedule import Position, schedule_of

RULES = {
    "sgd": ({"momentum": 0.9}, lambda ps, decay: torch.optim.SGD(ps, momentum=0.9, weight_decay=decay)),
    "adam": ({}, lambda ps, decay: torch.optim.Adam(ps, weight_decay=decay)),
    "adamw": ({}, lambda ps, decay: torch.optim.AdamW(ps, weight_decay=decay)),
}


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()


def set_gradients(model: nn.Module, step: int) -> None:
    for number, p in enumerate(model.parameters()):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(7 * step + number), dtype=p.dtype)


@pytest.mark.parametrize("name", RULES)
def test_a_scheduled_weight_decay_equals_torch_with_that_decay(name):
    """The fused kernels take the decay as a number, which a captured graph could not change."""
    arguments, reference = RULES[name]
    mine, theirs = network(), network()
    optimizer = build_optimizer(mine, name, lr=0.1, weight_decay=0.4, **arguments)
    other = reference(list(theirs.parameters()), 0.4)
    for step, share in enumerate((1.0, 0.25, 0.5)):
        set_gradients(mine, step)
        set_gradients(theirs, step)
        optimizer.set_decay_share(share)
        other.param_groups[0].update(weight_decay=0.4 * share, lr=0.1)
        optimizer.step()
        other.step()
    for p, q in zip(mine.parameters(), theirs.parameters()):
        torch.testing.assert_close(p, q)


def test_a_failed_step_changes_nothing_even_with_a_scheduled_decay():
    model = network()
    before = [p.clone() for p in model.parameters()]
    optimizer = build_optimizer(model, "adamw", lr=float("inf"), weight_decay=0.4)
    set_gradients(model, 0)
    optimizer.set_decay_share(0.5)
    optimizer.step(found_inf=torch.ones(1))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))


@pytest.mark.parametrize("name", ["sgd", "lars", "adamw"])
def test_a_part_can_have_its_own_learning_rate(name):
    """A rate of 0 leaves the part as it is; the rest equals an optimizer without parts."""
    mine, theirs = network(), network()
    optimizer, other = (build_optimizer(m, name, lr=0.1, weight_decay=0.01) for m in (mine, theirs))
    for step in range(3):
        set_gradients(mine, step)
        set_gradients(theirs, step)
        optimizer.set_lr(0.1)
        optimizer.set_lr(0.0, "1.")
        optimizer.step()
        other.step()
    assert all(torch.equal(p, q) for p, q in zip(mine[0].parameters(), theirs[0].parameters()))
    assert all(torch.equal(p, q) for p, q in zip(mine[1].parameters(), network()[1].parameters()))


@pytest.mark.parametrize("each", [False, True])
def test_gradients_are_clipped_as_torch_and_dino_do(each):
    mine, theirs = network(), network()
    for model in (mine, theirs):
        set_gradients(model, 0)
    clip_gradients(mine.parameters(), 0.7, each)
    for group in [[p] for p in theirs.parameters()] if each else [list(theirs.parameters())]:
        torch.nn.utils.clip_grad_norm_(group, 0.7)
    for p, q in zip(mine.parameters(), theirs.parameters()):
        torch.testing.assert_close(p.grad, q.grad)
    small = [p.grad.clone() for p in mine.parameters()]
    clip_gradients(mine.parameters(), 1e6, each)
    assert all(torch.equal(p.grad, g) for p, g in zip(mine.parameters(), small))


def numbers(recipe: dict, step: int, total: int = 40, per_epoch: int = 10):
    return schedule_of(read_recipe(recipe), Position(step, total, per_epoch))


def test_parts_that_have_no_factor_follow_the_common_rate():
    assert numbers({}, 3).part_lr == {}
    recipe = {
        "training": {"lr": 0.2, "schedule": "cosine"},
        "encoder": {"name": "resnet-18", "lr_factor": 0.1},
        "predictor": {"name": "simsiam", "constant_lr": True},
        "prototypes": {"count": 8, "lr_factor": 2.0},
    }
    found = numbers(recipe, 20)
    assert found.lr == pytest.approx(0.1)
    assert found.part_lr == pytest.approx({"student.encoder.": 0.01, "predictor.": 0.2, "prototypes.": 0.2})


def test_the_learning_rate_ends_at_the_final_one_scaled_like_the_peak():
    recipe = {"training": {"lr": 0.3, "final_lr": 0.003, "batch": 512, "lr_scaling": "linear"}}
    assert numbers(recipe, 0).lr == pytest.approx(0.6)
    assert numbers(recipe, 40).lr == pytest.approx(0.006)


def test_prototypes_are_frozen_for_steps_or_epochs_whichever_is_longer():
    frozen = [numbers({"prototypes": {"frozen_epochs": 1.5}}, step).frozen for step in (0, 14, 15)]
    assert frozen == [True, True, False]
    both = {"prototypes": {"frozen_epochs": 1, "frozen_steps": 12}}
    assert [numbers(both, step).frozen for step in (0, 11, 12)] == [True, True, False]


def test_a_bank_stores_from_its_start():
    assert [numbers({"bank": {"start": 2}}, step).storing for step in (0, 19, 20)] == [False, False, True]
    assert numbers({}, 0).storing


def test_a_weight_decay_that_grows_starts_at_its_share_of_the_largest():
    recipe = {"training": {"weight_decay": 0.04, "final_weight_decay": 0.4}}
    assert [numbers(recipe, step).decay_share for step in (0, 20, 40)] == pytest.approx([0.1, 0.55, 1.0])
    assert numbers({"training": {"weight_decay": 0.0, "final_weight_decay": 0.0}}, 5).decay_share == 0
    assert numbers({}, 5).decay_share is None


def test_what_is_added_to_an_objective_must_be_a_table_with_a_name():
    for wrong in (["koleo"], "koleo", [{"weight": 1.0}]):
        with pytest.raises(UsageError, match="must be a list of tables with a name"):
            read_recipe({"objective": {"name": "nt-xent", "plus": wrong}})
