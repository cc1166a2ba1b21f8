"""The teacher's keys: which of them the bank stores, how split batch norm shuffles them, and that the teacher is
updated before it computes them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import normalize

from kontrast.config.recipe import read_recipe
from kontrast.networks import SplitBatchNorm
from kontrast.optim.optimizers import build_optimizer
from kontrast.training.learner import Learner
from kontrast.training.step import Step
from kontrast.training.step_schedule import Schedule
from kontrast.views import Views, keys

VIEWS, IMAGES, MOMENTUM = 4, 8, 0.5
SPLIT = {"kind": "split", "splits": 2}
PATHS = {
    "joint": {},
    "view by view": {"joint": False},
    "joint and shuffled": SPLIT,
    "view by view and shuffled": {**SPLIT, "joint": False},
}


def trained(batch_norm: dict, contents: str, symmetric: bool = False) -> tuple[Learner, Step, torch.Tensor]:
    """Return a learner after one step, when student and teacher differ, and the views [V,B,...] of its next step."""
    tree = {
        "objective": {"name": "info-nce"},
        "encoder": {"name": "small-conv", "width": 16},
        "head": {"name": "simclr", "outputs": 8},
        "views": {"count": VIEWS, "size": 16},
        "teacher": {"symmetric": symmetric},
        "bank": {"size": 100, "contents": contents},
        "batch_norm": batch_norm,
        "training": {"batch": IMAGES},
    }
    torch.manual_seed(0)
    learner = Learner(read_recipe(tree)).train()
    step = Step(
        learner,
        build_optimizer(learner, "sgd", 0.1, momentum=0.9),
        Views("digits", VIEWS, 16),
        device=torch.device("cpu"),
    )
    pictures = torch.randint(0, 256, (IMAGES, 3, 16, 16), dtype=torch.uint8)
    image_keys = keys(0, 0, torch.arange(IMAGES))
    step(pictures, image_keys, Schedule(lr=0.5, momentum=0.9))
    made = step.views(pictures, image_keys)
    step.views = lambda *_: made
    return learner, step, made


def fresh_rows(learner: Learner, step: Step) -> torch.Tensor:
    """Return the rows that the bank stores in the next step."""
    start = int(learner.bank.pointer)
    step(torch.empty(0), torch.empty(0), Schedule(lr=0.1, momentum=MOMENTUM))
    return learner.bank.rows[start : int(learner.bank.pointer)]


def updated(learner: Learner) -> Learner:
    """Return a copy whose teacher is updated by hand, as the next step must do before it computes keys."""
    twin = copy.deepcopy(learner)
    for p, s in zip(twin.teacher.parameters(), twin.student.parameters()):
        p.copy_(MOMENTUM * p + (1 - MOMENTUM) * s.detach())
    return twin


def unit_keys(learner: Learner, pictures: torch.Tensor) -> torch.Tensor:
    """Return the unit keys [W,B,D] of pictures [W,B,...] by a plain forward of the teacher."""
    return normalize(learner.teacher(pictures.flatten(0, 1)).unflatten(0, pictures.shape[:2]), dim=-1)


@pytest.mark.parametrize("contents", ["last", "all", "means", "unit-means"])
def test_the_bank_stores_unit_keys_of_the_last_view_or_of_all_or_their_means(contents):
    learner, step, views = trained({}, contents)
    made = unit_keys(updated(learner), views[1:])
    rows = fresh_rows(learner, step)
    mean = made.mean(0)
    expected = {"last": made[-1], "all": made.flatten(0, 1), "means": mean, "unit-means": normalize(mean, dim=-1)}
    torch.testing.assert_close(rows, expected[contents])
    if contents == "means":  # of unit keys that differ, and not put back on the sphere
        assert (rows.norm(dim=1) < 0.999).all()


@pytest.mark.parametrize("path", PATHS)
def test_the_teacher_is_updated_before_it_computes_the_keys(path):
    learner, step, views = trained(PATHS[path], "all", symmetric=True)
    due, stale = (
        normalize(twin.teacher_keys(views, None), dim=-1).flatten(0, 1) for twin in (updated(learner), learner)
    )
    rows = fresh_rows(learner, step)
    torch.testing.assert_close(rows, due)
    assert (rows - stale).abs().max() > 1e-3


@pytest.mark.parametrize("joint", [True, False])
def test_split_batch_norm_shuffles_the_images_of_keys_and_restores_their_order(joint):
    learner, _, views = trained({**SPLIT, "joint": joint}, "last", symmetric=True)

    def made() -> torch.Tensor:
        return copy.deepcopy(learner).teacher_keys(views, None)

    with torch.no_grad():
        plain = copy.deepcopy(learner).per_view("teacher", views)
    first = made()
    learner.steps += 1
    assert (first - plain).abs().max() > 1e-3  # statistics of other partners than the queries have
    assert (made() - first).abs().max() > 1e-3  # and of others again in the next step
    learner.eval()  # without batch statistics a partner changes nothing
    torch.testing.assert_close(made(), learner.per_view("teacher", views).detach())


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("parts", [2, 4])
def test_keys_in_parts_are_shuffled_over_the_whole_batch(joint, parts):
    """Shuffled within its part, a key would share statistics with its query's neighbors: all of them in four parts."""
    learner, step, views = trained({"kind": "split", "splits": 4, "joint": joint}, "all", symmetric=True)
    whole = normalize(updated(learner).teacher_keys(views, None), dim=-1).flatten(0, 1)
    for norm in (m for m in learner.modules() if isinstance(m, SplitBatchNorm)):
        norm.splits = 4 // parts
    step.accumulate = parts
    torch.testing.assert_close(fresh_rows(learner, step), whole)


def test_views_that_are_shuffled_separately_are_shuffled_differently():
    learner, _, views = trained({**SPLIT, "joint": False}, "last", symmetric=True)
    one, other = learner.teacher_keys(views[:1].expand(2, *views.shape[1:]), None)
    assert (one - other).abs().max() > 1e-3


@pytest.mark.parametrize("joint", [True, False])
def test_keys_of_all_views_are_shuffled_together_or_view_by_view(joint):
    """JCL shuffles all views together, CACR each view separately."""
    learner, _, views = trained({**SPLIT, "joint": joint}, "last", symmetric=True)
    other = torch.cat([views[:-1], views[-1:].flip(2)])
    found, changed = (copy.deepcopy(learner).teacher_keys(pictures, None) for pictures in (views, other))
    assert torch.equal(found[:-1], changed[:-1]) != joint
