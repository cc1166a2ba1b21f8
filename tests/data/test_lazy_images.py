"""Images that are decoded for every batch: the same batches on every rank, after resuming and with bad images."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import asdict

import numpy as np
import pytest
import torch

from kontrast.counters import block_permutation, permutation
from kontrast.data import Feeder, LazyImages, open_data
from kontrast.data import feeder as feeding_module
from kontrast.data import shards as shards_module
from kontrast.data.competing_features import random_bits
from kontrast.data.decode import PLAIN
from kontrast.data.decode_workers import Decoders, wait_for
from kontrast.data.listing import scan_folder
from kontrast.errors import DataError, EnvironmentFault, UsageError

from support.made_images import picture, shard_samples, write_tar

EACH, SHARDS = 12, 20


def make_shards(root, spoil: dict[int, bytes] | None = None):
    """Write 240 numbered pictures into 20 shards; `spoil` replaces the bytes of some."""
    root.mkdir()
    for number in range(SHARDS):
        members = [
            (name, (spoil or {}).get(int(name[:5]), content) if name.endswith(".png") else content)
            for name, content in shard_samples(EACH * number, EACH)
        ]
        write_tar(root / f"train-{number:04d}.tar", members)
    return root


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr(feeding_module, "WINDOW_BLOCKS", 4)
    monkeypatch.setattr(feeding_module, "WINDOW_IMAGES", 1)


@pytest.fixture
def shards(tmp_path, small_windows):
    return make_shards(tmp_path / "shards")


def undecoded(root, **options):
    return open_data(root, "all", pack=False, workers=1, **options)


def expected(number: int) -> torch.Tensor:
    return torch.from_numpy(np.asarray(picture(number)).copy()).permute(2, 0, 1)


def test_shards_without_packing_are_decoded_only_when_indexed(shards):
    images, whole = undecoded(shards), open_data(shards, "all")
    assert isinstance(images.images, LazyImages) and isinstance(whole.images, torch.Tensor) and len(images) == 240
    assert images.names == whole.names and torch.equal(images.labels, whole.labels)
    assert images.fingerprint == whole.fingerprint and images.ragged
    assert images.channels == 3 and images.typical_side == 16
    assert torch.equal(images[7], whole[7]) and torch.equal(images.images[-1], whole.images[-1])
    assert torch.equal(images[3:9], whole[3:9]) and torch.equal(images[torch.tensor([5, 2])], whole.images[[5, 2]])
    padded, sizes = images.batch(torch.tensor([200, 4]))
    assert torch.equal(padded, whole.images[[200, 4]]) and sizes.tolist() == [[16, 16]] * 2
    part = images.subset([30, 10, 20]).subset([2, 0])
    assert part.index.tolist() == [20, 30] and torch.equal(part[1], whole[30]) and part.images.blocks.tolist() == [1, 2]


def test_images_of_different_sizes_are_padded_or_cropped_to_squares(make_folder, monkeypatch):
    root = make_folder(classes=1, each=12, ragged=True)
    monkeypatch.setattr("kontrast.data.sources._free_memory", lambda: 1000)
    images, whole = undecoded(root), open_data(root)
    assert isinstance(images.images, LazyImages) and images.images.side == whole.images.side
    positions = torch.tensor([0, 11, 5])
    for a, b in zip(images.batch(positions), whole.batch(positions), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(images[0:12], whole[0:12])


def test_a_folder_too_large_for_memory_gives_the_same_batches(make_folder, monkeypatch):
    root = make_folder(classes=2, each=20)
    whole = open_data(root, pack=False)
    assert isinstance(whole.images, torch.Tensor)
    monkeypatch.setattr("kontrast.data.sources._free_memory", lambda: 1000)
    images = open_data(root, pack=False, workers=1)
    assert isinstance(images.images, LazyImages)
    for a, b in zip(Feeder(whole, 8, seed=2).batches(1), Feeder(images, 8, seed=2).batches(1), strict=True):
        assert torch.equal(a.images, b.images) and torch.equal(a.indices, b.indices) and torch.equal(a.labels, b.labels)


def test_block_permutation_shuffles_blocks_and_images_within_a_window():
    blocks = np.repeat(np.arange(20), 12)
    orders = [block_permutation(blocks, 4, 7, epoch) for epoch in range(3)]
    for order in orders:
        assert sorted(order) == list(range(240))
        windows = [set(blocks[order[start : start + 48]]) for start in range(0, 240, 48)]
        assert [len(w) for w in windows] == [4] * 5, "a window reads from four shards and no other"
        assert len(set(blocks[order[:8]])) > 1, "images of different shards are mixed"
    assert len({tuple(order) for order in orders}) == 3
    assert len({frozenset(blocks[order[:48]]) for order in orders}) > 1, "windows differ from epoch to epoch"
    assert (block_permutation(blocks, 20, 7, 0) == permutation(240, 7, 0)).all()
    assert block_permutation(np.array([0, 0, 1, 1, 2, 2]), 1, 0, 0).tolist() == PINNED


PINNED = [5, 4, 0, 1, 2, 3]


def test_the_feeder_reads_shards_in_windows(shards):
    feeder = Feeder(undecoded(shards), 16, seed=3)
    blocks = feeder.lazy.blocks[feeder.order(0).numpy()]
    assert [len(set(blocks[start : start + 48])) for start in range(0, 240, 48)] == [4] * 5
    assert Feeder(open_data(shards, "all"), 16, seed=3).order(0).tolist() != feeder.order(0).tolist()
    with pytest.raises(UsageError, match=r"data\.pack=true"):
        Feeder(undecoded(shards), 16, resident="yes")


def same_batches(left, right) -> None:
    for a, b in zip(left, right, strict=True):
        assert a.step == b.step and torch.equal(a.indices, b.indices) and torch.equal(a.labels, b.labels)
        assert torch.equal(a.images, b.images) and torch.equal(a.sizes, b.sizes)


def test_an_epoch_of_shards_has_every_image_once_also_resumed_and_on_two_ranks(shards):
    batches = list(Feeder(undecoded(shards), 24, seed=1).batches(2))
    assert sorted(torch.cat([b.indices for b in batches]).tolist()) == list(range(240))
    for batch in batches:
        for image, index, label in zip(batch.images, batch.indices.tolist(), batch.labels.tolist(), strict=True):
            assert torch.equal(image, expected(index)) and label == index % 3
    same_batches(batches[7:], Feeder(undecoded(shards), 24, seed=1).batches(2, start=7))
    ranks = [Feeder(undecoded(shards), 24, seed=1, rank=rank, world=2).batches(2) for rank in range(2)]
    for batch, *parts in zip(batches, *ranks, strict=True):
        assert torch.equal(torch.cat([p.indices for p in parts]), batch.indices)
        assert torch.equal(torch.cat([p.images for p in parts]), batch.images)


def test_many_decoding_processes_give_the_same_batches_and_exit(shards):
    one = list(Feeder(undecoded(shards), 24).batches(0))
    images = open_data(shards, "all", pack=False, workers=3)
    same_batches(one, Feeder(images, 24).batches(0))
    children = [worker.process for worker in images.images.reader.decoders._started]
    assert len(children) == 3 and all(child.poll() is None for child in children)
    del images
    gc.collect()
    assert all(child.wait() is not None for child in children)


def test_a_killed_decoding_process_is_an_error_that_names_its_files(shards):
    images = open_data(shards, "all", pack=False, workers=2)
    images[0:8]
    for child in images.images.reader.decoders._started:
        os.kill(child.process.pid, signal.SIGKILL)
    with pytest.raises(EnvironmentFault, match="a decoding process was killed by signal 9"):
        list(Feeder(images, 24).batches(0))


def test_hanging_storage_is_an_error_that_names_the_files(shards, monkeypatch):
    images = undecoded(shards)
    monkeypatch.setattr("kontrast.data.byte_source.PATIENCE", 0.05)
    monkeypatch.setattr("kontrast.data.decode_workers.decode_chunk", lambda *_: time.sleep(0.5))
    with pytest.raises(EnvironmentFault, match=r"nothing was read in 0.05 s at train-.*: storage hangs"):
        next(Feeder(images, 24).batches(0))


def test_a_chunk_may_take_longer_than_the_timeout_if_the_worker_shows_signs_of_life(make_folder, tmp_path, monkeypatch):
    """Signs come every 0.2 s and may take ten times as long on a busy machine."""
    items = scan_folder(str(make_folder(classes=1, each=12))).items
    monkeypatch.setattr("kontrast.data.byte_source.PATIENCE", 2.0)
    script = tmp_path / "slow.sh"
    head = '{"pixels": 0, "sizes": [], "kept": [], "bad": [[0, "slow"]], "notes": {}, "lost": []}'
    signs = "sleep 0.2; echo; " * 12
    script.write_text(f"#!/bin/sh\nread task\n{signs}\necho '{head}'\n")
    script.chmod(0o755)
    monkeypatch.setattr("kontrast.data.decode_workers.sys.executable", str(script))
    decoders = Decoders(PLAIN, 2)
    assert wait_for(decoders.submit(items), items, decoders).bad == [[0, "slow"]]
    decoders.close()
    monkeypatch.setattr(
        "kontrast.data.decode_workers.decode_file", lambda *_: time.sleep(0.2) or (np.zeros((3, 1, 1)), "")
    )
    decoders = Decoders(PLAIN, 1)
    assert len(wait_for(decoders.submit(items), items, decoders).kept) == 12
    decoders.close()


def test_a_decoding_process_shows_signs_of_life(make_folder):
    items = scan_folder(str(make_folder(classes=1, each=3))).items
    task = {"items": [(i.name, i.path, i.offset, i.length) for i in items], "limits": asdict(PLAIN)}
    code = "from kontrast.data import decode_workers as workers; workers.SIGN_EVERY = -1.0; workers.serve()"
    done = subprocess.run([sys.executable, "-c", code], input=json.dumps(task).encode() + b"\n", capture_output=True)
    assert done.stdout.startswith(b'\n\n{"pixels": 2304')


def test_a_bad_image_of_a_shard_is_replaced_by_the_one_a_batch_later(tmp_path, small_windows):
    spoil = {17: b"nothing", 101: b"", 230: b"<html>"}
    make_shards(tmp_path / "bad", spoil)
    images = undecoded(tmp_path / "bad")
    feeder = Feeder(images, 24, seed=4)
    batches, order = list(feeder.batches(0)), feeder.order(0).tolist()
    for bad in spoil:
        slot = order.index(bad)
        stand_in = order[(slot + 24) % 240]
        assert stand_in not in spoil
        batch, row = batches[slot // 24], slot % 24
        assert batch.indices[row] == stand_in and batch.labels[row] == stand_in % 3
        assert torch.equal(batch.images[row], expected(stand_in))
    assert all(len(set(b.indices.tolist())) == 24 for b in batches), "no image is its own negative"
    assert sorted(images.bad) == [
        ("train-0001.tar/00017.png", "not an image: text"),
        ("train-0008.tar/00101.png", "empty file"),
        ("train-0019.tar/00230.png", "not an image: an HTML page"),
    ]
    assert images.total == 240
    list(feeder.batches(1))
    assert len(images.bad) == 3, "each is counted once"
    same_batches(batches[5:], Feeder(undecoded(tmp_path / "bad"), 24, seed=4).batches(0, start=5))
    ranks = [Feeder(undecoded(tmp_path / "bad"), 24, seed=4, rank=rank, world=2).batches(0) for rank in range(2)]
    for batch, *parts in zip(batches, *ranks, strict=True):
        assert torch.equal(torch.cat([p.images for p in parts]), batch.images)


def test_without_a_feeder_a_bad_image_is_replaced_by_one_of_its_class(tmp_path, small_windows):
    make_shards(tmp_path / "bad", {0: b"nothing", 3: b"nothing"})
    images = undecoded(tmp_path / "bad")
    assert torch.equal(images[0], expected(6)) and images.labels[0] == images.labels[6]
    assert torch.equal(images[0:5], torch.stack([expected(i) for i in (6, 1, 2, 6, 4)]))
    assert len(images.bad) == 2


def test_too_many_bad_images_stop_the_epoch(tmp_path, small_windows):
    make_shards(tmp_path / "bad", {i: b"nothing" for i in range(0, 240, 12)})
    with pytest.raises(DataError, match=r"13 of 240 images .* 5% allowed"):
        list(Feeder(undecoded(tmp_path / "bad"), 24).batches(0))
    images = undecoded(tmp_path / "bad", max_bad=0.1)
    assert len(list(Feeder(images, 24).batches(0))) == 10 and len(images.bad) == 20


def test_a_missing_file_is_replaced_but_a_missing_mount_stops_the_run(make_folder, monkeypatch, tmp_path):
    monkeypatch.setattr("kontrast.data.sources._free_memory", lambda: 1000)
    root = make_folder(classes=1, each=60)
    images = undecoded(root)
    gone = (7, 31, 50)  # three, but not in a row
    for number in gone:
        (root / f"{number:04d}.png").unlink()
    batches = list(Feeder(images, 20).batches(0))
    assert sorted(images.bad) == [(f"{n:04d}.png", "No such file or directory (2)") for n in gone]
    assert not set(torch.cat([b.indices for b in batches]).tolist()) & set(gone)
    root.rename(tmp_path / "gone")
    with pytest.raises(
        EnvironmentFault, match=r"3 files in a row can't be read from .*pictures \(No such.*storage gone"
    ):
        list(Feeder(images, 20).batches(1))


def test_shards_removed_during_an_epoch_stop_the_run(shards):
    images = undecoded(shards, max_bad=1.0)
    batches = Feeder(images, 24).batches(0)
    next(batches)
    shutil.rmtree(shards)
    with pytest.raises(EnvironmentFault, match="storage gone"):
        list(batches)


def test_a_truncated_shard_gives_the_images_before_the_cut(shards):
    content = (shards / "train-0004.tar").read_bytes()
    (shards / "train-0004.tar").write_bytes(content[: content.rindex(b"\x89PNG") + 100])
    images = undecoded(shards)
    assert len(images) == 239 and len(images.bad) == 2 and "cut or damaged" in images.bad[1][1]
    assert images.bad[0] == ("train-0004.tar/00059.png", "the archive ends before the file does")
    assert len(list(Feeder(images, 24).batches(0))) == 9


def test_a_shard_is_indexed_once_and_again_after_it_changed(shards, monkeypatch):
    opened = []
    real = tarfile.open

    def count(path=None, mode="r", **more):
        opened.extend([path] if mode == "r:" else [])
        return real(path, mode, **more)

    monkeypatch.setattr(shards_module.tarfile, "open", count)
    first = undecoded(shards)
    assert len(opened) == SHARDS
    again = undecoded(shards)
    assert len(opened) == SHARDS and again.fingerprint == first.fingerprint and again.names == first.names
    write_tar(shards / "train-0003.tar", shard_samples(500, 9))
    os.utime(shards / "train-0003.tar", ns=(5, 5))
    changed = undecoded(shards)
    assert len(opened) == SHARDS + 1 and len(changed) == 237 and torch.equal(changed[36], expected(500))
    from kontrast.data.cache_folder import cache_home

    indexes = sorted((cache_home() / "indexes").iterdir())
    assert len(indexes) == SHARDS
    indexes[0].write_bytes(b"damaged")
    indexes[1].write_bytes(indexes[1].read_bytes()[:-20])
    assert undecoded(shards).fingerprint == changed.fingerprint and len(opened) == SHARDS + 3


def test_added_channels_are_those_of_the_replacement(tmp_path, small_windows):
    make_shards(tmp_path / "bad", {17: b"nothing"})
    images = random_bits(undecoded(tmp_path / "bad"), 5)
    for batch in Feeder(images, 24).batches(0):
        planes = batch.images[:, 3:, 0, 0]
        assert batch.images.shape[1] == 8 and torch.equal(planes, images.images.planes[batch.indices])


def test_pretraining_on_unpacked_shards_reports_bad_images(tmp_path):
    from kontrast.training.pretrain import pretrain

    make_shards(tmp_path / "bad", {i: b"nothing" for i in range(0, 240, 40)})
    tiny = ["training.max_steps=12", "training.batch=16", "encoder.width=16", "views.size=16", "head.outputs=16"]
    said: list[str] = []
    pretrain(
        tmp_path / "bad", overrides=["data.pack=false", *tiny], out=tmp_path / "run", device="cpu", say=said.append
    )
    assert (tmp_path / "run" / "encoder.safetensors").is_file()
    assert not list((tmp_path / "run").glob("**/*.u8"))
    assert any("images: train-00" in line and "(not an image: text)" in line for line in said if "skipped" in line)
