"""Every recipe in the package can be built, and takes three steps on images of its kind."""

from __future__ import annotations

import fnmatch
import json
import math
import re
from pathlib import Path

import pytest
import torch

from kontrast.config.recipe import Recipe
from kontrast.config.recipe_files import FOLDER, load_tree, recipe_names, recipe_text, resolve
from kontrast.errors import UsageError
from kontrast.networks.heads import HEADS, PREDICTORS
from kontrast.networks.tokenizers import ByteTokenizer
from kontrast.training.build import build_learner, build_views, optimizer_of
from kontrast.training.caption_batches import tokens_per_caption
from kontrast.training.learner import build_objective
from kontrast.training.option_checks import check_options
from kontrast.training.resolve import t_minus_of, temperature_of, with_defaults
from kontrast.training.step import Step
from kontrast.training.step_schedule import Position, schedule_of
from kontrast.views import keys

CPU = torch.device("cpu")
NAMES = recipe_names()


def shape_of_training(name: str) -> str:
    """Return what decides how a recipe's step runs; recipes that differ only in numbers have the same."""
    r = resolve(name)
    parts = [r.objective.name, r.objective.ramp, r.encoder.name, r.encoder.arguments, r.head.name]
    parts += [r.predictor and r.predictor.name, r.prototypes and r.prototypes.kind]
    parts += [r.teacher and r.teacher.symmetric, r.bank and r.bank.contents]
    parts += [r.batch_norm.kind, r.batch_norm.joint, r.views.count > 2, r.views.local_count > 0, r.data.random_bits > 0]
    return json.dumps([*parts, r.training.optimizer, r.training.stop_gradient], sort_keys=True)


DISTINCT = list({shape_of_training(name): name for name in reversed(NAMES)}.values())


def shrunk(name: str, real_size: bool) -> Recipe:
    """Return the recipe on few small images, with its own objective, options and, at their real size, networks."""
    recipe = resolve(name)
    changes = ["training.batch=4", "batch_norm.splits=2"]
    if recipe.bank:
        changes.append("bank.size=40")
    if recipe.objective.name == "zero-cl":
        changes.append("head.outputs=16")  # whitening takes the cube of the width
    if recipe.prototypes:
        changes.append("prototypes.count=24")
    if not real_size and recipe.encoder.name in ("resnet-18", "resnet-50"):
        changes += ["encoder.name=small-resnet", "encoder.width=32"]
    for part, registry in (("head", HEADS), ("predictor", PREDICTORS)) if not real_size else ():
        if (network := getattr(recipe, part)) is not None:
            known = registry.arguments(network.name)
            changes += [f"{part}.{width}=32" for width in ("hidden", "outputs") if width in known]
    if recipe.views.size > 64:
        changes.append("views.size=32")
    elif not real_size and recipe.encoder.name != "convn":
        changes.append("views.size=16")
    if recipe.views.local_count:
        changes.append("views.local_size=16")
    return resolve(name, changes)


def three_steps(recipe: Recipe) -> list[dict[str, float]]:
    colours = 1 if recipe.data.source == "mnist" else 3
    side = recipe.views.size + 4
    made = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    batch, channels = recipe.training.batch, colours + recipe.data.random_bits
    learner = build_learner(recipe, channels, CPU, images=batch, classes=3)
    learner.train()
    step = Step(learner, optimizer_of(recipe, learner), build_views(recipe, torch.float32), device=CPU)
    terms = []
    for number in range(3):
        images = torch.randint(0, 256, (batch, channels, side, side), dtype=torch.uint8, generator=made)
        numbers = torch.arange(batch)
        given = {"indices": numbers} | ({"labels": numbers % 3} if recipe.training.labels else {})
        if recipe.text is not None:
            given["tokens"] = ByteTokenizer(tokens_per_caption(recipe.text))([f"number {i}" for i in range(batch)])
        step(images, keys(0, number, numbers), schedule_of(recipe, Position(number, 30, 10)), **given)
        assert step.check() is None, f"not finite at step {number}"
        terms.append(step.flush())
    return terms


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_can_be_built(name):
    recipe = resolve(name)
    build_views(recipe, torch.float32)
    check_options(recipe, build_objective(recipe))
    assert recipe.title


