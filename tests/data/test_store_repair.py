"""An existing packed store is never replaced by an incomplete one or by one of other images."""

from __future__ import annotations

import json
import os
import threading

import pytest

from kontrast.data import open_data
from kontrast.data import store_writer as packing
from kontrast.data.pack import pack
from kontrast.data.store import MANIFEST, DamagedStore, digest_of, open_store
from kontrast.errors import DataError, EnvironmentFault

from support.command_line import kontrast
from support.made_images import QUICK, folder_of, picture, same_images

NOTE = "packed again after damage"


def damage(place):
    os.truncate(place / "images.u8", 100)


def contents(place):
    return {path.name: path.read_bytes() for path in place.iterdir()}


def test_a_damaged_store_is_packed_again_from_any_working_directory(tmp_path, monkeypatch):
    """The relative path of its source means other images in this working directory."""
    for number, home in enumerate(("here", "there")):
        for shade in range(10):
            place = tmp_path / home / "pictures"
            place.mkdir(parents=True, exist_ok=True)
            picture(100 * number + shade).save(place / f"{shade}.png")
    monkeypatch.chdir(tmp_path / "here")
    pack("pictures", tmp_path / "store")
    packed = contents(tmp_path / "store" / "train")
    damage(tmp_path / "store" / "train")
    monkeypatch.chdir(tmp_path / "there")
    said = []
    again = open_data(tmp_path / "store", say=said.append)
    assert same_images(again, open_data(tmp_path / "here" / "pictures")) and again.notes == {NOTE: 10}
    place, source = tmp_path / "store" / "train" / "images.u8", tmp_path / "here" / "pictures"
    assert said == [f"{place} is missing or cut; packed again from {source}: 10 train images"]
    assert contents(tmp_path / "store" / "train") == packed and not open_data(tmp_path / "store").notes


def test_a_damaged_store_is_packed_again_with_its_own_split_and_limits(tmp_path):
    """The size, share and split of the command that finds the damage do not matter."""
    root = folder_of(tmp_path / "pictures", 10, classes=2)
    _, test = pack(root, tmp_path / "store", size=8, test_share=0.4)
    packed = contents(test)
    damage(test)
    again = open_data(test, "all", size=12, test_share=0.1)
    assert len(again) == 8 and again.images.shape[-1] == 8 and NOTE in again.notes
    assert contents(test) == packed


def test_a_named_set_is_packed_again_from_its_own_root(tmp_path, monkeypatch):
    pack("digits", tmp_path / "store")
    damage(tmp_path / "store" / "test")
    monkeypatch.chdir(tmp_path)
    again = open_data(tmp_path / "store", "test")
    assert same_images(again, open_data("digits", "test")) and NOTE in again.notes


def flip(place):
    content = bytearray((place / "images.u8").read_bytes())
    content[700:703] = bytes(255 - value for value in content[700:703])
    (place / "images.u8").write_bytes(content)


def assert_repair_reported(done, part, count):
    """Assert that the command succeeded and reported the repair in one line."""
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "packed again" in line]
    assert len(lines) == 1 and lines[0].endswith(f": {count} {part} images"), done.stderr
    assert lines[0].startswith("the checksum of part 0 of ") and "pictures" in lines[0]


def test_the_command_that_finds_a_damaged_store_reports_the_repair(tmp_path):
    """It does so once, even if it opens the images twice; run.json and the report have it too."""
    pack(folder_of(tmp_path / "pictures", 20, classes=2), tmp_path / "store")
    store, run = tmp_path / "store", tmp_path / "run"
    begin = ("pretrain", str(store), *QUICK, "evaluation.every=1", "--no-probes", "--device", "cpu", "--out")
    flip(store / "train")
    assert_repair_reported(kontrast(*begin, str(run)), "train", 32)
    assert json.loads((run / "run.json").read_text())["data"][NOTE] == 32
    assert f"{NOTE} 32" in (run / "report.html").read_text()
    flip(store / "test")
    assert_repair_reported(kontrast(*begin, str(tmp_path / "other")), "test", 8)
    assert json.loads((tmp_path / "other" / "run.json").read_text())["data"][NOTE] == 8
    for part, count in (("train", 32), ("test", 8)):
        flip(store / part)
        assert_repair_reported(
            kontrast("embed", str(run), str(store), "--out", str(tmp_path / f"{part}.npy")), part, count
        )
        flip(store / part)
        assert_repair_reported(kontrast("probe", str(run), "knn", "--device", "cpu"), part, count)
    assert "packed again" not in kontrast("probe", str(run), "knn", "--device", "cpu").stderr


