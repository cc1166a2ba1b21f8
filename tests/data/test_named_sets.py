"""Named sets are read from small files in the official layout, and from the real MNIST if it is in ../shared/data."""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest

from kontrast.config.recipe_files import resolve
from kontrast.data import open_data
from kontrast.data.named_sets import IMAGENET100
from kontrast.errors import DataError, UsageError
from kontrast.training.splits import open_split

from support.made_images import picture

SHARED = Path(__file__).parents[3] / "shared" / "data"
RANDOM = np.random.default_rng(0)


def tarred(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def records(count: int, head: list[list[int]], width: int) -> tuple[bytes, np.ndarray]:
    pixels = RANDOM.integers(0, 256, (count, width), dtype=np.uint8)
    return np.concatenate([np.array(head, dtype=np.uint8), pixels], axis=1).tobytes(), pixels


@pytest.mark.parametrize("unpacked", [False, True])
def test_cifar10_is_read_from_its_archive_or_unpacked(tmp_path, unpacked):
    files, pixels = {}, []
    for batch in range(1, 6):
        content, part = records(4, [[i] for i in range(4)], 3072)
        files[f"cifar-10-batches-bin/data_batch_{batch}.bin"] = content
        pixels.append(part)
    files["cifar-10-batches-bin/test_batch.bin"] = records(3, [[9]] * 3, 3072)[0]
    if unpacked:
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(content)
    else:
        tarred(tmp_path / "cifar-10-binary.tar.gz", files)
    train = open_data("cifar10", root=tmp_path)
    np.testing.assert_array_equal(train.images, np.concatenate(pixels).reshape(-1, 3, 32, 32))
    assert train.labels.tolist() == [0, 1, 2, 3] * 5 and train.classes[9] == "truck"
    assert open_data("cifar10", "test", root=tmp_path).labels.tolist() == [9] * 3


def test_cifar100_uses_the_fine_label(tmp_path):
    content, _ = records(4, [[1, 77], [2, 5], [3, 99], [4, 0]], 3072)
    tarred(tmp_path / "cifar-100-binary.tar.gz", {"cifar-100-binary/train.bin": content})
    assert open_data("cifar100", root=tmp_path).labels.tolist() == [77, 5, 99, 0]


def test_stl10_files_are_column_major_and_their_labels_start_at_one(tmp_path):
    image = RANDOM.integers(0, 256, (2, 3, 96, 96), dtype=np.uint8)
    place = tmp_path / "stl10_binary"
    place.mkdir()
    (place / "train_X.bin").write_bytes(np.ascontiguousarray(image.transpose(0, 1, 3, 2)).tobytes())
    (place / "train_y.bin").write_bytes(bytes([1, 10]))
    (place / "unlabeled_X.bin").write_bytes(image.tobytes())
    train = open_data("stl10", root=tmp_path)
    np.testing.assert_array_equal(train.images, image)
    assert train.labels.tolist() == [0, 9]
    both = open_data("stl10", "train+unlabelled", root=tmp_path)
    assert len(both) == 4 and both.labels is None
    data = resolve("stl10/cl", [f'data.root="{tmp_path}"']).data
    assert len(open_split(data, "train", pretraining=True)) == 4 and len(open_split(data, "train")) == 2


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes() + array.tobytes()


@pytest.mark.parametrize(
    ("name", "folder", "zipped"), [("mnist", "mnist", True), ("fashion-mnist", "FashionMNIST/raw", False)]
)
def test_mnist_is_read_from_every_layout(tmp_path, name, folder, zipped):
    images = RANDOM.integers(0, 256, (5, 28, 28), dtype=np.uint8)
    place = tmp_path / folder
    place.mkdir(parents=True)
    for file, array in (("train-images-idx3-ubyte", images), ("train-labels-idx1-ubyte", np.arange(5, dtype=np.uint8))):
        (place / (file + ".gz" * zipped)).write_bytes(gzip.compress(idx(array)) if zipped else idx(array))
    found = open_data(name, root=tmp_path)
    np.testing.assert_array_equal(found.images[:, 0], images)
    assert found.labels.tolist() == [0, 1, 2, 3, 4] and found.channels == 1


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (((5, 28, 28), (4,)), "mnist has 4 labels but 5 images"),
        (((5, 28), (5,)), "train-images-idx3-ubyte is damaged"),
        (((5, 28, 28), (5, 1)), "train-labels-idx1-ubyte is damaged"),
    ],
    ids=["counts", "images", "labels"],
)
def test_mnist_files_that_do_not_match_are_refused(tmp_path, arrays, words):
    for file, shape in zip(("train-images-idx3-ubyte", "train-labels-idx1-ubyte"), arrays):
        (tmp_path / file).write_bytes(idx(np.zeros(shape, dtype=np.uint8)))
    with pytest.raises(DataError, match=words):
        open_data("mnist", root=tmp_path)


