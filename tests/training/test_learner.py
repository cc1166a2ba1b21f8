"""The learner: every objective trains with every option of a recipe, or is refused with the reason."""

from __future__ import annotations

import contextlib
import functools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kontrast.config.recipe import read_recipe
from kontrast.errors import UsageError
from kontrast.kernels.operator import StatisticsFunction, statistics_operator
from kontrast.objectives import OBJECTIVES, KoLeo, objective
from kontrast.optim.optimizers import build_optimizer
from kontrast.training.learner import Learner
from kontrast.training.option_checks import check_options
from kontrast.training.step import Step
from kontrast.training.step_schedule import Schedule
from kontrast.views import Views, keys

BASE = {
    "encoder": {"name": "small-conv", "width": 16},
    "head": {"name": "simclr", "outputs": 8},
    "views": {"count": 2, "size": 16, "policy": "digits"},
    "training": {"batch": 8},
}
OPTIONS = {
    "plain": {},
    "teacher": {"teacher": {"momentum": 0.9}},
    "asymmetric teacher": {"teacher": {"momentum": 0.9, "symmetric": False}},
    "teacher and bank": {"teacher": {"momentum": 0.9, "symmetric": False}, "bank": {"size": 20}},
    "teacher and bank of means": {
        "teacher": {"momentum": 0.9, "symmetric": False},
        "bank": {"size": 20, "contents": "means"},
        "views": {"count": 4, "size": 16, "policy": "digits"},
    },
    "teacher and predictor": {"teacher": {"momentum": 0.9}, "predictor": {"name": "byol", "hidden": 16}},
    "stop-gradient": {"training": {"batch": 8, "stop_gradient": True}, "predictor": {"name": "simsiam", "hidden": 4}},
    "multi-crop": {
        "teacher": {"momentum": 0.9},
        "views": {"count": 2, "size": 16, "policy": "digits", "local_count": 2, "local_size": 16},
    },
    "multi-crop without teacher": {
        "views": {"count": 2, "size": 16, "policy": "digits", "local_count": 2, "local_size": 16},
    },
    "split batch norm": {"teacher": {"momentum": 0.9}, "batch_norm": {"kind": "split", "splits": 2}},
    "separate forwards": {"batch_norm": {"joint": False}},
    "accumulation": {"training": {"batch": 8, "accumulate": 2}},
    "four views": {"views": {"count": 4, "size": 16, "policy": "digits"}},
    "bank without teacher": {"bank": {"size": 20}},
}


def make(options: dict, name: str = "nt-xent", **arguments) -> tuple[Learner, Step]:
    prototypes = {"prototypes": {"count": 6}} if OBJECTIVES[name].needs_prototypes else {}
    recipe = read_recipe({**BASE, **options, **prototypes, "objective": {"name": name, **arguments}})
    torch.manual_seed(0)
    learner = Learner(recipe)
    v = recipe.views
    local = {"local_count": v.local_count, "local_size": v.local_size} if v.local_count else {}
    views = Views(v.policy, count=v.count, size=v.size, **local)
    optimizer = build_optimizer(learner, "sgd", 0.1, momentum=0.9)
    step = Step(learner, optimizer, views, device=torch.device("cpu"), accumulate=recipe.training.accumulate)
    return learner, step


