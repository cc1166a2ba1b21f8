"""Resuming with another recipe, other images, another version of torch or another number of ranks."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from kontrast.config.overrides import flat
from kontrast.config.recipe import Recipe, to_tree
from kontrast.data import open_data
from kontrast.files import read_json_lines
from kontrast.training.auto_recipe import CHOSEN, adapt
from kontrast.training.checkpoints import _digest
from kontrast.training.resolve import MAY_CHANGE

from support.commands import TINY, Command, free_port, rank_environment
from support.made_images import folder_of

SHORT = [*TINY, "training.max_steps=8", "training.log_every=1", "training.lr=0.01", "--recipe", "quickstart"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("changes")
    Command(place / "log", *SHORT, "--out", str(place / "run")).ended(0)
    return place / "run"


@pytest.mark.fault(8)
def test_changed_settings_are_listed(finished, tmp_path):
    """Exit 2 with every changed key, old -> new; the run is unchanged."""
    before = (finished / "recipe.toml").read_bytes()
    argv = ["--resume", "training.lr=0.7", "seed=3", "training.max_steps=10", "--out", str(finished)]
    said = Command(tmp_path / "log", *argv).ended(2)
    assert "seed 0 -> 3" in said and "training.lr 0.01 -> 0.7" in said and "max_steps" not in said
    said = Command(tmp_path / "log", "--resume", "--recipe", "digits/dcl", *SHORT[:-2], "--out", str(finished)).ended(2)
    assert "objective.name nt-xent -> dcl" in said
    assert (finished / "recipe.toml").read_bytes() == before


@pytest.mark.fault(8)
@pytest.mark.parametrize("named", [["--recipe", "cifar10/dcl"], ["nowhere", "--recipe", "folder"]])
def test_changed_settings_are_listed_before_looking_for_images(finished, tmp_path, named):
    """Exit 2 with the changed keys, even if the other recipe's images are missing; the run is unchanged."""
    environment = {"KONTRAST_DATA": str(tmp_path / "none")}
    said = Command(tmp_path / "log", "--resume", *named, "--out", str(finished), environment=environment).ended(2)
    source = named[0] if named[0] == "nowhere" else "cifar10"
    assert f"data.source digits -> {source}" in said and "training.lr 0.01 -> 0.3" in said


def test_settings_chosen_from_the_images():
    for device in ("cpu", "cuda"):
        assert all(key.startswith(CHOSEN) for key in flat(adapt(9, 80, torch.device(device))))


OTHER = {bool: lambda v: str(not v).lower(), int: lambda v: str(v + 1), float: lambda v: str(v / 2 + 0.25)}
KEYS = {k: v for k, v in flat(to_tree(Recipe())).items() if type(v) in OTHER and not k.startswith("title")}


@pytest.mark.fault(8)
def test_which_settings_may_change(finished, tmp_path):
    """Exit 2 names the key, for every key except those in MAY_CHANGE."""
    from kontrast.errors import KontrastError
    from kontrast.training.resolve import resumed_recipe
    from kontrast.training.run_folder import RunFolder, stored_recipe

    stored = flat(to_tree(stored_recipe(RunFolder(finished))))
    tried = 0
    for key in KEYS:
        if key not in stored or type(stored[key]) not in OTHER:
            continue
        override = f"{key}={OTHER[type(stored[key])](stored[key])}"
        try:
            resumed_recipe(RunFolder(finished), None, None, [override], None)
            refused = False
        except KontrastError as error:
            refused, words = error.exit_code == 2, str(error)
            assert key in words, words
        assert refused != key.startswith(MAY_CHANGE), override
        tried += 1
    assert tried > 25


@pytest.mark.fault(8)
def test_settings_that_may_change(tmp_path):
    """The run continues for longer, and recipe.toml says so."""
    run = tmp_path / "run"
    Command(tmp_path / "log", *SHORT, "--out", str(run)).ended(0)
    argv = ["--resume", "training.max_steps=10", "training.log_every=2", "--out", str(run)]
    Command(tmp_path / "log", *argv).ended(0)
    assert read_json_lines(run / "metrics.jsonl")[-1]["step"] == 10
    assert "max_steps = 10" in (run / "recipe.toml").read_text()
    Command(tmp_path / "log", "--resume", "--out", str(run)).ended(0)


def add(place: Path) -> None:
    Image.new("RGB", (20, 20), "red").save(place / "new.png")


def change(place: Path) -> None:
    Image.new("RGB", (20, 20), "blue").save(place / "3.png")


