"""The stored list of a large folder: equal to a fresh one, and never used after the folder has changed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from kontrast.data import Feeder, open_data
from kontrast.data import stored_list as stored
from kontrast.data.cache_folder import cache_home
from kontrast.data.file_columns import Texts
from kontrast.data.folder_walk import Walk
from kontrast.data.listing import held_out, scan_folder
from kontrast.errors import DataError

from support.made_images import picture


@pytest.fixture(autouse=True)
def small_lists_are_stored(monkeypatch):
    """Lists of ten images are stored, and folders count as settled at once unless a test says otherwise."""
    monkeypatch.setattr("kontrast.data.listing.STORED_FROM", 10)
    monkeypatch.setattr(stored, "FLUSH_EVERY", 4)
    monkeypatch.setattr(stored, "SETTLED_AFTER", -3600.0)
    monkeypatch.setattr("kontrast.data.sources._free_memory", lambda: 0)


@pytest.fixture
def walks(monkeypatch):
    """The roots that were walked through, in order."""
    seen: list[str] = []
    original = Walk.images
    monkeypatch.setattr(Walk, "images", lambda self, root: seen.append(root) or original(self, root))
    return seen


def facts(listing) -> tuple:
    labels = None if listing.labels is None else listing.labels.tolist()
    return [*listing.items], labels, listing.classes, listing.fingerprint, listing.stamps.tolist(), dict(listing.notes)


def test_a_stored_list_equals_a_fresh_one_and_is_not_listed_again(make_folder, monkeypatch, walks):
    root = make_folder(classes=3, each=7)
    (root / "class1" / "deeper.dir").mkdir()
    picture(99, 16).save(root / "class1" / "deeper-x.png")
    picture(98, 16).save(root / "class1" / "deeper.dir" / "é\udcff.png")
    (root / "class2" / "notes.txt").write_text("x")
    first = scan_folder(str(root))
    assert first.stored is not None and len(first.items) == 23
    walks.clear()
    again = scan_folder(str(root))
    assert not walks and facts(again) == facts(first)
    monkeypatch.setattr("kontrast.data.listing.STORED_FROM", 1000)
    monkeypatch.setenv("KONTRAST_CACHE", str(root.parent / "other"))
    fresh = scan_folder(str(root))
    assert fresh.stored is None and facts(fresh) == facts(first)
    names = [item.name for item in fresh.items]
    assert names == sorted(names, key=os.fsencode) == list(again.items.names) and again.items.names == names


def test_the_fingerprint_is_the_definition(make_folder):
    root = make_folder(classes=2, each=8)
    for listing in (scan_folder(str(root)), scan_folder(str(root)).take(np.array([3, 1, 12]))):
        digest = hashlib.sha256()
        for i in listing.items:
            digest.update(f"{i.name}\0{i.offset}\0{i.length}\0{i.size}\0{i.mtime}\n".encode("utf-8", "surrogatepass"))
        digest.update(listing.labels.astype("<i8").tobytes() + b'["class0", "class1"]')
        assert listing.fingerprint == digest.hexdigest()


@pytest.mark.parametrize("change", ["add", "remove", "rename", "nested", "modify", "touch"])
def test_a_changed_folder_is_listed_again(make_folder, change, walks):
    """A file that is added, removed, renamed or modified in a folder whose list is stored is noticed."""
    root = make_folder(classes=2, each=8)
    (root / "class1" / "empty").mkdir()
    before, file = scan_folder(str(root)), root / "class1" / "0003.png"
    dates = {place: os.stat(place) for place in (root, root / "class1")}
    if change == "add":
        picture(50, 16).save(root / "class1" / "new.png")
    elif change == "remove":
        file.unlink()
    elif change == "rename":
        file.rename(file.with_name("9999.png"))
    elif change == "nested":
        picture(50, 16).save(root / "class1" / "empty" / "new.png")
    elif change == "modify":
        picture(51, 18).save(file)
    else:
        os.utime(file, ns=(7, 7))
    for place, status in dates.items():  # even if somebody sets the folders' dates back
        os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns))
    walks.clear()
    after = scan_folder(str(root))
    assert walks and after.fingerprint != before.fingerprint
    fast = scan_folder(str(root), verify=False)
    assert facts(fast) == facts(after)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_modified_file_is_refused_when_it_is_read(make_folder, workers):
    """Without a full comparison at the start, a modified file is refused before its pixels are used."""
    root = make_folder(classes=2, each=8)
    open_data(root, "all", pack=False)
    changed = root / "class1" / "0003.png"
    picture(51, 16).save(changed)
    images = open_data(root, "all", pack=False, workers=workers)
    names = list(images.names)
    good = [n for n, name in enumerate(names) if name != "class1/0003.png"]
    images.subset(good).images.images_at(images.numbers()[:15])
    with pytest.raises(DataError, match=r"class1/0003.png was modified after .* was listed; repeat"):
        for _ in Feeder(images, 16).batches(0):
            pass
    assert open_data(root, "all", pack=False, workers=workers).fingerprint != images.fingerprint
    for _ in Feeder(open_data(root, "all", pack=False, workers=workers), 16).batches(0):
        pass


def test_resuming_compares_every_file_at_once(make_folder):
    """A file that was modified is found when the run is resumed, before any file is read."""
    root = make_folder(classes=2, each=8)
    before = open_data(root, "all", pack=False).fingerprint
    os.utime(root / "class0" / "0002.png", ns=(7, 7))
    assert open_data(root, "all", pack=False).fingerprint == before
    assert open_data(root, "all", pack=False, verify=True).fingerprint != before


def test_a_folder_that_changed_just_now_is_not_trusted(make_folder, monkeypatch, walks):
    monkeypatch.setattr(stored, "SETTLED_AFTER", 2.0)
    root = make_folder(classes=2, each=8)
    scan_folder(str(root))
    walks.clear()
    scan_folder(str(root))
    assert walks, "the folder may have changed again within the resolution of its date"
    old = time.time_ns() - 10**11
    monkeypatch.setattr(stored, "mark_of", lambda status: (status.st_ino, old, old))
    monkeypatch.setattr("kontrast.data.folder_walk.mark_of", lambda status: (status.st_ino, old, old))
    scan_folder(str(root))
    walks.clear()
    scan_folder(str(root))
    assert not walks


class Killed(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("at", [4, 8, 12, 20])
def test_an_interrupted_listing_goes_on(make_folder, monkeypatch, at):
    root = make_folder(classes=3, each=7)
    (root / "class1" / "link.png").symlink_to("nowhere")
    (root / "class0" / "other.txt").write_text("x")
    whole = facts(scan_folder(str(root)))
    monkeypatch.setenv("KONTRAST_CACHE", str(root.parent / "other"))

    def kill(count):
        if count == at:
            raise Killed

    with pytest.raises(Killed):
        scan_folder(str(root), listed=kill)
    work = next((cache_home() / "lists").glob("*.part"))
    (work / "base.u8").write_bytes((work / "base.u8").read_bytes() + b"half a na")
    counts: list[int] = []
    again = scan_folder(str(root), listed=counts.append)
    assert min(counts) > at and facts(again) == whole and again.bad == [("class1/link.png", "dangling link")]
    assert not list((cache_home() / "lists").glob("*.part"))


def test_a_folder_that_changes_while_its_listing_is_interrupted_is_listed_from_the_start(make_folder):
    root = make_folder(classes=3, each=7)

    def kill(count):
        raise Killed

    with pytest.raises(Killed):
        scan_folder(str(root), listed=kill)
    picture(50, 16).save(root / "class0" / "000.png")
    assert len(scan_folder(str(root)).items) == 22


@pytest.mark.parametrize("name", ["list.json", "ends.i64", "folder.i32", "head_ends.i64", "marks.i64"])
@pytest.mark.parametrize("damage", ["cut", "gone", "zeros"])
def test_a_damaged_list_is_made_again(make_folder, name, damage):
    root = make_folder(classes=2, each=8)
    whole = facts(scan_folder(str(root)))
    path = next((cache_home() / "lists").glob(f"*/{name}"))
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-9] if damage == "cut" else bytes(len(content)))
    if not (name == "folder.i32" and damage == "zeros"):  # that is a list of other names, which the files then deny
        assert facts(scan_folder(str(root))) == whole
    else:
        assert len(scan_folder(str(root)).items) == 16


def test_without_a_cache_the_list_is_in_memory(make_folder, monkeypatch):
    root = make_folder(classes=2, each=8)
    (root.parent / "file").write_text("")
    monkeypatch.setenv("KONTRAST_CACHE", str(root.parent / "file"))
    found = scan_folder(str(root))
    assert found.stored is None and len(found.items) == 16


def test_splits_labels_and_names_are_mapped(make_folder):
    root = make_folder(classes=2, each=20)
    first = {split: open_data(root, split, pack=False) for split in ("train", "test")}
    again = {split: open_data(root, split, pack=False) for split in ("train", "test")}
    labels = again["train"].labels.numpy()
    names = [item.name for item in scan_folder(str(root)).items]
    held = held_out(names, np.repeat([0, 1], 20), 0.2)
    assert list(again["test"].names) == [name for name, out in zip(names, held) if out]
    assert labels.tolist() == [name.startswith("class1") for name, out in zip(names, held) if not out]
    for split, images in first.items():
        assert images.fingerprint == again[split].fingerprint and images.names == again[split].names
    columns, rows = again["train"].images.items.columns, again["train"].images.items.rows
    arrays = [columns.folder, columns.first, columns.second, columns.base.ends, rows]
    assert all(isinstance(array.base, np.memmap) for array in arrays)
    held_bytes = sum(array.nbytes / 40 for array in arrays[:4]) + (rows.nbytes + labels.nbytes) / 32
    assert held_bytes <= 40


def test_held_out_is_the_definition():
    names, labels = [f"{n}.png" for n in range(200)], np.arange(200) * 7 % 11
    keys = np.array([int.from_bytes(hashlib.sha256(f"0\0{n}".encode()).digest()[:8], "big") for n in names], np.uint64)
    mask = np.zeros(200, dtype=bool)
    for label in range(11):
        members = np.flatnonzero(labels == label)
        mask[members[np.argsort(keys[members], kind="stable")[: round(0.3 * len(members))]]] = True
    assert (held_out(names, labels, 0.3) == mask).all()
    assert not held_out(["a"], np.array([0]), 0.9).any(), "a class of one image stays in training"


def test_texts_are_a_sequence_of_strings():
    words = ["", "a", "é", "\udcff\n", "", "日本", "z" * 300]
    texts = Texts.of(words)
    assert list(texts) == words and texts == words and texts[2:5] == words[2:5] and texts[-1] == words[-1]
    assert texts.at(np.array([6, 0, 2, 3])) == ["z" * 300, "", "é", "\udcff\n"] and texts != words[:-1]


def test_links_that_are_followed_are_listed_once(make_folder):
    root = make_folder(classes=2, each=8)
    (root / "class1" / "loop").symlink_to(root)
    (root / "class2").symlink_to(root / "class0")
    first = scan_folder(str(root), follow_links=True)
    assert len(first.items) == 16 and first.notes["seen twice"] == 2
    assert facts(scan_folder(str(root), follow_links=True)) == facts(first)


def test_ranks_that_list_at_the_same_time_share_one_list(make_folder):
    root = make_folder(classes=2, each=30)
    code = (
        "import sys, kontrast.data.listing as l; l.STORED_FROM = 10\n"
        f"found = l.scan_folder({str(root)!r}); print(found.fingerprint, found.stored is not None)"
    )
    ranks = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {rank.communicate()[0] for rank in ranks}
    assert len(answers) == 1 and "True" in answers.pop()
    Image.new("RGB", (4, 4)).save(root / "class0" / "new.png")
    assert len(scan_folder(str(root)).items) == 61
