"""Packed stores have the same pixels as their source, also after an interruption or damage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

from kontrast.data import open_data
from kontrast.data import store_writer as packing_module
from kontrast.data.cache_folder import cache_home
from kontrast.data.pack import pack
from kontrast.data.store import DamagedStore, open_store
from kontrast.errors import DataError, EnvironmentFault
from kontrast.runs.image_stream import open_stream
from kontrast.runs.run import Run

from support import tiny_run
from support.made_images import same_images


@pytest.mark.parametrize("ragged", [False, True])
def test_a_store_has_the_same_images_as_its_folder(make_folder, tmp_path, ragged):
    root = make_folder(classes=2, each=10, ragged=ragged)
    made = pack(root, tmp_path / "store")
    assert [p.name for p in made] == ["train", "test"]
    for split in ("train", "test"):
        stored, read = open_data(tmp_path / "store", split), open_data(root, split)
        assert same_images(stored, read) and stored.ragged == ragged
        assert stored.classes == read.classes and stored.fingerprint == read.fingerprint and stored.has_test


def test_many_processes_write_the_same_bytes(make_folder, tmp_path, monkeypatch):
    root = make_folder(classes=2, each=30, ragged=True)
    monkeypatch.setattr("kontrast.data.decode_workers.IN_PROCESS", 0)
    monkeypatch.setattr(packing_module, "CHUNK", 8)
    pack(root, tmp_path / "many", workers=3)
    pack(root, tmp_path / "one", workers=1)
    read = [(tmp_path / name / "train" / "images.u8").read_bytes() for name in ("many", "one")]
    assert read[0] == read[1] and len(read[0]) > 0


def test_large_folders_are_packed_into_the_cache_once(make_folder, monkeypatch):
    root = make_folder(classes=1, each=20)
    monkeypatch.setattr("kontrast.data.sources.IN_MEMORY", 10)
    calls = []
    first = open_data(root, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (20, 20)
    again = open_data(root, progress=lambda done, total: calls.append("packed again"))
    assert "packed again" not in calls and same_images(first, again)
    os.utime(root / "0003.png", ns=(5, 5))
    open_data(root, progress=lambda done, total: calls.append("packed again"))
    assert "packed again" in calls


def test_relative_and_absolute_paths_share_one_store(make_folder, monkeypatch):
    """A run that is resumed or probed uses the absolute path of its folder, even if the command had a relative one."""
    root = make_folder(classes=2, each=10)
    monkeypatch.setattr("kontrast.data.sources.IN_MEMORY", 10)
    monkeypatch.chdir(root.parent)
    opened = [open_data(root.name, test_share=0.0)]
    monkeypatch.setattr("kontrast.data.store_writer.decode_all", lambda *_, **__: pytest.fail("decoded again"))
    opened += [open_data(root, test_share=0.0), open_data(f"./{root.name}/", "all"), open_data(root.name, "all")]
    assert [(i.name, i.split, i.has_test, len(i)) for i in opened] == [
        (root.name, "train", False, 20),
        (str(root), "train", False, 20),
        (f"./{root.name}/", "all", False, 20),
        (root.name, "all", False, 20),
    ]


def test_a_store_packed_with_a_larger_max_bad_is_checked_again(make_folder, monkeypatch):
    root = make_folder(classes=1, each=20)
    monkeypatch.setattr("kontrast.data.sources.IN_MEMORY", 10)
    for number in range(4):
        (root / f"broken{number}.png").write_bytes(b"nothing")
    assert len(open_data(root, max_bad=0.2)) == 20
    with pytest.raises(DataError, match=r"4 of 24 images .* 5% allowed"):
        open_data(root)


def test_opening_a_store_again_decodes_nothing(make_folder, monkeypatch):
    root = make_folder(classes=2, each=400)
    monkeypatch.setattr("kontrast.data.sources.IN_MEMORY", 10)
    first = open_data(root, workers=1)

    def decode(*_):
        raise AssertionError("decoded again")

    monkeypatch.setattr("kontrast.data.decode_workers.decode_file", decode)
    again = open_data(root)
    assert same_images(first, again)


@pytest.mark.parametrize("file", ["images.u8", "labels.i64", "stamps.i64", "store.json"])
def test_a_damaged_store_in_the_cache_is_packed_again(make_folder, monkeypatch, file):
    root = make_folder(classes=2, each=20)
    monkeypatch.setattr("kontrast.data.sources.IN_MEMORY", 10)
    good = [image.clone() for image in open_data(root).images]
    (place,) = [p for p in cache_home().glob("stores/*") if p.is_dir()]
    content = bytearray((place / file).read_bytes())
    content[len(content) // 2] ^= 4
    (place / file).write_bytes(bytes(content))
    packed = []
    again = open_data(root, progress=lambda done, total: packed.append(done))
    assert packed and all(torch.equal(a, b) for a, b in zip(good, again.images, strict=True))
    open_store(place)


CUT = """
import sys, time
import kontrast.data.store_writer as packing
from kontrast.data.pack import pack
packing.CHUNK = 4
def slow(done, total):
    print(done, flush=True)
    time.sleep(0.05)
