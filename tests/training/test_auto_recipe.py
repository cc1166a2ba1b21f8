"""The settings that are chosen for a folder of images."""

import pytest
import torch
from PIL import Image

from kontrast.config.recipe_files import resolve
from kontrast.training.auto_recipe import adapt
from kontrast.training.resolve import fresh_recipe


@pytest.mark.parametrize("side", [32, 70])
def test_small_images_on_a_gpu_get_what_was_best_on_cifar10(side):
    """The settings of cifar10/simclr, whose header and results/README.md say what was measured."""
    best, folder = resolve("cifar10/simclr"), resolve("folder").training
    chosen = adapt(50_000, side, torch.device("cuda"))
    assert chosen["views"] == {"size": chosen["views"]["size"], "policy": best.views.policy, **best.views.arguments}
    assert chosen["training"]["batch"] == best.training.batch
    assert chosen["training"]["weight_decay"] == best.training.weight_decay
    assert (folder.lr, folder.lr_scaling) == (best.training.lr, best.training.lr_scaling)


@pytest.mark.parametrize("count", [300, 5_000, 1_000_000])
def test_the_warm_up_is_ten_epochs_or_a_tenth(count):
    training = adapt(count, 224, torch.device("cuda"))["training"]
    assert training["warmup"] == min(10, training["epochs"] / 10)


def test_a_view_size_of_the_user_decides_what_images_are_reduced_to(tmp_path):
    for i in range(8):
        Image.new("RGB", (320, 240), (30 * i, 0, 0)).save(tmp_path / f"{i}.png")
    recipe, _ = fresh_recipe(str(tmp_path), None, ["views.size=128"], torch.device("cpu"), lambda _: None)
    assert (recipe.views.size, recipe.views.policy, recipe.data.size) == (128, "moco-v2", 146)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ([], "cacr"),
        (["views.count=3"], "cacr"),
        (["objective.temperature=0.5"], "nt-xent"),
        (["objective.name=dcl"], "dcl"),
    ],
)
def test_on_a_cpu_the_objective_is_chosen_unless_the_user_sets_one(tmp_path, asked, name):
    for i in range(8):
        Image.new("RGB", (40, 40), (30 * i, 0, 0)).save(tmp_path / f"{i}.png")
    said: list[str] = []
    recipe, _ = fresh_recipe(str(tmp_path), None, asked, torch.device("cpu"), said.append)
    assert recipe.objective.name == name
    assert any(f"-> {name}, encoder small-conv, batch" in line for line in said)
    assert "objective" not in adapt(8, 40, torch.device("cuda"))


def test_a_recipe_based_on_folder_keeps_its_objective(tmp_path):
    (tmp_path / "mine.toml").write_text('base = "folder"\nobjective = { name = "dcl", temperature = 0.3 }\n')
    (tmp_path / "photos").mkdir()
    for i in range(8):
        Image.new("RGB", (40, 40), (30 * i, 0, 0)).save(tmp_path / "photos" / f"{i}.png")
    recipe, _ = fresh_recipe(
        str(tmp_path / "photos"), str(tmp_path / "mine.toml"), [], torch.device("cpu"), lambda _: None
    )
    assert (recipe.objective.name, recipe.objective.arguments["temperature"]) == ("dcl", 0.3)