def test_a_damaged_archive_is_refused(tmp_path):
    content = bytearray(gzip.compress(idx(RANDOM.integers(0, 256, (5, 28, 28), dtype=np.uint8))))
    content[10:30] = b"\xff" * 20
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz is damaged"):
        open_data("mnist", root=tmp_path)


def test_stl10_with_fewer_labels_than_images_is_refused(tmp_path):
    (tmp_path / "train_X.bin").write_bytes(bytes(3 * 3 * 96 * 96))
    (tmp_path / "train_y.bin").write_bytes(bytes([1, 2]))
    with pytest.raises(DataError, match="stl10 has 2 labels but 3 images"):
        open_data("stl10", root=tmp_path)


def test_real_mnist():
    if not (SHARED / "mnist").is_dir():
        pytest.skip("no MNIST in ../shared/data")
    train = open_data("mnist", root=SHARED)
    assert train.images.shape == (60_000, 1, 28, 28) and train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert len(open_data("mnist", "test", root=SHARED)) == 10_000


def test_imagenet100_has_the_classes_of_cmc():
    """The order is that of CMC's list; the list in the JCL paper has two typos."""
    assert all(re.fullmatch(r"n\d{8}", name) for name in IMAGENET100)
    found = hashlib.sha256(" ".join(IMAGENET100).encode()).hexdigest()
    assert found == "fa2b1926ad6f96fb2011dfd8e1621f1d1c1014144cbb3465ee1579cb042df394"


def test_imagenet100_numbers_its_classes_in_the_order_of_the_list(tmp_path):
    assert len(set(IMAGENET100)) == 100 and {"n03777754", "n03930630"} <= set(IMAGENET100)
    for part in ("train", "val"):
        for name in [*IMAGENET100, "n99999999"]:
            place = tmp_path / "imagenet" / part / name
            place.mkdir(parents=True)
            picture(1, 8, 8).save(place / "x.JPEG")
    found = open_data("imagenet100", root=tmp_path)
    assert len(found) == 100 and found.classes == IMAGENET100
    for name, label in zip(found.names, found.labels.tolist()):
        assert name.startswith(IMAGENET100[label])
    assert len(open_data("imagenet", "test", root=tmp_path)) == 101


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "stl10", "mnist", "fashion-mnist", "imagenet", "imagenet100"])
def test_the_error_for_a_missing_set_says_what_to_fetch_and_where(name, tmp_path, monkeypatch):
    monkeypatch.setenv("KONTRAST_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"fetch .* from http") as caught:
        open_data(name)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_damaged_files_and_unknown_splits_are_errors(tmp_path):
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"not a tar")
    with pytest.raises(DataError, match="damaged"):
        open_data("cifar10", root=tmp_path)
    with pytest.raises(UsageError, match="did you mean 'test'"):
        open_data("digits", "tset")
    with pytest.raises(UsageError, match="did you mean 'unlabelled'"):
        open_data("stl10", "unlabeled", root=tmp_path)
