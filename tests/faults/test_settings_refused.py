"""Settings that can't have their effect are refused, not rounded or ignored."""

from __future__ import annotations

import shutil
from functools import partial

import pytest
import torch
from PIL import Image

from kontrast.cli import main as cli
from kontrast.data import open_data
from kontrast.data.pack import pack

from support.command_line import kontrast, one_line
from support.commands import TINY, Command, free_port, rank_environment

FAST = [*TINY, "training.max_steps=2", "--recipe", "quickstart", "--device", "cpu", "--no-probes"]


@pytest.mark.fault(48)
@pytest.mark.parametrize(("splits", "parts"), [(3, 2), (2, 4)])
def test_splits_that_the_accumulated_parts_do_not_divide(tmp_path, splits, parts):
    """Exit 2 with the numbers, instead of splits of another size; there is no run."""
    settings = ["batch_norm.kind=split", f"batch_norm.splits={splits}", f"training.accumulate={parts}"]
    done = kontrast("pretrain", *FAST, *settings, "--out", str(tmp_path / "run"))
    one_line(done, 2, f"batch_norm.splits = {splits}", f"a multiple of {parts}")
    assert not (tmp_path / "run").exists()


@pytest.mark.fault(48)
def test_splits_that_the_ranks_do_not_divide(tmp_path):
    """Exit 2 on both ranks; there is no run."""
    port = free_port()
    argv = ["pretrain", *FAST, "batch_norm.kind=split", "batch_norm.splits=3", "--out", str(tmp_path / "run")]
    start = partial(Command, instead=partial(cli.run, argv))
    for rank in [start(tmp_path / str(r), environment=rank_environment(r, 2, port)) for r in range(2)]:
        assert "2 ranks x 1 accumulated parts must divide it" in rank.ended(2)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def photos(tmp_path):
    """Images of 40 px in two classes."""
    made = torch.Generator().manual_seed(0)
    for number in range(40):
        folder = tmp_path / "photos" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(0, 256, (40, 40, 3), dtype=torch.uint8, generator=made)
        Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
    return tmp_path / "photos"


@pytest.mark.fault(51)
def test_size_of_images_that_are_packed_already(photos, tmp_path):
    """Exit 2 if data.size is smaller than the images of the store; packed with that size, the store trains."""
    pack(photos, tmp_path / "store")
    done = kontrast("pretrain", str(tmp_path / "store"), *FAST, "data.size=24", "--out", str(tmp_path / "run"))
    one_line(done, 2, "data.size=24 has no effect", "up to 40 px", "--size 24")
    assert not (tmp_path / "run").exists()
    pack(photos, tmp_path / "small", size=24)
    done = kontrast("pretrain", str(tmp_path / "small"), *FAST, "data.size=24", "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr


@pytest.mark.fault(51)
def test_size_of_images_in_a_named_set(tmp_path):
    """Exit 2: the digits have 32 px and can't be reduced."""
    done = kontrast("pretrain", "digits", *FAST, "data.size=16", "--out", str(tmp_path / "run"))
    one_line(done, 2, "data.size=16 has no effect", "up to 32 px")


@pytest.mark.fault(51)
def test_the_default_recipe_of_a_store_of_large_images_sets_no_size(photos, tmp_path):
    """It trains: a setting that the recipe would choose by itself is left out."""
    for path in photos.rglob("*.png"):
        Image.open(path).resize((200, 200)).save(path)
    pack(photos, tmp_path / "store")
    options = ["training.max_steps=1", "encoder.width=8", "evaluation.every=0", "--device", "cpu", "--no-probes"]
    done = kontrast("pretrain", str(tmp_path / "store"), *options, "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "size = 0" in (tmp_path / "run" / "recipe.toml").read_text()


@pytest.mark.fault(52)
def test_store_packed_again_without_a_test_part(photos, tmp_path):
    """The old test part, whose images are now trained on, is gone; leftovers of a kill in between are removed too."""
    store = tmp_path / "store"
    assert len(pack(photos, store)) == 2
    held_out = set(open_data(store, "test").names)
    (store / "test.replaced").mkdir()
    shutil.copytree(store / "test", store / ".del-test")
    assert [path.name for path in pack(photos, store, test_share=0)] == ["train"]
    train = open_data(store, "train")
    assert held_out <= set(train.names) and not train.has_test
    assert sorted(path.name for path in store.iterdir()) == ["train", "train.lock"]
    assert len(pack(photos, store)) == 2 and set(open_data(store, "test").names) == held_out
