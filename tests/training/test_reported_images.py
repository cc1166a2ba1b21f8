"""What `pretrain` reports about the images and the length of a run."""

from __future__ import annotations

import pytest
from PIL import Image

from kontrast.config.recipe import TrainingSettings
from kontrast.config.recipe_files import resolve
from kontrast.data.pack import pack
from kontrast.training import progress
from kontrast.training.auto_recipe import describe_folder, describe_length, unread_folders
from kontrast.training.pretrain import bank_warnings
from kontrast.training.progress import PackingBar, Progress
from kontrast.training.splits import open_split

from support.made_images import encoded, write_tar


def test_labels_and_other_files_of_a_folder_are_reported(tmp_path):
    for name in [f"{album}/{n}.png" for album in ("2021 sea", "garden") for n in range(10)] + ["garden/10.heic"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name, format="PNG")
    recipe = resolve("folder", [f'data.source="{tmp_path}"', "data.pack=false"])
    labels, others = describe_folder(recipe, open_split(recipe.data, "train"))
    assert "2 sub-folders (2021 sea, garden)" in labels and "held out" in labels and "data.test_share=0" in labels
    assert "1 other files" in others and "jpg" in others
    whole = resolve("folder", [f'data.source="{tmp_path}"', "data.pack=false", "data.test_share=0.0"])
    labels, _ = describe_folder(whole, open_split(whole.data, "train"))
    assert "held out" not in labels


def folder_of(root, *names):
    for name in [f"{name}/{n}.png" for name in names for n in range(4)]:
        (root / name).parent.mkdir(exist_ok=True, parents=True)
        Image.new("RGB", (8, 8)).save(root / name)
    return resolve("folder", [f'data.source="{root}"', "data.pack=false"])


def test_a_class_called_test_is_reported_as_a_class(tmp_path):
    recipe = folder_of(tmp_path, "bus", "test", "tram")
    (labels,) = describe_folder(recipe, open_split(recipe.data, "train"))
    assert "3 sub-folders (bus, test, tram)" in labels and "held out" in labels and unread_folders(recipe) == []


def test_folders_beside_one_called_train_are_reported(tmp_path):
    """A class of that name would silently exclude the other classes."""
    (line,) = unread_folders(folder_of(tmp_path / "a", "bus", "train", "tram"))
    assert line.startswith("not read: bus, tram beside ") and "rename it" in line
    recipe = folder_of(tmp_path / "b", "train/x", "train/y", "test/x", "val/y")
    (tmp_path / "b" / "notes").mkdir()
    assert unread_folders(recipe) == [] == describe_folder(recipe, open_split(recipe.data, "train"))
    recipe = folder_of(tmp_path / "c", "train/x", "train/y")
    assert "2 sub-folders (x, y)" in describe_folder(recipe, open_split(recipe.data, "train"))[0]


@pytest.mark.parametrize(
    ("steps", "words"), [(0, "epochs: 5 (about 500"), (6, "steps: 6 (about 60 "), (99, "epochs: 5 (about 500")]
)
def test_the_limit_that_ends_the_training_is_reported(steps, words):
    line = describe_length(TrainingSettings(epochs=5, batch=10, max_steps=steps), 100)
    assert line.startswith(words) and f"training.{'max_steps' if steps == 6 else 'epochs'}=N" in line


def test_labels_of_shards_and_stores_are_not_sub_folders(tmp_path):
    pictures = [(f"{n}.png", encoded(Image.new("RGB", (8, 8)), "PNG")) for n in range(20)]
    (tmp_path / "shards").mkdir()
    write_tar(tmp_path / "shards" / "0.tar", [*pictures, *((f"{n}.cls", str(n % 2).encode()) for n in range(20))])
    pack(tmp_path / "shards", tmp_path / "store")
    for source in (tmp_path / "shards", tmp_path / "store" / "train"):
        recipe = resolve("folder", [f'data.source="{source}"', "data.pack=false"])
        images = open_split(recipe.data, "train")
        assert images.classes == ["0", "1"] and describe_folder(recipe, images) == []


def test_each_packed_split_has_its_own_bar(monkeypatch):
    """300 train images and then 60 of test: the first bar does not go back to 60."""
    opened = []

    class Watched(Progress):
        def __enter__(self):
            opened.append(self)
            return super().__enter__()

    monkeypatch.setattr(progress, "Progress", Watched)
    with PackingBar("pack") as bar:
        for done, total in ((100, 300), (300, 300), (40, 60), (60, 60)):
            bar(done, total)
    assert [(one.done, one.total) for one in opened] == [(300, 300), (60, 60)]


def test_a_bank_without_a_teacher_is_reported():
    said = []
    for more in (["bank.size=20"], ["bank.size=20", "teacher.momentum=0.9"]):
        said += bank_warnings(resolve("cifar10/simclr", more), 100)
    assert len(said) == 1 and "the student's own rows" in said[0]


@pytest.mark.parametrize(
    ("more", "rows"),
    [
        (["bank.contents=last"], 100),
        (["bank.contents=all"], 200),
        (["bank.contents=all", "views.count=4", "teacher.symmetric=false"], 300),
    ],
)
def test_a_bank_larger_than_an_epoch_is_reported(more, rows):
    for size in (rows, 2 * rows):
        said = []
        recipe = resolve("cifar10/simclr", ["teacher.momentum=0.9", f"bank.size={size}", *more])
        said += bank_warnings(recipe, 100)
        assert len(said) == (size > rows)
    assert "2.0 epochs of 100 images" in said[0] and f"bank.size={rows // 2} or fewer" in said[0]