ENCODERS = ("vit-base", "vit-small", "vit-small-moco")
LARGE = [name for name in DISTINCT if resolve(name).encoder.name in ENCODERS]
"""Smaller encoders train the same objectives, heads and options, and stand in for ResNets."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LARGE[1:] else name for name in DISTINCT]
)
def test_every_kind_of_recipe_takes_three_steps(name):
    for terms in three_steps(shrunk(name, real_size=False)):
        assert terms and all(math.isfinite(v) for v in terms.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_takes_three_steps(name):
    for terms in three_steps(shrunk(name, real_size=True)):
        assert terms and all(math.isfinite(v) for v in terms.values())


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("quickstart", "folder")])
def test_the_header_gives_the_command_the_papers_number_and_ours(name):
    """A number of ours is also on the page in results/ that the header names."""
    command, paper, ours = recipe_text(FOLDER / f"{name}.toml").splitlines()[:3]
    assert command == f"# kontrast pretrain {resolve(name).data.source} --recipe {name}"
    assert paper.startswith("# ") and ours.startswith("# Ours: ")
    page = re.search(r"results/[\w./-]+\.md", ours)
    assert page or "not measured yet" in ours
    numbers = re.findall(r"\d+\.\d+", ours)
    assert all(number in Path(__file__).parents[2].joinpath(page[0]).read_text() for number in numbers)


@pytest.mark.parametrize(
    ("name", "first", "second"), [("cifar10/au-cl", "83.39", "83.49"), ("imagenet/cacr-k1", "69.5", "68.40")]
)
def test_the_header_gives_both_numbers_if_the_paper_has_two(name, first, second):
    header = recipe_text(FOLDER / f"{name}.toml").splitlines()[1]
    assert f"prints {second}): {first} linear" in header


def remarks(name: str) -> str:
    """Return the comments of a recipe and of its bases, without the first two lines of their headers."""
    lines = recipe_text(FOLDER / f"{name}.toml").splitlines()
    base = [line.split('"')[1] for line in lines if line.startswith("base ")]
    return "\n".join([line for line in lines[2:] if "#" in line] + [remarks(b) for b in base])


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("*/*-resnet-50", "HCL's setting"),
        ("stl10/*", "its text says the training set"),
        ("cifar10*/sim-*", "SGD, weight decay 5e-4 and batch 512 are ours"),
        ("imagenet100/sim-*", "names none for ImageNet-100"),
        ("imagenet/sim-*", "Not in the paper"),
        ("imagenet/dcl", "are SimCLR's"),
        ("imagenet/simclr", "are SimCLR's"),
        ("cifar10/gcl-*", "SimCLR's code"),
        ("cifar10/cacr-uniform-*", "t- is not named"),
        ("cifar10/cacr-full", "t- is not named"),
        ("cifar10/cacr-k4-rbf", "t- is not named"),
    ],
)
def test_a_recipe_comments_on_settings_that_its_paper_does_not_give(pattern, words):
    found = fnmatch.filter(NAMES, pattern)
    assert found
    assert [name for name in found if words not in remarks(name)] == []


def test_a_base_that_names_itself_is_refused(tmp_path: Path):
    path = tmp_path / "loop.toml"
    path.write_text(f'base = "{path}"\n')
    with pytest.raises(UsageError, match="base must name another"):
        load_tree(str(path))


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("cifar10/cacr-k1", {"t_minus": 2.0, "batch": 768, "peak": 0.36}),
        ("cifar10/cacr-k4", {"t_minus": 0.9, "batch": 128, "peak": 0.06}),
        ("cifar100/cacr-k1", {"t_minus": 3.0, "batch": 768, "peak": 0.36}),
        ("stl10/cacr-k4", {"t_minus": 2.0, "batch": 128, "peak": 0.06}),
        ("imagenet/jcl", {"covariance_weight": 4.0, "batch": 512, "peak": 0.06}),
        ("imagenet/jcl-code", {"covariance_weight": 2.0, "batch": 256, "peak": 0.03}),
        ("imagenet/sim-affinity", {"temperature": 0.5, "batch": 512, "peak": 0.1}),
        ("cifar10/sim-affinity", {"symmetry_weight": 0.01, "batch": 512, "peak": 0.06}),
        ("cifar10/gcl-nt-xent", {"temperature": 0.2, "batch": 128, "peak": 0.075 * 128**0.5}),
        ("cifar10/moco-v2", {"temperature": 0.1, "batch": 512, "peak": 0.06}),
    ],
)
def test_the_papers_settings(name, facts):
    from kontrast.optim.schedules import scaled_learning_rate

    recipe = resolve(name)
    t = recipe.training
    found = {**recipe.objective.arguments, "batch": t.batch, "peak": scaled_learning_rate(t.lr, t.batch, t.lr_scaling)}
    assert {k: found[k] for k in facts} == pytest.approx(facts)


def test_defaults_are_written_out_and_the_temperature_is_that_of_the_objective(tmp_path):
    for name, temperature in (("info-nce", 0.2), ("nt-xent", 0.2), ("barlow-twins", 0.1)):  # the last has none
        recipe = resolve("cifar10/cl", [f"objective.name={name}"])
        assert temperature_of(recipe, tmp_path / "none") == (0.19 if name == "nt-xent" else temperature)
    whole = with_defaults(resolve("cifar10/cl", ["objective.name=dcl", "encoder.name=resnet-18"]))
    assert whole.objective.arguments["temperature"] == 0.1 and "stem" in whole.encoder.arguments
    assert "channels" not in whole.encoder.arguments and with_defaults(whole) == whole


@pytest.mark.parametrize(
    ("name", "t_minus"),
    [
        ("cifar10/cacr-k1", 2.0),
        ("cifar10/cacr-k4", 0.9),
        ("cifar10/au-cl", 2.0),
        ("cifar10/cl", 1 / (2 * 0.19)),
        ("cifar10/hn-cl", 2 / (2 * 0.5)),
        ("cifar10/cacr-uniform-repulsion", 0.0),
        ("cifar10/cacr-pos-far-neg-far", -0.9),
        ("cifar10/sim-affinity", 1 / (2 * 0.5)),
        ("cifar10/co2", 1 / (2 * 0.1)),
        ("cifar10/barlow-twins", None),
        ("cifar10/swav", None),
        ("cifar10/dino", None),
        ("cifar10/isogclr", None),
        ("cifar10/sim-whitening", None),
    ],
)
def test_the_own_t_minus_gives_the_weights_of_the_objective(name, t_minus):
    """exp(-t- ||x - y||^2) is proportional to exp(<x, y>/tau) for unit vectors, and hard negatives weigh twice."""
    assert t_minus_of(resolve(name)) == (None if t_minus is None else pytest.approx(t_minus))


def test_a_learned_temperature_has_no_t_minus():
    assert t_minus_of(resolve("cifar10/cl", ["objective.temperature=learned"])) is None


def test_the_gcl_recipes_have_the_learning_rate_inside_the_momentum():
    network = torch.nn.Linear(3, 3)
    assert optimizer_of(resolve("cifar10/gcl-nt-xent"), network).lr_inside
    assert not optimizer_of(resolve("cifar10/gcl-nt-xent", ["training.lr_inside=false"]), network).lr_inside


def test_the_optimizer_has_the_trust_of_zero_cl_and_adapts_all_parameters_as_in_swav():
    network = torch.nn.Linear(3, 3)
    zero_cl, swav = (optimizer_of(resolve(f"imagenet/{name}"), network) for name in ("zero-cl", "swav"))
    assert (zero_cl.trust, zero_cl.plain, zero_cl.weight_decay["bias"]) == (0.02, {"bias"}, 0.0)
    assert (swav.trust, swav.plain, swav.weight_decay["bias"]) == (0.001, set(), 1e-6)
