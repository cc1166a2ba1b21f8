"""Schedules at their ends and corners, and recipes whose schedule does not fit the training."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kontrast.config.recipe_files import recipe_names, resolve
from kontrast.errors import UsageError
from kontrast.optim.schedules import learning_rate, ramp, scaled_learning_rate, teacher_momentum, weight_decay
from kontrast.training.ineffective_settings import refuse_ineffective, schedule_warnings, unused_settings
from kontrast.training.pretrain import pretrain

from support.tiny_run import images


def rates(epochs=10, steps_per_epoch=4, lr=2.0, **arguments) -> list[float]:
    return [
        learning_rate(t, lr=lr, epochs=epochs, steps_per_epoch=steps_per_epoch, **arguments)
        for t in range(epochs * steps_per_epoch)
    ]


def test_cosine_starts_at_the_peak_and_ends_near_zero():
    r = rates()
    assert r[0] == 2.0 and r[20] == pytest.approx(1.0)
    assert r == sorted(r, reverse=True) and r[-1] == pytest.approx(2 * (1 - math.cos(math.pi / 40)) / 2)


def test_warm_up_rises_to_the_peak_and_the_cosine_takes_the_rest():
    r = rates(warmup=2.5)
    assert r[:10] == pytest.approx([2.0 * (t + 1) / 10 for t in range(10)])
    assert r[10] == 2.0 and r[25] == pytest.approx(1.0)


def test_steps_fall_at_their_epochs():
    """CACR: x 0.1 at 155, 170, 185 of 200."""
    r = rates(epochs=200, steps_per_epoch=2, lr=0.06, schedule="steps", milestones=[155, 170, 185])
    assert r[309] == 0.06 and r[310] == pytest.approx(0.006)
    assert r[340] == pytest.approx(0.0006) and r[370] == r[-1] == pytest.approx(0.00006)
    assert rates(schedule="steps", milestones=[5], factor=0.2)[-1] == pytest.approx(0.4)


def test_constant_and_linear():
    assert set(rates(schedule="constant")) == {2.0}
    r = rates(schedule="linear")
    assert r[0] == 2.0 and r[20] == 1.0 and r[39] == pytest.approx(2 / 40)


def test_final_is_the_rate_at_the_end():
    assert learning_rate(40, lr=2.0, epochs=10, steps_per_epoch=4, final=0.5) == 0.5
    assert learning_rate(99, lr=2.0, epochs=10, steps_per_epoch=4, final=0.5) == 0.5


def test_per_epoch_is_constant_within_an_epoch():
    r, whole = rates(per_epoch=True), rates()
    assert [r[t] for t in range(0, 40, 4)] == [whole[t] for t in range(0, 40, 4)]
    assert all(len(set(r[e : e + 4])) == 1 for e in range(0, 40, 4))


def test_scaling_by_batch():
    assert scaled_learning_rate(0.12, 768, "linear") == pytest.approx(0.36)
    assert scaled_learning_rate(0.075, 4096, "sqrt") == pytest.approx(4.8)
    assert scaled_learning_rate(0.3, 4096) == 0.3


def test_teacher_momentum_goes_to_one_by_the_cosine():
    m = [teacher_momentum(t, total=100, momentum=0.99, schedule="cosine") for t in range(101)]
    assert m[0] == pytest.approx(0.99) and m[50] == pytest.approx(0.995) and m[100] == 1.0
    assert m == sorted(m)
    assert teacher_momentum(70, total=100, momentum=0.999) == 0.999


def test_a_ramp_without_a_start_is_that_of_the_jcl_code():
    assert [ramp(e, epochs=4, end=2.0) for e in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_a_ramp_with_a_start_is_dino_s_teacher_temperature():
    """np.concatenate((np.linspace(0.04, 0.07, 30), np.ones(n - 30) * 0.07)) in DINO's code."""
    expected = [*np.linspace(0.04, 0.07, 30), *[0.07] * 5]
    assert [ramp(e, epochs=30, end=0.07, start=0.04) for e in range(35)] == pytest.approx(expected)
    assert ramp(0, epochs=1, end=0.07, start=0.04) == 0.04


