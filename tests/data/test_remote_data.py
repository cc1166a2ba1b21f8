"""Images at addresses are the images of a folder, in the same order; fsspec's memory stands for an object store."""

from __future__ import annotations

import json
import os

import pytest
import torch

from kontrast.addresses import bare, shown, with_credentials, without_secrets
from kontrast.data import open_data
from kontrast.data.pack import pack
from kontrast.data.paths import describe_source
from kontrast.errors import DataError, EnvironmentFault, UsageError

from support.made_images import picture, same_images
from support.places import COUNT, contents, train, upload, write_folder, write_shards


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """fsspec's file system in memory, empty, and a cache of its own."""
    import fsspec

    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    monkeypatch.setenv("KONTRAST_CACHE", str(tmp_path / "cache"))
    return files


def test_the_same_training_from_every_place(memory, tmp_path):
    """Folder, tars and a packed store, on disk and at an address, packed and streamed: one encoder."""
    folder, shards = write_folder(tmp_path / "folder"), write_shards(tmp_path / "shards")
    pack(folder, tmp_path / "store", test_share=0)
    for name in ("folder", "shards", "store"):
        upload(memory, tmp_path / name, f"/bucket/{name}")
    expected = train(folder, tmp_path / "run")
    places = [shards, "memory://bucket/folder", "memory://bucket/shards", "memory://bucket/store"]
    places += ["memory://bucket/shards/train-{000..002}.tar"]
    for number, place in enumerate(places):
        assert train(place, tmp_path / f"run{number}") == expected, place
    streamed = train(shards, tmp_path / "streamed", "data.pack=false")
    assert train("memory://bucket/shards", tmp_path / "remote", "data.pack=false") == streamed


def test_arrays_at_an_address_keep_their_depth(memory, tmp_path):
    import numpy as np

    for number in range(4):
        values = np.random.default_rng(number).integers(0, 10_000, (20, 20, 5))
        values[0, 0] = 10_000 * (number + 1)
        np.save(tmp_path / f"{number}.npy", values.astype(np.uint16))
        memory.pipe(f"/bucket/bands/{number}.npy", (tmp_path / f"{number}.npy").read_bytes())
    found = open_data("memory://bucket/bands", "all")
    assert found.images.dtype == torch.uint16 and found.images.shape == (4, 5, 20, 20)
    assert found.images.int().amax((1, 2, 3)).tolist() == [10_000, 20_000, 30_000, 40_000]


def test_arrays_beside_tar_files_or_tables_are_no_pictures(memory):
    """As in a folder, where labels.npy beside shards does not make it ambiguous."""
    for name in ("shards/a.tar", "shards/labels.npy", "tables/a.parquet", "tables/labels.npy"):
        memory.pipe(f"/bucket/{name}", b"x")
    assert describe_source("memory://bucket/shards").kind == "shards"
    assert describe_source("memory://bucket/tables").kind == "tables"


def test_other_verbs_read_addresses_too(memory, tmp_path):
    import numpy as np

    from kontrast.runs.embed import embed

    folder = write_folder(tmp_path / "folder")
    upload(memory, folder, "/bucket/folder")
    train(folder, tmp_path / "run")
    for name, place in (("here", str(folder)), ("there", "memory://bucket/folder")):
        embed(tmp_path / "run", place, tmp_path / f"{name}.npy", device="cpu")
    assert np.array_equal(np.load(tmp_path / "here.npy"), np.load(tmp_path / "there.npy"))
    pack("memory://bucket/folder", tmp_path / "store")
    assert same_images(open_data(tmp_path / "store"), open_data(folder))


def test_folders_splits_labels_and_captions_are_read_as_on_disk(memory, tmp_path):
    for split in ("train", "test"):
        write_folder(tmp_path / "split" / split)
    (tmp_path / "split" / "captions.csv").write_text(
        "file,caption\n" + "".join(f"{split}/{name},a {name}\n" for split in ("train", "test") for name in contents())
    )
    (tmp_path / "split" / "train" / ".hidden").mkdir()
    picture(0).save(tmp_path / "split" / "train" / ".hidden" / "0.png")
    (tmp_path / "split" / "train" / "a" / "notes.txt").write_text("no image")
    upload(memory, tmp_path / "split", "/bucket/split")
    assert describe_source("memory://bucket/split").kind == "split folder"
    for split in ("train", "test"):
        here, there = open_data(tmp_path / "split", split), open_data("memory://bucket/split", split)
        assert same_images(here, there) and here.classes == there.classes == ["a", "b"] and here.notes == there.notes
        here, there = (
            open_data(place, split, captions="auto") for place in (tmp_path / "split", "memory://bucket/split")
        )
        assert here.captions.per_image() == there.captions.per_image() and len(there) == COUNT


