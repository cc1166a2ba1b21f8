"""A run that is resumed with other files says which of them changed."""

from __future__ import annotations

import json
import os

import pytest
from PIL import Image

from kontrast.data import file_listing, open_data
from kontrast.data.changes import changes
from kontrast.errors import DataError


def change(root) -> None:
    """Add two files, remove one, touch one and change the pixels of one."""
    Image.new("RGB", (16, 16)).save(root / "new.png")
    Image.new("RGB", (16, 16)).save(root / 'q"uote\n.png')
    (root / "0003.png").unlink()
    os.utime(root / "0005.png", ns=(7, 7))
    Image.new("RGB", (16, 16)).save(root / "0006.png")


@pytest.mark.parametrize("way", ["memory", "store", "lazy"])
def test_added_removed_and_modified_files_are_named(make_folder, monkeypatch, way):
    monkeypatch.setattr("kontrast.data.sources.IN_MEMORY", 1 if way == "store" else 1000)
    monkeypatch.setattr("kontrast.data.sources._free_memory", lambda: 1000 if way == "lazy" else 1 << 40)
    root = make_folder(classes=1, each=12)
    before = file_listing(open_data(root, pack=way != "lazy"))
    assert changes(before, open_data(root, pack=way != "lazy")) == ([], [], [])
    change(root)
    found = changes(before, open_data(root, pack=way != "lazy"))
    assert found.added == ["new.png", 'q"uote\n.png']
    assert found.removed == ["0003.png"] and found.modified == ["0005.png", "0006.png"]
    assert str(found) == r'2 added (new.png, q"uote\n.png), 1 removed (0003.png), 2 modified (0005.png, 0006.png)'


def test_only_the_first_names_of_many_are_shown(make_folder):
    root = make_folder(classes=1, each=30)
    before = file_listing(open_data(root))
    for number in range(20):
        (root / f"{number:04d}.png").unlink()
    assert str(changes(before, open_data(root))) == "20 removed (0000.png, 0001.png, 0002.png, ...)"


def test_a_subset_has_its_own_listing_and_a_synthetic_set_has_none(make_folder):
    images = open_data(make_folder(classes=1, each=5))
    part = images.subset([3, 1])
    assert changes(file_listing(part), images).added == ["0000.png", "0002.png", "0004.png"]
    assert file_listing(open_data("digits", "test")) is None
    with pytest.raises(DataError, match="damaged"):
        changes(file_listing(images)[:-9], images)


def test_a_resumed_run_names_the_changes_and_can_accept_them(make_folder, tmp_path):
    from kontrast.training.pretrain import pretrain

    root, out = make_folder(classes=1, each=40), tmp_path / "run"
    tiny = ["training.batch=16", "encoder.width=16", "views.size=16", "head.outputs=16", "training.epochs=1"]

    def go(**options) -> None:
        pretrain(out=out, device="cpu", say=lambda _: None, **options)

    go(data=root, overrides=tiny)
    assert 0 < (out / "files.txt.gz").stat().st_size < 2000
    go(resume=True)
    change(root)
    message = (
        r"changed since the run began, 40 then, 41 now: 2 added \(new.png.*1 removed \(0003.png\), 2 modified \(0005"
    )
    with pytest.raises(DataError, match=message):
        go(resume=True)
    go(resume=True, accept_data_change=True)
    info = json.loads((out / "run.json").read_text())
    assert info["data"]["images"] == 41 and info["data_before"]["images"] == 40
    go(resume=True)
