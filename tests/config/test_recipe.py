"""Recipes: strict, with the nearest known name in the error, and written back to the same recipe."""

from __future__ import annotations

import contextlib
import string
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kontrast.config.overrides import apply_overrides, merge_trees, nested, parse_override
from kontrast.config.recipe import Recipe, fingerprint, parse_toml, read_recipe, to_toml, to_tree
from kontrast.config.recipe_files import recipe_names, resolve
from kontrast.config.suggest import FILLED_IN
from kontrast.errors import UsageError
from kontrast.networks import encoder
from kontrast.objectives import objective


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_has_a_title_and_is_read_back_the_same(name):
    recipe = resolve(name)
    assert recipe.title
    assert read_recipe(parse_toml(to_toml(recipe, "a header\nof two lines"), "again")) == recipe


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"trainning": {}}, ["trainning", "'training'"]),
        ({"training": {"epoch": 3}}, ["training.epoch", "'epochs'"]),
        ({"epochs": 3}, ["unknown key 'epochs': did you mean 'training.epochs'? allowed: adapt"]),
        ({"epoch": 3}, ["did you mean 'training.epochs'?"]),
        ({"size": 3}, ["did you mean 'views.size' or 'bank.size' or 'data.size'?"]),
        ({"temperature": 0.5}, ["did you mean 'objective.temperature' or 'evaluation.temperature'?"]),
        ({"training": {"policy": "simclr"}}, ["'training.policy': did you mean 'views.policy'?"]),
        ({"training": {"epochs": "three"}}, ["training.epochs", "whole number", "'three'"]),
        ({"training": {"epochs": True}}, ["training.epochs", "whole number"]),
        ({"training": {"epochs": -1}}, ["training.epochs", "at least 0"]),
        ({"text": {"length": 1}}, ["text.length", "0 or at least 3", "not 1"]),
        ({"training": {"lr": float("nan")}}, ["training.lr", "finite"]),
        ({"training": {"schedule": "cosin"}}, ["training.schedule", "'cosine'"]),
        ({"training": {"milestones": 3}}, ["training.milestones", "list"]),
        *(
            ({"training": {"milestones": wrong}}, ["training.milestones", str(wrong)])
            for wrong in ([3, 1], [2, 2], [-1, 4])
        ),
        ({"training": 3}, ["training", "table"]),
        ({"encoder": {"width": 3}}, ["encoder", "name"]),
        ({"objective": {"temperature": float("inf")}}, ["objective.temperature", "finite"]),
        ({"teacher": {"momentum": 1.5}}, ["teacher.momentum", "at most 1"]),
        ({"views": {"count": 2**63 - 1}}, ["views.count", "at most 1000"]),
        ({"views": {"local_count": 2**63 - 1}}, ["views.local_count", "at most 1000"]),
        ({"checkpoints": {"every": 1e308}}, ["checkpoints.every", "at most 1e+09"]),
    ],
)
def test_bad_values_are_refused_by_name(tree, words):
    with pytest.raises(UsageError) as error:
        read_recipe(tree)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(UsageError, match="quickstart"):
        resolve("quikstart")


def test_overrides_win_in_order_and_reach_new_sections():
    recipe = resolve("quickstart", ["training.epochs=3", "training.epochs=4", "teacher.momentum=0.5", "seed=7"])
    assert (recipe.training.epochs, recipe.seed) == (4, 7)
    assert recipe.teacher is not None and recipe.teacher.momentum == 0.5


def test_an_optional_section_can_be_switched_off():
    tree = {"teacher": {"momentum": 0.5}}
    assert read_recipe(apply_overrides(tree, ["teacher=false"])).teacher is None


def test_another_name_drops_the_old_arguments():
    tree = merge_trees({"objective": {"name": "nt-xent", "temperature": 0.1}}, {"objective": {"name": "cacr"}})
    assert tree["objective"] == {"name": "cacr"}