def batch(number: int = 0, count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randint(
        0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(number)
    )
    return images, keys(0, number, torch.arange(count))


class ForbidReads(TorchDispatchMode):
    """Fail if a tensor's value is copied to the host, which a captured CUDA graph can't do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"), func.name()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_every_objective_trains_with_every_option_or_says_why_not(name, option, monkeypatch):
    """A step changes the weights and has a finite loss, and a second step reads no value from the device."""
    try:
        learner, step = make(OPTIONS[option], name)
    except UsageError as refusal:
        assert "can't be used here: " in str(refusal) and len(str(refusal).split(": ")[1]) > 10
        return
    before = {n: p.detach().clone() for n, p in learner.student.named_parameters() if p.requires_grad}
    images = batch()
    views = step.views(*images)  # made beforehand: on CUDA they are separate kernels, which have their own test
    step.views = lambda *_: views
    step(*images, Schedule(lr=0.1, momentum=0.9), indices=torch.arange(8))
    assert step.check() is None
    assert all(math.isfinite(value) for value in step.flush().values())
    assert any(not torch.equal(p, before[n]) for n, p in learner.student.named_parameters() if n in before)
    # The tiled kernel reads ids and lengths, which a CPU may; on CUDA it is Triton's, whose own tests look for reads.
    monkeypatch.setattr(StatisticsFunction, "apply", statistics_operator)
    with ForbidReads():
        step(*images, Schedule(lr=0.1, momentum=0.9), indices=torch.arange(8))


def test_local_crops_without_keys_are_further_views_and_not_in_the_bank():
    learner, step = make({**OPTIONS["multi-crop without teacher"], "bank": {"size": 20}})
    views, local = step.views(*batch()[:2])
    outcome = learner(views, local)
    z = torch.cat([learner.per_view("student", views), learner.per_view("student", local)])
    torch.testing.assert_close(outcome.terms.total, objective("nt-xent")(z, bank=learner.bank.rows))
    torch.testing.assert_close(outcome.bank_rows, torch.nn.functional.normalize(z[1], dim=-1))


@pytest.mark.parametrize("count", [2, 3])
def test_an_asymmetric_teacher_has_a_queue_for_each_view_that_it_sees(count):
    """Its first view is a query alone, which is neither assigned nor stored."""
    views = {"views": {"count": count, "size": 16, "policy": "digits"}}
    options = {"teacher": {"symmetric": False}, "bank": {"size": 20, "contents": "views"}, **views}
    learner, step = make(options, "swav")
    step(*batch(), Schedule(lr=0.1, momentum=0.9))
    assert step.check() is None
    assert (learner.bank.rows != 0).any(-1).sum(-1).tolist() == [8] * (count - 1)


@pytest.mark.parametrize(("name", "size", "local"), [("small-alexnet", 32, 16), ("convn", 32, 16), ("vit-tiny", 16, 3)])
def test_local_crops_of_a_size_that_the_encoder_cannot_process_are_refused(name, size, local):
    """Two of the encoders flatten and so accept one size only; a crop of 3 pixels has no patch of 4."""
    views = {"count": 2, "size": size, "policy": "digits", "local_count": 2, "local_size": local}
    with pytest.raises(UsageError, match=f"views.local_size = {local} can't be used here: {name}") as caught:
        make({"encoder": {"name": name}, "views": views})
    assert "\n" not in str(caught.value)


def test_most_combinations_are_allowed():
    """The test above would pass if everything were refused."""
    allowed = 0
    for options in OPTIONS.values():
        for name in OBJECTIVES:
            with contextlib.suppress(UsageError):
                check_options(read_recipe({**BASE, **options, "objective": {"name": name}}), objective(name))
                allowed += 1
    assert allowed > 0.6 * len(OPTIONS) * len(OBJECTIVES)


@pytest.mark.parametrize(
    ("options", "name", "reason"),
    [
        ({"teacher": {}, "bank": {"size": 20}}, "barlow-twins", "bank"),
        ({"teacher": {}, "training": {"batch": 8, "stop_gradient": True}}, "alignment", "stop_gradient"),
        ({"views": {"count": 1, "size": 16, "policy": "digits"}}, "nt-xent", "views"),
        ({"training": {"batch": 8, "accumulate": 3}}, "nt-xent", "divide"),
        (
            {
                "teacher": {"symmetric": False},
                "views": {"count": 2, "size": 16, "policy": "digits", "local_count": 2, "local_size": 8},
            },
            "nt-xent",
            "symmetric",
        ),
    ],
)
def test_impossible_options_are_refused_with_the_reason(options, name, reason):
    with pytest.raises(UsageError, match=reason):
        make(options, name)


@pytest.mark.parametrize(
    "option", ["plain", "teacher", "teacher and bank", "teacher and predictor", "stop-gradient", "multi-crop"]
)
def test_accumulation_is_exact(option):
    """Without batch norm, a step in parts equals the step of the whole batch: student, teacher and bank. One of the
    losses is of the encoder's features too."""
    further = {"plus": [{"name": "koleo", "on": "features"}]} if option == "teacher and predictor" else {}
    name = {"teacher and bank": "info-nce", "stop-gradient": "alignment"}.get(option, "nt-xent")
    ends = []
    for parts in (1, 4):
        options = {**OPTIONS[option], "head": {"name": "linear", "outputs": 8}}
        options["training"] = {**options.get("training", {"batch": 8}), "accumulate": parts}
        learner, step = make(options, name, **further)
        for module in learner.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                module.eval()
        for number in range(2):
            step(*batch(number), Schedule(lr=0.1, momentum=0.5))
        ends.append({k: t.detach().clone() for k, t in learner.state_dict().items()})
    for key, whole in ends[0].items():
        torch.testing.assert_close(ends[1][key], whole, rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.parametrize("option", ["stop-gradient", "bank without teacher", "multi-crop", "separate forwards"])
def test_a_loss_of_features_is_that_of_the_encoder(option):
    """The keys, the bank and the network that is evaluated have projections alone."""
    name = {"bank without teacher": "info-nce", "stop-gradient": "alignment"}.get(option, "nt-xent")
    learner, _ = make(OPTIONS[option], name, plus=[{"name": "koleo", "on": "features", "weight": 0.5}])
    found = []
    learner.student.encoder.register_forward_hook(lambda _, inputs, features: found.append(features))
    learner.train()
    images = torch.rand(2, 8, 3, 16, 16)
    crops = torch.rand(2, 8, 3, 16, 16) if option == "multi-crop" else None
    outcome = learner(images, crops)
    features = torch.cat(found[: 2 if option == "separate forwards" else 1]).unflatten(0, (-1, 8))
    torch.testing.assert_close(outcome.terms["koleo"], 0.5 * KoLeo()(features))
    if learner.bank is not None:
        assert outcome.bank_rows.shape[1] == learner.width
    assert learner.eval().result(images[0]).shape == (8, learner.width)


def test_a_loss_of_features_needs_two_views_of_them():
    with pytest.raises(UsageError, match=r"objective.plus on features.*teacher.symmetric=true"):
        make(OPTIONS["asymmetric teacher"], plus=[{"name": "koleo", "on": "features"}])


def test_accumulation_counts_batch_statistics_once():
    learner, step = make({"training": {"batch": 8, "accumulate": 2}})
    step(*batch(), Schedule(lr=0.1, momentum=1.0))
    norms = [m for m in learner.student.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    assert {int(m.num_batches_tracked) for m in norms} == {2}


def test_the_bank_stores_the_keys_after_the_step():
    learner, step = make(OPTIONS["teacher and bank"], "info-nce")
    start = learner.bank.rows.clone()
    step(*batch(), Schedule(lr=0.1, momentum=0.9))
    assert int(learner.bank.pointer) == 8
    assert torch.equal(learner.bank.rows[8:], start[8:]) and not torch.equal(learner.bank.rows[:8], start[:8])


@pytest.mark.parametrize("option", ["teacher and bank", "split batch norm", "multi-crop"])
def test_a_skipped_step_changes_nothing(option):
    """The teacher is updated before the step is known not to be finite, and is rolled back."""
    learner, step = make(OPTIONS[option], "info-nce")
    step.skipping, made = True, step.views
    for number in range(2):
        step(*batch(number), Schedule(lr=0.1, momentum=0.5))
    before = {k: t.clone() for k, t in learner.state_dict().items() if k != "steps"}

    def spoiled(*inputs):
        views = made(*inputs)
        return tuple(v * math.nan for v in views) if isinstance(views, tuple) else views * math.nan

    step.views = spoiled
    step(*batch(2), Schedule(lr=0.1, momentum=0.5))
    assert step.check() is not None
    for key, tensor in before.items():
        assert torch.equal(learner.state_dict()[key], tensor), key


def test_the_teacher_has_no_gradient_and_is_updated_by_the_momentum():
    learner, step = make(OPTIONS["teacher"], "info-nce")
    step(*batch(0), Schedule(lr=0.1, momentum=0.5))
    student = [p.detach().clone() for p in learner.student.parameters()]
    teacher = [p.detach().clone() for p in learner.teacher.parameters()]
    step(*batch(1), Schedule(lr=0.1, momentum=0.75))
    assert all(p.grad is None for p in learner.teacher.parameters())
    for now, then, s in zip(learner.teacher.parameters(), teacher, student):
        torch.testing.assert_close(now, 0.75 * then + 0.25 * s)


def test_a_loss_that_is_not_finite_leaves_the_weights_unchanged():
    learner, step = make({})
    step(*batch(0), Schedule(lr=0.1, momentum=1.0))
    with torch.no_grad():
        next(learner.student.head.parameters()).fill_(float("nan"))
    before = [p.detach().clone() for p in learner.student.encoder.parameters()]
    step(*batch(1), Schedule(lr=0.1, momentum=1.0))
    assert step.check() == 1
    assert all(torch.equal(p, k) for p, k in zip(learner.student.encoder.parameters(), before))


def test_two_equal_runs_are_equal_bit_for_bit():
    ends = []
    for _ in range(2):
        learner, step = make(OPTIONS["split batch norm"], "info-nce")
        for number in range(3):
            step(*batch(number), Schedule(lr=0.1, momentum=0.9))
        ends.append(learner.state_dict())
    assert all(torch.equal(ends[0][k], ends[1][k]) for k in ends[0])


def test_each_run_of_one_process_is_compiled_for_its_size(monkeypatch):
    """There are more runs than versions of a function that the compiler keeps. Its backend does nothing."""
    sizes: list[object] = []

    def backend(graph, inputs):
        sizes.extend(i.shape[0] for i in inputs if isinstance(i, torch.Tensor) and i.shape[1:] == (3, 16, 16))
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    counts = range(2, 12)
    for count in counts:
        learner = Learner(read_recipe(BASE))
        learner.compile_networks()
        learner(torch.rand(2, count, 3, 16, 16))
    assert sizes == [2 * count for count in counts] and all(type(size) is int for size in sizes)