CHANGES = {
    "1 added (new.png)": add,
    "1 removed (3.png)": lambda place: (place / "3.png").unlink(),
    "1 modified (3.png)": change,
    "1 modified (4.png)": lambda place: os.utime(place / "4.png", ns=(7, 7)),
}


@pytest.mark.fault(9)
@pytest.mark.parametrize("words", [w if "3.png" in w else pytest.param(w, marks=pytest.mark.slow) for w in CHANGES])
def test_changed_images(tmp_path, words):
    """Exit 3 with counts and names; --accept-data-change continues and records it in run.json."""
    place, run = tmp_path / "pictures", tmp_path / "run"
    place.mkdir()
    for number in range(40):
        Image.new("RGB", (20, 20), (number, 90, 2 * number)).save(place / f"{number}.png")
    Command(tmp_path / "log", str(place), *SHORT, "--out", str(run)).ended(0)
    before = (run / "run.json").read_bytes()
    CHANGES[words](place)
    said = Command(tmp_path / "log", "--resume", "--out", str(run)).ended(3)
    assert words in said and "40" in said and "--accept-data-change" in said
    assert (run / "run.json").read_bytes() == before
    Command(tmp_path / "log", "--resume", "--accept-data-change", "--out", str(run)).ended(0)
    facts = json.loads((run / "run.json").read_text())
    assert facts["data_before"]["fingerprint"] == json.loads(before)["data"]["fingerprint"]
    Command(tmp_path / "log", "--resume", "--out", str(run)).ended(0)


@pytest.mark.fault(9)
def test_changed_held_out_images(tmp_path):
    """Exit 3 with the file's name, although no training image changed."""
    place, run = folder_of(tmp_path / "pictures", 20, classes=2, side=20), tmp_path / "run"
    Command(tmp_path / "log", str(place), *SHORT, "--out", str(run)).ended(0)
    held = open_data(place, "test").names[0]
    (place / held).unlink()
    said = Command(tmp_path / "log", "--resume", "--out", str(run)).ended(3)
    assert f"1 removed ({held})" in said and "39" in said and "--accept-data-change" in said


@pytest.mark.fault(10)
def test_another_version_of_torch(finished, tmp_path):
    """`not bit-exact` with both versions, once; the run resumes."""
    import shutil

    run = Path(shutil.copytree(finished, tmp_path / "run"))
    for path in (run / "checkpoints").glob("step-*/manifest.json"):
        manifest = json.loads(path.read_text()) | {"torch": "2.99.0"}
        manifest.pop("self")
        path.write_text(json.dumps(manifest | {"self": _digest(manifest)}))
    said = Command(tmp_path / "log", "--resume", "training.max_steps=10", "--out", str(run)).ended(0)
    assert len(re.findall(r"not bit-exact: .*2\.99\.0", said)) == 1


def ranks(tmp_path: Path, world: int, argv: list[str], code: int = 0) -> str:
    port = free_port()
    logs = [tmp_path / f"log-{world}-{rank}" for rank in range(world)]
    made = [
        Command(log, *argv, environment=rank_environment(rank, world, port) if world > 1 else {})
        for rank, log in enumerate(logs)
    ]
    said = [command.ended(code) for command in made]
    return said[0]


@pytest.mark.fault(10)
@pytest.mark.parametrize(("first", "then"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_another_number_of_ranks(tmp_path, first, then):
    """`not bit-exact` with both numbers; the losses are those of an undisturbed run, up to rounding."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    argv = [*SHORT, "training.max_steps=16", "training.schedule=constant", "batch_norm.kind=sync", "training.lr=0.0001"]
    ranks(tmp_path, first, [*argv, "training.max_steps=8", "--out", str(run)])
    said = ranks(tmp_path, then, ["--resume", "training.max_steps=16", "--out", str(run)])
    assert said.count(f"not bit-exact: world was {first} and is {then}") == 1
    ranks(tmp_path, 1, [*argv, "--out", str(whole)])
    losses = [[line["loss"] for line in read_json_lines(r / "metrics.jsonl") if "loss" in line] for r in (run, whole)]
    assert len(losses[0]) == 16 and losses[0] == pytest.approx(losses[1], abs=1e-4, rel=0)


@pytest.mark.fault(10)
def test_number_of_ranks_that_does_not_divide_the_batch(finished, tmp_path):
    """Exit 2 with the batch and the ranks; the run is unchanged."""
    assert "3 ranks" in ranks(tmp_path, 3, ["--resume", "--out", str(finished)], code=2)