def test_overrides_from_python_are_a_tree():
    """Nested, dotted or both; a name and its arguments may come in any order; paths, tuples and numpy are plain."""
    overrides = {
        "training": {"epochs": 3, "milestones": (1, 2)},
        "objective.temperature": np.float32(0.5),
        "objective": {"name": "dcl"},
        "data.root": Path("somewhere"),
        "teacher": {},
        "bank": None,
    }
    assert nested(overrides) == {
        "training": {"epochs": 3, "milestones": [1, 2]},
        "objective": {"temperature": 0.5, "name": "dcl"},
        "data": {"root": "somewhere"},
        "teacher": {},
        "bank": None,
    }
    recipe = resolve("quickstart", overrides)
    assert recipe.teacher is not None and recipe.bank is None and recipe.objective.arguments == {"temperature": 0.5}


def test_a_later_name_drops_earlier_arguments_on_the_command_line():
    recipe = resolve("quickstart", ["objective.name=cacr", "objective.t_plus=2", "objective.name=dcl"])
    assert recipe.objective.name == "dcl" and not recipe.objective.arguments


def test_text_from_python_stays_text():
    """A string is not parsed: "3" is no number and "[1]" no list."""
    assert resolve("quickstart", {"title": "3"}).title == "3"
    with pytest.raises(UsageError, match=r"training\.epochs"):
        resolve("quickstart", {"training.epochs": "3"})


@pytest.mark.parametrize("text", ["training.epochs", "=3", "training..lr=3", "title.x=3"])
def test_malformed_overrides_are_refused(text):
    with pytest.raises(UsageError):
        read_recipe(apply_overrides({"title": "t"}, [text]))


def test_override_values_are_toml_or_words():
    assert parse_override("a.b=[1, 2]") == ("a.b", [1, 2])
    assert parse_override("a=dcl") == ("a", "dcl")
    assert parse_override('a="3"') == ("a", "3")
    assert parse_override("a=true") == ("a", True)


def test_deep_nesting_and_bad_toml_are_refused():
    for text in ("a = " + "[" * 100_000, "a = ", "\x00"):
        with pytest.raises(UsageError):
            parse_toml(text, "text")


def test_different_recipes_have_different_fingerprints():
    assert fingerprint(Recipe()) == fingerprint(read_recipe({}))
    assert fingerprint(Recipe()) != fingerprint(Recipe(seed=1))


@given(st.text(), st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 2**62), st.booleans())
def test_any_value_survives_the_round_trip(text, number, whole, flag):
    text = text.encode("utf-8", "replace").decode()
    arguments = {"words": text, "number": number, "whole": whole, "flag": flag, "list": [whole, whole]}
    recipe = read_recipe({"title": text, "objective": {"name": "x", **arguments}})
    assert read_recipe(parse_toml(to_toml(recipe), "again")) == recipe


@settings(deadline=None)  # the first of them reads all sections' types
@given(
    st.dictionaries(
        st.text(string.ascii_letters + "._", max_size=12), st.integers() | st.text() | st.none(), max_size=4
    )
)
def test_nonsense_is_never_a_traceback(tree):
    with contextlib.suppress(UsageError):
        to_tree(read_recipe(tree))


@pytest.mark.parametrize("key", sorted(FILLED_IN))
def test_arguments_that_kontrast_fills_in_are_refused(key):
    with pytest.raises(UsageError, match=f"{key} can't be set"):
        resolve("cifar10/simclr", [f"{key}=3"])


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: objective("dcl", nmae="x"), "did you mean 'name'"),
        (lambda: objective("dcl", self=1), "no argument 'self'"),
        (lambda: encoder("small-conv", nmae=1), "did you mean 'name'"),
        (lambda: resolve("cifar10/simclr", ["predictor.nme=byol"]), "predictor needs a name.*nme"),
    ],
)
def test_misspelled_arguments_are_named(build, words):
    with pytest.raises(UsageError, match=words) as error:
        build()
    assert "channels" not in str(error.value)  # kontrast passes it
