"""Images in memory become a packed store that opens like any other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from kontrast.data import open_data
from kontrast.data.in_memory import pack_in_memory
from kontrast.errors import DataError, UsageError

from support.made_images import picture


class Labelled:
    """A map-style dataset of (PIL image, label) with class names."""

    classes = ("cat", "dog")

    def __init__(self, count: int = 10, ragged: bool = False):
        self.count, self.ragged = count, ragged

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        return picture(index, 12 + index % 3 if self.ragged else 12, 14), index % 2


def random_images(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_tensor_and_an_array_give_the_same_store(tmp_path, channels):
    images = random_images(5, channels, 8, 9)
    stores = [pack_in_memory(images, tmp_path / "a"), pack_in_memory(images.numpy(), tmp_path / "b")]
    opened = [open_data(store) for store in stores]
    assert all(torch.equal(one.images, images) for one in opened)
    assert opened[0].fingerprint == opened[1].fingerprint
    assert opened[0].labels is None and not opened[0].has_test


@pytest.mark.parametrize("ragged", [False, True])
def test_a_labelled_dataset_is_held_out_like_a_folder(tmp_path, ragged):
    dataset = Labelled(ragged=ragged)
    store = pack_in_memory(dataset, tmp_path / "store")
    train, test = open_data(store), open_data(store, "test")
    assert (len(train), len(test)) == (8, 2) and train.has_test and train.classes == ["cat", "dog"]
    assert train.fingerprint != test.fingerprint
    for part in (train, test):
        for position, name in enumerate(part.names):
            image, label = dataset[int(name)]
            assert part.labels[position] == label
            assert torch.equal(part.images[position], torch.from_numpy(np.array(image)).permute(2, 0, 1))
    assert len(open_data(pack_in_memory(dataset, tmp_path / "whole", test_share=0))) == 10


def test_every_kind_of_item_is_read(tmp_path):
    pixels = random_images(3, 6, 7)
    items = [pixels, pixels.numpy(), pixels.permute(1, 2, 0).numpy(), Image.fromarray(pixels.permute(1, 2, 0).numpy())]
    items += [(pixels,), (pixels, {"boxes": []}), [pixels, -1]]
    opened = open_data(pack_in_memory(items, tmp_path / "store"))
    assert len(opened) == 7 and opened.labels is None
    assert all(torch.equal(image, pixels) for image in opened.images)
    gray = open_data(pack_in_memory([pixels[0], pixels[1].numpy()], tmp_path / "gray"))
    assert torch.equal(gray.images, pixels[:2, None])


def test_labels_may_be_numpy_or_tensor_numbers(tmp_path):
    pixels = random_images(3, 6, 7)
    items = [(pixels, np.int64(0)), (pixels, torch.tensor(2)), (pixels, 0), (pixels, 2)]
    opened = open_data(pack_in_memory(items, tmp_path / "store", test_share=0))
    assert opened.labels.tolist() == [0, 2, 0, 2] and opened.classes == ["0", "1", "2"]


def test_the_same_images_are_kept_and_others_replace_them(tmp_path):
    images = random_images(4, 3, 8, 8)
    store = pack_in_memory(images, tmp_path / "store")
    before = (store / "train" / "store.json").stat()
    pack_in_memory(images, store)
    assert (store / "train" / "store.json").stat().st_ino == before.st_ino
    pack_in_memory(Labelled(), store)
    assert open_data(store, "test").has_test
    pack_in_memory(255 - images, store)
    assert torch.equal(open_data(store).images, 255 - images) and not (store / "test").exists()


@pytest.mark.parametrize(
    ("images", "facts"),
    [
        (torch.rand(4, 3, 8, 8), ["float32", "uint8"]),
        (np.zeros((4, 3, 8, 8)), ["float64", "uint8"]),
        (random_images(4, 8, 8), ["[4, 8, 8]", "[N,C,H,W]"]),
        (random_images(4, 8, 8, 3), ["[4, 8, 8, 3]", "permute"]),
        (random_images(0, 3, 8, 8), ["[0, 3, 8, 8]", "one image or more"]),
        ([], ["0 items"]),
        ([random_images(3, 8, 8), torch.rand(3, 8, 8)], ["item 1", "float32"]),
        ([random_images(5, 8, 8)], ["item 0", "[5, 8, 8]"]),
        ([random_images(3, 8, 8), random_images(1, 8, 8)], ["item 1", "1 channel", "item 0"]),
        ([{"image": random_images(3, 8, 8)}], ["item 0", "dict"]),
        ([Image.fromarray(np.zeros((4, 4), dtype=np.float32))], ["item 0", "float"]),
    ],
)
def test_items_that_are_not_images_are_refused(tmp_path, images, facts):
    with pytest.raises(DataError) as error:
        pack_in_memory(images, tmp_path / "store")
    assert all(fact in str(error.value) for fact in facts), error.value
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("data", [3, {"a": 1}, iter([]), object()])
def test_data_that_is_not_a_dataset_is_refused(tmp_path, data):
    with pytest.raises(UsageError, match="map-style"):
        pack_in_memory(data, tmp_path / "store")
