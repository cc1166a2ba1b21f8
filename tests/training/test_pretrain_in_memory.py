"""Pretraining on images in memory: packed into the run folder, resumed and probed like a folder of images."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import kontrast
from kontrast.data import open_data
from kontrast.errors import DataError, KontrastError, UsageError
from kontrast.runs.run import Run
from kontrast.training.pretrain import pretrain

TINY = {
    "encoder": {"name": "small-conv", "width": 8},
    "head.outputs": 8,
    "views": {"size": 16, "policy": "digits"},
    "training": {"batch": 8, "max_steps": 4, "log_every": 1, "schedule": "constant"},
}


def pixels(count: int = 40, channels: int = 3, side: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, channels, side, side), dtype=torch.uint8, generator=generator)


class Labeled(torch.utils.data.Dataset):
    """A map-style dataset with labels of two classes."""

    classes = ("dark", "bright")

    def __init__(self, images: torch.Tensor):
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if i >= len(self):
            raise IndexError(i)
        return self.images[i], i % 2


def train(data, path, **options):
    return pretrain(data, out=path, overrides=TINY, device="cpu", say=lambda _: None, **options)


def weights(run) -> bytes:
    return (run / "encoder.safetensors").read_bytes()


@pytest.mark.parametrize("convert", [lambda x: x, lambda x: x.numpy(), list], ids=["tensor", "array", "list"])
def test_images_in_memory_train_and_are_stored_in_the_run(tmp_path, convert):
    run = train(convert(pixels()), tmp_path / "run")
    recipe = Run(run).recipe
    assert recipe.data.source == str(run / "images") and recipe.encoder.name == "small-conv"
    assert torch.equal(torch.as_tensor(np.asarray(open_data(run / "images").images)), pixels())
    assert json.loads((run / "run.json").read_text())["data"]["images"] == 40


def test_a_run_in_memory_resumes_to_the_same_bits_from_another_folder(tmp_path, monkeypatch):
    """With and without the images, and refused if their number is another one."""
    monkeypatch.chdir(tmp_path)
    longer = {"overrides": {"training.max_steps": 6}, "device": "cpu", "say": lambda _: None}
    whole = pretrain(pixels(), out="whole", overrides={**TINY, "training": {**TINY["training"], "max_steps": 6}},
                     device="cpu", say=lambda _: None)  # fmt: skip
    expected = weights(tmp_path / whole)
    for name, again in (("first", None), ("second", pixels())):
        train(pixels(), name)
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / "elsewhere")
        run = pretrain(again, out=tmp_path / name, resume=True, **longer)
        assert weights(run) == expected
        steps = [json.loads(line).get("step") for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert steps[-1] == 6
        monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="40 images, not 8"):
        pretrain(pixels(8), out="first", resume=True, device="cpu")


def test_labels_of_a_dataset_serve_the_probes(tmp_path):
    """A share of each class is held out by hash, as for a folder of classes."""
    from kontrast.runs import probe

    run = train(Labeled(pixels(80)), tmp_path / "run")
    train_set, test_set = open_data(run / "images", "train"), open_data(run / "images", "test")
    assert len(train_set) + len(test_set) == 80 and len(test_set) > 8
    assert list(test_set.classes) == ["dark", "bright"]
    verb = getattr(probe, "probe", None) or probe.evaluate
    results = verb(Run(run), "knn", device="cpu", say=lambda _: None)
    assert results and 0 <= results[0].accuracy <= 1
    undivided = pretrain(Labeled(pixels(40)), out=tmp_path / "all", overrides={**TINY, "data.test_share": 0.0},
                         device="cpu", say=lambda _: None)  # fmt: skip
    assert len(open_data(undivided / "images")) == 40


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (torch.rand(9, 3, 16, 16), "float32"),
        (np.zeros((9, 3, 16), np.uint8), r"\[9, 3, 16\]"),
        (np.zeros((9, 16, 16, 3), np.uint8), r"\[9, 16, 16, 3\]"),
        (pixels(1), "1 image"),
        (3, "int"),
    ],
    ids=["float", "three dimensions", "channels last", "one image", "no data"],
)
def test_what_is_no_set_of_images_is_refused_and_leaves_no_folder(tmp_path, data, word):
    with pytest.raises(KontrastError, match=word) as caught:
        train(data, tmp_path / "run")
    assert isinstance(caught.value, DataError | UsageError) and "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_without_a_recipe_images_in_memory_get_the_folder_recipe(tmp_path):
    said: list[str] = []
    run = kontrast.pretrain(
        pixels(64, 1, 20), out=tmp_path / "run", device="cpu", say=said.append, **{"training.max_steps": 1}
    )
    assert run.recipe.views.size == 32 and run.recipe.adapt is False
    assert any("64" in line for line in said)
