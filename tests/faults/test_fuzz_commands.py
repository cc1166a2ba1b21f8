"""Recipes, overrides and command lines with any content: an exit code and one line, never a traceback."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from kontrast import networks
from kontrast.config import recipe as settings
from kontrast.config.overrides import apply_overrides
from kontrast.config.recipe_files import FOLDER, load_tree, recipe_names
from kontrast.errors import UsageError
from kontrast.networks.catalog import ENCODERS, HEADS, PREDICTORS
from kontrast.objectives import OBJECTIVES
from kontrast.views import Views, keys
from kontrast.views.policies import POLICIES

from support import tiny_run
from support.command_line import kontrast
from support.fuzzing import amounts, fuzz, mutated

IMAGES = torch.zeros(2, 3, 9, 9, dtype=torch.uint8)
NONSENSE = st.text(alphabet=st.characters(exclude_characters="\x00"), min_size=1, max_size=12)
NUMBERS = st.one_of(st.integers(), st.integers(-3, 40), st.floats())
VALUES = st.one_of(
    NUMBERS, st.booleans(), NONSENSE, st.none(), st.lists(NUMBERS, max_size=5), st.lists(NONSENSE, max_size=2)
)


def as_toml(value: Any) -> str:
    return "" if value is None else settings.toml_value(value)


def keys_of_recipes() -> list[str]:
    tree = settings.to_tree(settings.Recipe())
    return [f"{s}.{k}" for s, table in tree.items() if isinstance(table, dict) for k in table] + list(tree)


@pytest.mark.fault(35)
@amounts(200, 10_000)
def test_overrides_with_any_value(cases, tally):
    """Any key with any value gives a recipe that reads back unchanged, or a UsageError that names the key."""
    trees = {name: load_tree(name) for name in ("quickstart", "folder", "cifar10/cacr-k4")}
    keys = st.one_of(st.sampled_from(keys_of_recipes()), NONSENSE, st.builds("{}.{}".format, NONSENSE, NONSENSE))

    def attempt(name: str, key: str, value: Any, raw: str | None) -> None:
        text = f"{key}={as_toml(value) if raw is None else raw}"
        try:
            recipe = settings.read_recipe(apply_overrides(trees[name], [text]))
        except UsageError as error:
            assert len(str(error)) < 2_000
            return
        written = settings.to_toml(recipe, text)
        assert settings.read_recipe(settings.parse_toml(written, "written")) == recipe
        assert len(settings.fingerprint(recipe)) == 64

    maybe = st.one_of(st.none(), NONSENSE)
    tally("fuzz cases", fuzz(cases, attempt, name=st.sampled_from(sorted(trees)), key=keys, value=VALUES, raw=maybe))


@pytest.mark.fault(35)
@amounts(100, 5_000)
def test_recipe_files_with_any_content(cases, tally):
    """Our own recipes with bytes changed, cut or repeated give a recipe, or an error of one line."""
    texts = [(FOLDER / f"{name}.toml").read_bytes() for name in recipe_names()]
    for seed in range(cases):
        text = mutated(texts[seed % len(texts)], seed).decode("utf-8", "replace")
        try:
            tree = settings.parse_toml(text, "mutated")
            tree.pop("base", None)
            settings.to_toml(settings.read_recipe(tree))
        except UsageError as error:
            assert str(error)
    tally("fuzz cases", cases)


@pytest.mark.fault(35)
@amounts(100, 2_000)
@pytest.mark.parametrize("room", ["objective", "head", "predictor", "encoder", "views"])
def test_arguments_with_any_value(room, cases, tally):
    """Any argument for an objective, a head, an encoder or the views is accepted, or refused with a clear error."""
    numbers = st.one_of(st.integers(-3, 40), st.floats())
    small = st.one_of(numbers, st.booleans(), NONSENSE, st.lists(numbers, max_size=4), st.just({"a": 1}))
    registry = {
        "objective": OBJECTIVES,
        "head": HEADS,
        "predictor": PREDICTORS,
        "encoder": ENCODERS,
        "views": POLICIES,
    }[room]
    fields = [f for f in Views("simclr-cifar").policies[0].__dataclass_fields__] if room == "views" else []
    names = [n for n in sorted(registry) if room != "encoder" or n.startswith("small")]

    def attempt(name: str, place: int, value: Any) -> None:
        known = fields or [k for k in registry.arguments(name) if k not in ("inputs", "channels", "size")]
        arguments = {known[place % len(known)]: value} if known else {"strange": value}
        try:
            if room == "objective":
                registry.build(name, **arguments)
            elif room == "views":
                Views(name, count=2, size=8, **arguments)(IMAGES, keys(0, 0, torch.arange(2)))
            elif room == "encoder":
                networks.encoder(name, channels=3, size=32, **arguments)
            else:
                (networks.head if room == "head" else networks.predictor)(name, 8, **arguments)
        except ValueError as error:  # UsageError is one
            assert str(error)

    tally("fuzz cases", fuzz(cases, attempt, name=st.sampled_from(names), place=st.integers(0, 30), value=small))


COMMANDS = [
    "pretrain",
    "probe",
    "embed",
    "lens",
    "audit",
    "compare",
    "report",
    "export",
    "push",
    "recipes",
    "explain",
    "pack",
    "neighbors",
    "duplicates",
    "transfer",
]
OPTIONS = [
    "--json", "--debug", "--out", "--device", "--recipe", "--data", "--labels", "--split",
    "--format", "-k", "--images", "--seeds", "--sweep", "--bits", "--steps", "--resume",
    "--", "-", "--=", "--out=", "--device=tpu",
]  # fmt: skip


@pytest.mark.fault(35)
@amounts(40, 2_000)
def test_command_lines_with_any_words(tmp_path, monkeypatch, cases, tally):
    """Random words, one of them nonsense, end with exit 2, 3 or 4 and one line; no traceback, and no files are left."""
    monkeypatch.chdir(tmp_path)
    word = st.one_of(
        st.sampled_from(OPTIONS), NONSENSE, st.sampled_from(["1", "-1", "nan", "training.epochs=x", "seed=-1", "a=b"])
    )

    def attempt(command: str, words: list[str], wrong: str) -> None:
        words = [w for w in words if w not in ("--help", "-h", "--version") and not os.path.exists(w)]
        done = kontrast(command, *words, f"no-such-{wrong}", "no=such=thing")
        assert done.returncode in (2, 3, 4), (command, words, done.stderr)
        assert "report it" not in done.stderr and ("Traceback" not in done.stderr or "--debug" in words)
        assert done.stderr.strip().splitlines()[-1].startswith("kontrast: "), done.stderr
        assert not list(tmp_path.rglob("recipe.toml"))

    commands = st.one_of(st.sampled_from(COMMANDS), NONSENSE)
    tally("fuzz cases", fuzz(cases, attempt, command=commands, words=st.lists(word, max_size=5), wrong=NONSENSE))


@pytest.mark.fault(35)
@amounts(20, 300)
def test_commands_with_one_wrong_word(tmp_path, monkeypatch, cases, tally):
    """A real command with one mistake names the mistake and leaves the run folder unchanged."""
    monkeypatch.chdir(tmp_path)
    run = tiny_run.copy(tmp_path)
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}
    pictures = str(tiny_run.images())
    lines = [
        ["probe", str(run), "WRONG"],
        ["probe", str(run), "knn", "--data", "WRONG"],
        ["probe", str(run), "knn", "--labels", "WRONG"],
        ["embed", str(run), "WRONG", "--out", "v.npy"],
        ["embed", str(run), pictures, "--out", "WRONG"],
        ["embed", str(run), pictures, "--out", "v.npy", "--split", "WRONG"],
        ["lens", "WRONG"],
        ["lens", str(run), "--images", "WRONG"],
        ["neighbors", str(run), "WRONG"],
        ["neighbors", str(run), pictures + "/x.png", "--embeddings", "WRONG"],
        ["duplicates", "WRONG"],
        ["transfer", str(run), "--task", "WRONG"],
        ["duplicates", str(run), "--above", "WRONG"],
        ["export", str(run), "--format", "WRONG"],
        ["push", str(run), "WRONG"],
        ["report", str(run), "WRONG", "--out", "page.html"],
        ["pretrain", "--resume", "--out", str(run), "training.lr=WRONG"],
        ["pretrain", "--resume", "--out", str(run), "--recipe", "WRONG"],
        ["compare", "dcl", "WRONG"],
        ["audit", "--objectives", "WRONG", "--out", "audit"],
        ["explain", "WRONG"],
        ["pack", "WRONG", "store"],
    ]

    def attempt(line: list[str], wrong: str) -> None:
        wrong = "x" + wrong.replace("/", "")
        done = kontrast(
            *(word.replace("WRONG", wrong) for word in line), *(["--device", "cpu"] if line[0] == "probe" else [])
        )
        assert done.returncode in (2, 3), (line, wrong, done.stderr)
        assert "report it" not in done.stderr and "Traceback" not in done.stderr, done.stderr
        assert len([x for x in done.stderr.splitlines() if x.startswith("kontrast: ")]) == 1

    tried = fuzz(cases, attempt, line=st.sampled_from(lines), wrong=NONSENSE)
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file() and p.name != ".lock"} == {
        p: t for p, t in before.items() if p.name != ".lock"
    }
    tally("fuzz cases", tried)
