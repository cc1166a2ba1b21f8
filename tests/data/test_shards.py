"""Tar shards are read by offset; members that are not plain files or point outside are skipped."""

from __future__ import annotations

import pytest
import torch

from kontrast.data import open_data
from kontrast.data.shards import expand
from kontrast.errors import DataError, UsageError

from support.made_images import encoded, picture, shard_samples, write_tar


@pytest.fixture
def shards(tmp_path):
    for number in range(3):
        write_tar(tmp_path / f"train-{number:04d}.tar", shard_samples(10 * number, 10))
    return tmp_path


def test_a_folder_a_pattern_and_a_file_give_the_same_shards(shards):
    whole = open_data(shards, "all")
    assert len(whole) == 30 and whole.labels.tolist() == [i % 3 for i in range(30)]
    assert torch.equal(whole.images, open_data(f"{shards}/train-{{0000..0002}}.tar", "all").images)
    assert len(open_data(shards / "train-0001.tar", "all")) == 10
    for i in (0, 17, 29):
        expected = torch.frombuffer(bytearray(picture(i).tobytes()), dtype=torch.uint8).view(16, 16, 3).permute(2, 0, 1)
        assert torch.equal(whole.images[i], expected)
    assert len(open_data(shards, "train")) + len(open_data(shards, "test")) == 30


def test_shards_with_the_same_name_in_two_folders_keep_their_labels_and_names(tmp_path):
    for part in range(2):
        (tmp_path / f"part{part}").mkdir()
        members = [(f"{i}.png", encoded(picture(10 * part + i), "PNG")) for i in range(4)]
        write_tar(tmp_path / f"part{part}" / "0.tar", [*members, *((f"{i}.cls", str(part).encode()) for i in range(4))])
    images = open_data(f"{tmp_path}/part{{0..1}}/0.tar", "all")
    assert images.labels.tolist() == [0] * 4 + [1] * 4
    assert list(images.names) == [f"part{part}/0.tar/{i}.png" for part in range(2) for i in range(4)]


def test_a_folder_with_images_and_an_archive_is_refused(shards):
    """The archive may be the one that the images were unpacked from, so reading only its members would be wrong."""
    (shards / "train" / "cat").mkdir(parents=True)
    assert len(open_data(shards, "all")) == 30
    picture(0).save(shards / "train" / "cat" / "1.png")
    with pytest.raises(DataError, match=r"shards \(train-000..tar\) and images \(train/cat/1.png\)"):
        open_data(shards)
    assert len(open_data(f"{shards}/train-{{0000..0002}}.tar", "all")) == 30


def test_missing_shards_and_commands_are_refused(tmp_path):
    with pytest.raises(DataError, match="2 of 2 shards"):
        open_data(f"{tmp_path}/x-{{0..1}}.tar")
    with pytest.raises(UsageError, match="commands are not run"):
        open_data("pipe:touch owned; cat x.tar")
    assert expand("a-{08..11}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    with pytest.raises(UsageError, match=r"0\.\.99999999999"):
        expand("a-{0..99999999999}.tar")