def test_many_objects_are_decoded_by_processes_and_packed_once(memory, tmp_path, monkeypatch):
    """fsspec's memory is of one process, so the objects are read from a cache that is complete."""
    import kontrast.data.decode_workers as workers
    from kontrast.data import remote_files

    upload(memory, write_shards(tmp_path / "shards"), "/bucket/shards")
    items = open_data("memory://bucket/shards", "all", pack=False).base.items
    for item in items:
        remote_files.read_object(item.path, item.offset, item.length, item.stamp)
    memory.store.clear()  # from here on, nothing but the cache has the bytes
    monkeypatch.setattr(workers, "IN_PROCESS", 0)
    chunks = [chunk for _, chunk in workers.decode_all(items, workers.Limits(), 8, workers=2)]
    assert sum(len(chunk.kept) for chunk in chunks) == COUNT
    first = torch.frombuffer(bytearray(chunks[0].pixels), dtype=torch.uint8)[: 3 * 16 * 16].view(3, 16, 16)
    assert first.permute(1, 2, 0).numpy().tobytes() == picture(0).tobytes()


def test_only_headers_are_read_to_index_an_archive(memory, tmp_path):
    from kontrast.data import remote_files

    from support.made_images import write_tar

    big = [(f"{i:04d}.png", os.urandom(300_000)) for i in range(12)]
    memory.pipe("/bucket/x.tar", write_tar(tmp_path / "x.tar", big).read_bytes())
    asked: list[int] = []
    read = remote_files.read_range
    remote_files.read_range = lambda address, start, stop: (asked.append(stop - start), read(address, start, stop))[1]
    try:
        assert len(open_data("memory://bucket/x.tar", "all", pack=False, max_bad=1.0, depth="8-bit")) == 12
    finally:
        remote_files.read_range = read
    assert 0 < sum(asked) < 400_000


def test_a_run_resumes_from_an_address_and_refuses_other_images(memory, tmp_path):
    upload(memory, write_folder(tmp_path / "folder"), "/bucket/folder")
    from kontrast.training.pretrain import pretrain

    for pack_them in ("true", "false"):
        options = (f"data.pack={pack_them}",)
        expected = train("memory://bucket/folder", tmp_path / f"whole-{pack_them}", *options)
        half = tmp_path / f"half-{pack_them}"
        train("memory://bucket/folder", half, *options, "training.max_steps=3")
        again = pretrain(out=half, resume=True, overrides=["training.max_steps=6"], device="cpu", say=lambda line: None)
        assert (again / "encoder.safetensors").read_bytes() == expected
    memory.pipe("/bucket/folder/a/0000.png", contents()["a/0001.png"])
    with pytest.raises(DataError, match=r"1 modified \(a/0000.png\)"):
        pretrain(out=half, resume=True, overrides=["training.max_steps=9"], device="cpu", say=lambda line: None)


def test_an_object_that_changes_while_it_is_read_is_refused(memory, tmp_path):
    upload(memory, write_folder(tmp_path / "folder"), "/bucket/folder")
    images = open_data("memory://bucket/folder", "all", pack=False).base
    memory.pipe("/bucket/folder/a/0000.png", contents()["a/0001.png"])
    if not isinstance(images, torch.Tensor):
        with pytest.raises(DataError, match="was modified"):
            images.read(0)


def test_an_object_that_is_gone_is_a_bad_image(memory, tmp_path):
    from kontrast.data.decode import BadImage, decode_file

    with pytest.raises(BadImage, match=r"not found \(404\)") as caught:
        decode_file("memory://bucket/none.png")
    assert caught.value.errno
    with pytest.raises(DataError, match="nothing is found at memory://bucket/none"):
        open_data("memory://bucket/none")


