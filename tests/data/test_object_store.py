"""Training from a real S3 server (moto's), which stalls, fails and cuts answers: nothing is lost."""

from __future__ import annotations

import os

import pytest
import torch

from kontrast.data import open_data
from kontrast.data.pack import pack
from kontrast.errors import DataError, EnvironmentFault

from support.command_line import kontrast
from support.faulty_server import FaultyProxy
from support.made_images import same_images
from support.places import TINY, contents, train, upload, write_folder, write_parquet, write_shards

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server():
    """moto's S3 server behind a proxy that can misbehave."""
    moto = pytest.importorskip("moto.server", reason="needs the dependency group integrations")
    pytest.importorskip("s3fs", reason="needs the extra remote")
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    proxy = FaultyProxy(*running.get_host_and_port())
    yield proxy
    proxy.close()
    running.stop()


@pytest.fixture
def bucket(server, tmp_path, monkeypatch):
    """fsspec's file system of an empty bucket, which writes past the proxy, and a cache of its own."""
    import s3fs

    from kontrast.data import remote_files

    monkeypatch.setenv("KONTRAST_CACHE", str(tmp_path / "cache"))
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**keys, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote_files, "_systems", {})
    server.faults, server.period = [], 1
    server.done.clear()
    direct = f"http://{server.target[0]}:{server.target[1]}"
    files = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False, endpoint_url=direct)
    if files.exists("bucket"):
        files.rm("bucket", recursive=True)
    files.mkdir("bucket")
    return files


def test_the_same_training_from_every_place(bucket, tmp_path):
    """Folder, tars, Parquet and a packed store, on disk and on the server, by commands of their own: one encoder."""
    folder, shards = write_folder(tmp_path / "folder"), write_shards(tmp_path / "shards")
    tables = write_parquet(tmp_path / "tables")
    pack(folder, tmp_path / "store", test_share=0)
    for name in ("folder", "shards", "tables", "store"):
        upload(bucket, tmp_path / name, f"bucket/{name}")
    expected = train(folder, tmp_path / "run")
    places = [str(shards), str(tables), *(f"s3://bucket/{name}" for name in ("folder", "shards", "tables", "store"))]
    for number, place in enumerate([*places, "s3://bucket/shards/train-{000..002}.tar"]):
        out = tmp_path / f"run{number}"
        done = kontrast("pretrain", place, *TINY, "--device", "cpu", "--no-probes", "--out", str(out))
        assert done.returncode == 0, done.stderr
        assert (out / "encoder.safetensors").read_bytes() == expected, place


def test_streaming_with_decoding_processes(bucket, tmp_path, monkeypatch):
    """Processes read from the server themselves; the images of shards on disk come out, in the same order."""
    upload(bucket, write_shards(tmp_path / "shards", contents(96)), "bucket/shards")
    options = {"split": "all", "pack": False, "workers": 2}
    here, there = open_data(tmp_path / "shards", **options), open_data("s3://bucket/shards", **options)
    pairs = zip(here.base.images_at(torch.arange(96)), there.base.images_at(torch.arange(96)))
    assert all(torch.equal(one, other) for one, other in pairs) and same_images(here, there)
    assert len(there.base.reader.decoders.tasks) == 2


@pytest.mark.parametrize("fault", ["stall", "error", "cut"])
def test_faults_of_the_server_lose_nothing(bucket, server, tmp_path, monkeypatch, fault):
    monkeypatch.setenv("KONTRAST_STORAGE_TIMEOUT", "12")  # a request is given up after a quarter of it
    shards = write_shards(tmp_path / "shards")
    upload(bucket, shards, "bucket/shards")
    expected = train(shards, tmp_path / "local", "data.pack=false")
    server.faults, server.period = [fault] * 4, 2
    assert train("s3://bucket/shards", tmp_path / "run", "data.pack=false") == expected
    assert server.done[fault] == 4


def test_a_server_that_stays_away_ends_the_command_and_it_continues(bucket, server, tmp_path, monkeypatch):
    monkeypatch.setenv("KONTRAST_STORAGE_TIMEOUT", "2")
    folder = write_folder(tmp_path / "folder")
    upload(bucket, folder, "bucket/folder")
    server.faults = ["error"] * 100_000
    with pytest.raises(EnvironmentFault, match=r"s3://bucket/folder/.*storage gone\?"):
        train("s3://bucket/folder", tmp_path / "run")
    server.faults = []
    assert train("s3://bucket/folder", tmp_path / "run") == train(folder, tmp_path / "local")


def test_pages_of_a_listing_and_another_object_under_the_same_key(bucket, tmp_path, monkeypatch):
    """A listing has a thousand objects a page; a changed ETag is a changed file."""
    from kontrast.data import remote_listing
    from kontrast.data.remote_listing import list_objects

    monkeypatch.setattr(remote_listing, "LONG_LISTING", 3600.0)  # one that took long is used again for a while
    bucket.pipe({f"bucket/many/{number:05d}.txt": b"x" for number in range(1002)})
    assert len(list_objects("s3://bucket/many").names) == 1002
    upload(bucket, write_folder(tmp_path / "folder"), "bucket/folder")
    before = open_data("s3://bucket/folder", "all")
    bucket.pipe("bucket/folder/a/0000.png", (tmp_path / "folder" / "a" / "0001.png").read_bytes())
    after = open_data("s3://bucket/folder", "all")
    assert before.fingerprint != after.fingerprint and not same_images(before, after)
    assert int((before.stamps[:] != after.stamps[:]).sum()) == 1


def test_no_permission_and_no_bucket_are_one_line(bucket, tmp_path):
    with pytest.raises(DataError, match="nothing is found at s3://no-such-bucket/photos"):
        open_data("s3://no-such-bucket/photos")
    done = kontrast("pretrain", "s3://key:secret@no-such-bucket/photos", "--out", str(tmp_path / "run"))
    assert done.returncode == 3 and "secret" not in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert not os.path.exists(tmp_path / "run")
