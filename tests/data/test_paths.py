"""What a data source means is decided once, for every kind of source."""

from __future__ import annotations

import pytest

from kontrast.data import open_data
from kontrast.data.pack import pack
from kontrast.data.paths import describe_source
from kontrast.data.sources import preview_data
from kontrast.errors import DataError, UsageError

from support.made_images import folder_of, picture, png_members, write_tar


def test_every_kind_of_source_is_recognized(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path / "flat", 3)
    folder_of(tmp_path / "one" / "train", 3)
    folder_of(tmp_path / "both" / "train", 3)
    folder_of(tmp_path / "both" / "val", 3)
    (tmp_path / "shards").mkdir()
    write_tar(tmp_path / "shards" / "0.tar", png_members(2))
    pack("flat", "store")
    kinds = {
        None: "named", "digits": "named", "cifar10": "named", "flat": "folder", "one": "train folder",
        "both": "split folder", "shards": "shards", "shards/0.tar": "shards", "x-{0..3}.tar": "shards",
        "store": "store", "store/train": "store split", "nowhere": "missing", "flat/0000.png": "missing",
    }  # fmt: skip
    assert {spec: describe_source(spec).kind for spec in kinds} == kinds
    assert describe_source("both").tests == ("val",)
    assert describe_source("flat").place == str(tmp_path / "flat") and describe_source("digits").place is None
    with pytest.raises(UsageError, match="packed store already"):
        pack("store", "again")


def test_folders_beside_train_are_reported_as_not_read(tmp_path):
    for name in ("train", "bus", "tram"):
        folder_of(tmp_path / name, 1)
    (tmp_path / "notes").mkdir()
    source = describe_source(tmp_path)
    assert source.kind == "train folder" and source.unread_folders() == ["bus", "tram"]


@pytest.mark.parametrize("kind", ["folder", "shards"])
@pytest.mark.parametrize("size", [None, 12])
def test_a_preview_has_the_size_of_the_opened_images_without_decoding(tmp_path, monkeypatch, kind, size):
    root = tmp_path / "images"
    root.mkdir()
    for number, side in enumerate((10, 14, 16, 18)):
        picture(number, side, 20).save(root / f"{number}.png")
    (root / "4.png").write_bytes(b"nothing")
    if kind == "shards":
        members = [(path.name, path.read_bytes()) for path in sorted(root.iterdir())]
        root = write_tar(tmp_path / "0.tar", members)
    opened = open_data(root, size=size, max_bad=0.5)
    monkeypatch.setattr("kontrast.data.decode.pixels_of", lambda *_: pytest.fail("decoded"))
    preview = preview_data(root, size=size)
    assert preview.side == opened.typical_side == (12 if size else 14)
    assert preview.count == 5 and preview.images is None


def test_a_preview_without_readable_images_gives_the_reason(tmp_path):
    (tmp_path / "1.png").write_bytes(b"<html>")
    (tmp_path / "2.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"none of the 2 images .*1.png .*HTML"):
        preview_data(tmp_path)


def test_a_preview_returns_images_that_need_no_decoding(tmp_path):
    pack(folder_of(tmp_path / "images", 4), tmp_path / "store")
    preview = preview_data(tmp_path / "store")
    assert preview.images is not None and preview.count == len(preview.images) == 4