def test_a_damaged_store_is_not_packed_again_from_changed_images(tmp_path):
    root = folder_of(tmp_path / "pictures", 10)
    pack(root, tmp_path / "store")
    damage(tmp_path / "store" / "train")
    left = contents(tmp_path / "store" / "train")
    picture(77).save(root / "0003.png")
    with pytest.raises(DamagedStore, match=r"missing or cut: pack again .*pictures has other images now"):
        open_data(tmp_path / "store")
    assert contents(tmp_path / "store" / "train") == left
    pack(root, tmp_path / "store")
    assert same_images(open_data(tmp_path / "store"), open_data(root))


def test_a_damaged_store_of_an_older_version_is_not_packed_again(tmp_path):
    """It records only the name of its source, which may be ambiguous."""
    pack(folder_of(tmp_path / "pictures", 10), tmp_path / "store")
    manifest = tmp_path / "store" / "train" / MANIFEST
    body = {k: v for k, v in json.loads(manifest.read_text()).items() if k not in ("origin", "self")}
    manifest.write_text(json.dumps({**body, "self": digest_of(body)}))
    assert len(open_data(tmp_path / "store")) == 10
    damage(tmp_path / "store" / "train")
    with pytest.raises(DamagedStore, match=r"missing or cut: pack again .*does not say what it was made of"):
        open_data(tmp_path / "store")


def test_packing_again_keeps_the_store_until_the_new_one_is_complete(tmp_path):
    """If more images are bad now, or packing is interrupted, the old store can still be opened."""
    root = folder_of(tmp_path / "pictures", 12)
    pack(root, tmp_path / "store")
    packed = contents(tmp_path / "store" / "train")
    for number in range(6):
        (root / f"broken{number}.png").write_bytes(b"nothing")
    with pytest.raises(DataError, match="6 of 18 images"):
        pack(root, tmp_path / "store")
    assert contents(tmp_path / "store" / "train") == packed

    def cut(done, total):
        raise KeyboardInterrupt

    picture(50).save(root / "new.png")
    with pytest.raises(KeyboardInterrupt):
        pack(root, tmp_path / "store", max_bad=0.5, progress=cut)
    assert len(open_store(tmp_path / "store" / "train")) == 12
    for path in root.glob("broken*"):
        path.unlink()
    pack(root, tmp_path / "store")
    assert same_images(open_data(tmp_path / "store"), open_data(root))
    assert sorted(p.name for p in (tmp_path / "store").iterdir()) == ["train", "train.lock"]


def test_a_kill_between_the_two_renames_is_repaired(tmp_path, monkeypatch):
    root = folder_of(tmp_path / "pictures", 12)
    pack(root, tmp_path / "store")
    picture(50).save(root / "new.png")
    rename = os.rename

    def killed(source, target):
        if str(source).endswith(".part"):
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        pack(root, tmp_path / "store")
    monkeypatch.undo()
    (root / "broken.png").write_bytes(b"nothing")
    with pytest.raises(DataError, match="1 of 14 images"):
        pack(root, tmp_path / "store", max_bad=0)
    assert len(open_data(tmp_path / "store")) == 12
    (root / "broken.png").unlink()
    pack(root, tmp_path / "store")
    assert len(open_data(tmp_path / "store")) == 13 and not (tmp_path / "store" / "train.replaced").exists()


def test_packing_without_a_readable_image_leaves_nothing(tmp_path):
    """A packing with some images stays, and continues if more bad images are allowed."""
    root = tmp_path / "pictures"
    root.mkdir()
    for number in range(9):
        (root / f"{number}.png").write_bytes(b"nothing")
    for allowed in (0.05, 1.0):
        with pytest.raises(DataError, match="none of the 9 images"):
            pack(root, tmp_path / "store", max_bad=allowed)
        assert not (tmp_path / "store").exists()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "notes").touch()
    with pytest.raises(DataError, match="none of the 9 images"):
        pack(root, tmp_path / "store")
    assert [p.name for p in (tmp_path / "store").iterdir()] == ["notes"]
    picture(1).save(root / "good.png")
    with pytest.raises(DataError, match="9 of 10 images"):
        pack(root, tmp_path / "store")
    assert (tmp_path / "store" / "train.part").is_dir()
    pack(root, tmp_path / "store", max_bad=0.9)
    assert len(open_data(tmp_path / "store")) == 1


def test_a_lock_file_that_was_removed_while_waiting_is_created_again(tmp_path):
    """A process that waited for a packing that failed locks the new file, like all later processes."""
    place, out = tmp_path / "train.lock", tmp_path / "train"
    entered, held = threading.Event(), []

    def wait() -> None:
        with packing._locked(out):
            held.append(place.stat().st_ino)
            entered.set()
            out.mkdir()  # something came to be: the lock stays

    with packing._locked(out):
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not entered.wait(0.2)
    waiting.join(10)
    assert held == [place.stat().st_ino]


def test_the_error_for_an_unwritable_cache_names_the_settings_to_change(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(EnvironmentFault, match=r"set KONTRAST_CACHE or data\.pack=false"):
        pack(folder_of(tmp_path / "pictures", 3), tmp_path / "file" / "store")