pack(sys.argv[1], sys.argv[2], progress=slow, workers=1)
"""


def test_killed_packing_resumes_to_the_same_bytes(make_folder, tmp_path, monkeypatch):
    root = make_folder(classes=1, each=60, ragged=True)
    child = subprocess.Popen(
        [sys.executable, "-c", CUT, str(root), str(tmp_path / "cut")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    for _ in range(5):
        child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not (tmp_path / "cut" / "train").exists() and (tmp_path / "cut" / "train.part").is_dir()
    monkeypatch.setattr(packing_module, "CHUNK", 4)
    seen = []
    pack(root, tmp_path / "cut", progress=lambda done, total: seen.append(done), workers=1)
    assert seen[0] > 16, "the chunks before the kill were decoded again"
    pack(root, tmp_path / "whole", workers=1)
    read = [(tmp_path / name / "train" / "images.u8").read_bytes() for name in ("cut", "whole")]
    assert read[0] == read[1]
    assert not (tmp_path / "cut" / "train.part").exists()


def test_an_interrupted_packing_with_flipped_bytes_restarts_at_them(make_folder, tmp_path, monkeypatch):
    root = make_folder(classes=1, each=24)
    monkeypatch.setattr(packing_module, "CHUNK", 4)

    def stop(done, total):
        if done == 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(root, tmp_path / "store", progress=stop, workers=1)
    partial = tmp_path / "store" / "train.part" / "images.u8"
    content = bytearray(partial.read_bytes())
    content[2 * 4 * 768 + 5] ^= 1
    partial.write_bytes(bytes(content))
    seen = []
    pack(root, tmp_path / "store", progress=lambda done, total: seen.append(done), workers=1)
    assert seen[0] == 12
    assert same_images(open_data(tmp_path / "store"), open_data(root))


@pytest.mark.parametrize("file", ["images.u8", "labels.i64", "names.json", "sizes.i64", "store.json"])
def test_damage_is_detected_and_repaired(make_folder, tmp_path, file):
    root = make_folder(classes=2, each=10)
    pack(root, tmp_path / "store")
    place = tmp_path / "store" / "train"
    content = bytearray((place / file).read_bytes())
    content[len(content) // 2] ^= 4
    (place / file).write_bytes(bytes(content))
    with pytest.raises(DamagedStore, match="pack again"):
        open_store(place)
    if file != "store.json":
        assert same_images(open_data(tmp_path / "store"), open_data(root))
    pack(root, tmp_path / "store")
    assert same_images(open_store(place), open_data(root))


def test_damage_without_the_source_is_an_error(make_folder, tmp_path):
    root = make_folder(classes=2, each=5)
    pack(root, tmp_path / "store")
    root.rename(tmp_path / "elsewhere")
    assert len(open_data(tmp_path / "store")) == 8
    os.truncate(tmp_path / "store" / "train" / "images.u8", 100)
    with pytest.raises(DamagedStore, match="missing or cut"):
        open_data(tmp_path / "store")


def test_an_existing_folder_that_is_no_store_is_kept(make_folder, tmp_path):
    (tmp_path / "taken" / "train").mkdir(parents=True)
    (tmp_path / "taken" / "train" / "thesis.txt").write_text("precious")
    with pytest.raises(EnvironmentFault, match=r"taken/train .*packed store"):
        pack(make_folder(), tmp_path / "taken")
    assert (tmp_path / "taken" / "train" / "thesis.txt").read_text() == "precious"


def test_the_embedded_set_is_packed_with_its_factors(tmp_path):
    pack(None, tmp_path / "digits")
    stored, made = open_data(tmp_path / "digits", "test"), open_data("digits", "test")
    assert torch.equal(stored.images, made.images) and stored.factors.keys() == made.factors.keys()
    assert torch.equal(stored.factors["colour"], made.factors["colour"])


@pytest.mark.parametrize(("own", "other"), [("train", "test"), ("test", "train")])
def test_a_path_to_one_split_of_a_store_has_no_other_split(make_folder, tmp_path, own, other):
    """Otherwise a probe would be tested on the images that it was fitted on."""
    root = make_folder(classes=2, each=10)
    pack(root, tmp_path / "store")
    for split in (own, "all"):
        images = open_data(tmp_path / "store" / own, split)
        assert same_images(images, open_data(root, own)) and not images.has_test
    with pytest.raises(DataError, match=f"no split '{other}': .*{own}"):
        open_data(tmp_path / "store" / own, other)


def test_a_stream_of_a_store_has_each_image_once(tmp_path):
    run, store = Run(tiny_run.trained()), tmp_path / "store"
    train, test = pack(tiny_run.images(), store)
    counts = {part: open_stream(run, part).total for part in (store, train, test)}
    assert counts[train] + counts[test] == counts[store] == tiny_run.IMAGES and counts[test] < counts[train]
    names = [name for batch in open_stream(run, test).batches(0, 9) for name in batch.images.names]
    assert names == list(open_data(store, "test").names)
    with pytest.raises(DataError, match="no split 'test'"):
        open_stream(run, train, "test")