def test_weight_decay_follows_dino_s_cosine():
    """final + 0.5 (base - final) (1 + cos(pi i / n)) in DINO's code."""
    total = 50
    expected = [0.4 + 0.5 * (0.04 - 0.4) * (1 + math.cos(math.pi * i / total)) for i in range(total)]
    assert [weight_decay(i, total=total, start=0.04, final=0.4) for i in range(total)] == pytest.approx(expected)
    assert weight_decay(7, total=10, start=0.1) == 0.1


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_made_shorter_is_told_of_its_schedule_and_trains(name):
    """Its own warm-up and milestones lie within it; past the end of a shorter training they are told, not refused."""
    assert not schedule_warnings(resolve(name).training)
    short = resolve(name, ["training.epochs=1"])
    told = {"training.warmup": short.training.warmup > 1, "training.milestones": short.training.schedule == "steps"}
    assert schedule_warnings(short.training).keys() == {key for key, late in told.items() if late}
    refuse_ineffective(short, ["training.epochs=1"])
    assert not schedule_warnings(resolve(name, ["training.epochs=0"]).training)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["training.warmup=6"], r"training\.warmup of 6 epochs is longer than the training of 5"),
        (["training.schedule=steps", "training.milestones=[2,5,7]"], r"training\.milestones 5, 7: .* of 5 epochs ends"),
    ],
)
def test_a_schedule_past_the_end_is_refused_where_it_was_asked_for(asked, words):
    asked = ["training.epochs=5", *asked]
    with pytest.raises(UsageError, match=words):
        refuse_ineffective(resolve("quickstart", asked), asked)
    longer = [*asked, "training.epochs=8"]
    refuse_ineffective(resolve("quickstart", longer), longer)


def test_a_schedule_that_max_steps_cut_short_is_told(tmp_path):
    """240 images less a fifth in batches of 64 are three steps an epoch."""
    said: list[str] = []
    asked = ["training.max_steps=2", "training.warmup=1", "training.batch=64", "encoder.width=8", "evaluation.every=0"]
    pretrain(images(), recipe="quickstart", overrides=asked, out=tmp_path / "run", device="cpu", say=said.append)
    assert any("training.warmup of 1 epochs is longer than the training of 0.666667" in line for line in said), said


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["training.milestones=[2,3]"], "cosine schedule does not use training.milestones"),
        (["training.schedule=steps"], "never lowers the learning rate without training.milestones"),
    ],
)
def test_a_schedule_and_milestones_need_each_other(asked, words):
    """Asked for alone they did nothing, silently; what a recipe has left over is only told."""
    recipe = resolve("quickstart", asked)
    with pytest.raises(UsageError, match=words):
        refuse_ineffective(recipe, asked)
    refuse_ineffective(recipe, [])
    assert list(schedule_warnings(recipe.training).values())
    both = ["training.schedule=steps", "training.milestones=[2,3]"]
    refuse_ineffective(resolve("quickstart", both), both)
    assert not any(schedule_warnings(resolve(name).training) for name in recipe_names())


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["training.optimizer=adamw", "training.momentum=0.5"], ["training.momentum"]),
        (["training.momentum=0.5"], []),
        (["training.lr_inside=true", "training.optimizer=sgd"], ["training.lr_inside"]),
        (["training.lr_inside=false", "training.optimizer=sgd"], []),
        (["training.optimizer=lars", "training.lr_inside=true", "training.decay_all=true"], ["training.decay_all"]),
        (["training.optimizer=lars", "training.decay_all=false"], []),
        (["training.gamma=0.2"], ["training.gamma"]),
        (["training.gamma=0.2", "training.schedule=steps", "training.milestones=[2]"], []),
        (["training.lr_per_epoch=true", "training.schedule=constant"], ["training.lr_per_epoch"]),
        (["batch_norm.splits=4", "batch_norm.kind=plain"], ["batch_norm.splits"]),
        (["batch_norm.splits=4", "batch_norm.kind=split"], []),
        (["views.local_size=16"], ["views.local_size"]),
        (["views.local_policy=simclr"], ["views.local_policy"]),
        (["training.trust=0.02"], ["training.trust"]),
        (["training.trust=0.02", "training.optimizer=lars"], []),
        (["training.adapt_all=true"], ["training.adapt_all"]),
        (["training.adapt_all=true", "training.optimizer=lars", "training.decay_all=true"], []),
        (["training.adapt_all=true", "training.optimizer=lars", "training.decay_all=false"], ["training.decay_all"]),
        (["training.clip_each=true"], ["training.clip_each"]),
        (["training.clip_each=true", "training.clip=3"], []),
        (["training.final_lr=0.01"], []),
        (["training.final_lr=0.01", "training.schedule=constant"], ["training.final_lr"]),
        (["training.final_lr=0.01", "training.schedule=steps", "training.milestones=[2]"], ["training.final_lr"]),
        (["objective.ramp_from=0.1"], ["objective.ramp_from"]),
        (["objective.ramp_epochs=3"], ["objective.ramp_epochs"]),
        (["objective.ramp=temperature", "objective.ramp_from=0.1", "objective.ramp_epochs=3"], []),
    ],
)
def test_a_setting_that_nothing_looks_at_is_told_where_it_was_asked_for(asked, told):
    recipe = resolve("quickstart", asked)
    assert [line.split()[0] for line in unused_settings(recipe, asked)] == told
    assert not unused_settings(recipe, []), "what a recipe has left over says nothing wrong"