class Flaky:
    """What a storage does wrong in its first answers, one word per request."""

    def __init__(self, monkeypatch, *faults: str):
        from fsspec.implementations.memory import MemoryFileSystem

        self.faults, self.asked, self.inner = list(faults), [], MemoryFileSystem.cat_file
        monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda *given, **more: self.answer(*given, **more))
        monkeypatch.setattr("kontrast.data.remote_files.FIRST_PAUSE", 0.001)

    def answer(self, files, path, start=None, end=None, **more):
        fault = self.faults.pop(0) if self.faults else ""
        self.asked.append((start, end, fault))
        content = self.inner(files, path, start=start, end=end, **more)
        if fault == "error":
            raise OSError("500 Internal Server Error")
        if fault == "reset":
            raise ConnectionResetError("reset by peer")
        return content[: len(content) // 3] if fault == "cut" else b"" if fault == "nothing" else content


def test_faults_of_the_storage_lose_nothing(memory, monkeypatch):
    from kontrast.data.remote_files import read_range

    content = os.urandom(3_000_000)
    memory.pipe("/bucket/x.bin", content)
    flaky = Flaky(monkeypatch, "error", "cut", "reset", "nothing", "cut", "error")
    assert read_range("memory://bucket/x.bin", 10, 2_999_990) == content[10:2_999_990]
    assert not flaky.faults
    cuts = [i for i, (_, _, fault) in enumerate(flaky.asked) if fault == "cut"]
    for i in cuts:  # the next request begins where the range was cut
        start, end, _ = flaky.asked[i]
        assert flaky.asked[i + 1][0] == start + (end - start) // 3


def test_storage_that_is_gone_ends_the_command_and_the_run_resumes(memory, tmp_path, monkeypatch):
    """Exit code 6: the error names the object and what to do; once the storage is back, the same bytes come out."""
    monkeypatch.setenv("KONTRAST_STORAGE_TIMEOUT", "1")
    upload(memory, write_folder(tmp_path / "folder"), "/bucket/folder")
    flaky = Flaky(monkeypatch, *["reset"] * 100_000)
    with pytest.raises(EnvironmentFault, match=r"memory://bucket/folder/.*storage gone\?.*--resume") as caught:
        train("memory://bucket/folder", tmp_path / "run")
    assert caught.value.exit_code == 6
    flaky.faults.clear()
    assert train("memory://bucket/folder", tmp_path / "run") == train(tmp_path / "folder", tmp_path / "local")


def test_the_cache_is_bounded_and_damage_is_noticed(memory, tmp_path, monkeypatch):
    from kontrast.data import object_cache
    from kontrast.data.object_cache import ObjectCache

    monkeypatch.setenv("KONTRAST_CACHE_GB", "0.001")
    monkeypatch.setattr(object_cache, "RECENT", 0)
    cache, other = ObjectCache(), ObjectCache()
    for number in range(40):
        cache.write(f"x{number}", bytes([number]) * 100_000)
        place = cache._place(f"x{number}")
        os.utime(place, (number, number))
    cache.shrink()
    kept = [number for number in range(40) if other.read(f"x{number}", 100_000)]
    assert kept == list(range(40 - len(kept), 40)) and 5 <= len(kept) <= 10
    path = cache._place("x39")
    path.write_bytes(path.read_bytes()[:-5] + b"12345")
    assert other.read("x39", 100_000) is None and other.read("x38", 99_999) is None
    assert other.read("x38", 100_000) == bytes([38]) * 100_000
    monkeypatch.setenv("KONTRAST_CACHE_GB", "0")
    assert other.read("x38", 100_000) is None
    monkeypatch.setenv("KONTRAST_CACHE_GB", "many")
    with pytest.raises(UsageError, match="KONTRAST_CACHE_GB is 'many'"):
        other.read("x38", 100_000)


def test_credentials_are_neither_recorded_nor_shown(tmp_path):
    secret = "s3://KEY:SE/CR+ET@bucket/photos"
    assert bare(secret) == "s3://bucket/photos" and with_credentials("s3://bucket/photos/1.png") == secret + "/1.png"
    web = "https://user:word@example.org/train-{000..009}.tar?X-Amz-Signature=abc"
    assert describe_source(web).spec == bare(web) == "https://example.org/train-{000..009}.tar"
    assert with_credentials("https://example.org/train-001.tar").endswith("train-001.tar?X-Amz-Signature=abc")
    assert shown(f"data.source={web}") == "data.source=https://example.org/train-{000..009}.tar"
    assert "word" not in without_secrets(f"401 for {web}, user word") and "abc" not in without_secrets("got abc")
    assert bare("sftp://user@host/photos") == "sftp://user@host/photos"
    from kontrast.config.recipe import DataSettings
    from kontrast.training.pretrain import default_out

    assert default_out(None, "https://example.org/photos?token=abc").startswith("runs/photos")
    assert DataSettings(source=secret).source == "s3://bucket/photos"


def test_a_run_folder_contains_no_credentials(memory, tmp_path):
    upload(memory, write_folder(tmp_path / "folder"), "/bucket/folder")
    train("memory://name:secret@bucket/folder", tmp_path / "run")
    text = "".join(p.read_bytes().decode("latin-1") for p in (tmp_path / "run").rglob("*") if p.is_file())
    assert "secret" not in text and "memory://bucket/folder" in text
    assert json.loads((tmp_path / "run" / "run.json").read_text())["data_place"]["place"] == "memory://bucket/folder"


@pytest.mark.parametrize(
    ("address", "error", "words"),
    [
        ("nope://bucket/photos", EnvironmentFault, "unknown protocol nope://"),
        ("simplecache::memory://bucket/photos", UsageError, "addresses with :: are not read"),
        ("reference://bucket/photos", UsageError, "leads to other addresses"),
        ("s3://bucket/photos?versionId=secret", UsageError, "environment variables"),
    ],
)
def test_addresses_that_are_not_read(address, error, words):
    with pytest.raises(error, match=words) as caught:
        open_data(address)
    assert "secret" not in str(caught.value)


def test_a_missing_package_is_named(monkeypatch):
    """The error names the extra, or the package for protocols without one."""
    import sys

    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    from importlib import import_module

    registry = import_module("fsspec.registry")

    for protocol in ("s3", "gs"):
        monkeypatch.delitem(registry._registry, protocol, raising=False)
    with pytest.raises(EnvironmentFault, match=r"pip install 'kontrast\[remote\]'"):
        open_data("s3://bucket-of-this-test/photos")
    with pytest.raises(EnvironmentFault, match="gcsfs"):
        open_data("gs://bucket-of-this-test/photos")


def test_file_addresses_are_paths(tmp_path):
    folder = write_folder(tmp_path / "my folder")
    assert same_images(open_data(f"file://{tmp_path}/my%20folder"), open_data(folder))
