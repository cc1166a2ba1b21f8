"""Run folders and archives of others with links, pipes, devices and bombs: nothing outside is read or written."""

from __future__ import annotations

import gzip
import io
import json
import os
import resource
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from kontrast.data import open_data
from kontrast.errors import CheckpointError, DataError, EnvironmentFault, KontrastError, StorageFault
from kontrast.files import JsonLines, read_json, read_json_lines, sweep, write_atomic
from kontrast.reports import report
from kontrast.training.checkpoints import load, newest, read_weights
from kontrast.training.run_folder import RunFolder

from support import tiny_run
from support.command_line import kontrast

SECRET = "PRIVATE KEY of this user\n"


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A file of the user that no run folder may change or show."""
    path = tmp_path / "private"
    path.write_text(SECRET)
    return path


@pytest.fixture
def received(tmp_path: Path) -> Path:
    """A finished run folder, as others could send it."""
    return tiny_run.copy(tmp_path)


@pytest.mark.fault(73)
def test_lock_that_is_a_link(received, private):
    """Resuming ends with exit 6, and the file that the lock leads to keeps its content."""
    (received / ".lock").unlink(missing_ok=True)
    (received / ".lock").symlink_to(private)
    done = kontrast("pretrain", "--resume", "--out", str(received), "--device", "cpu")
    assert done.returncode == 6 and ".lock" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert private.read_text() == SECRET
    with pytest.raises(EnvironmentFault):
        RunFolder(received).hold()


@pytest.mark.fault(73)
@pytest.mark.parametrize("there", [True, False], ids=["file", "dangling"])
def test_log_that_is_a_link(tmp_path, private, there):
    """The log becomes a file of the folder, or exit 6: nothing is appended or created where a link leads."""
    target = private if there else tmp_path / "not-yet"
    (tmp_path / "metrics.jsonl").symlink_to(target)
    log = JsonLines(tmp_path / "metrics.jsonl")
    try:
        log.open()
        log.write(step=1, loss=1.0)
        log.close()
    except EnvironmentFault as error:
        assert "metrics.jsonl" in str(error)
    assert private.read_text() == SECRET and not (tmp_path / "not-yet").exists()


@pytest.mark.fault(73)
def test_planted_temporary_names(tmp_path, private):
    """Files are written atomically although their temporary names, which an attacker can guess, are links."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("run.json", "report.html"):
        (folder / f".tmp-{os.getpid()}-{name}").symlink_to(private)
    (folder / ".tmp-1-folder").symlink_to(tmp_path, target_is_directory=True)
    (folder / "metrics.jsonl").write_text('{"step": 1, "epoch": 1, "loss": 5.0}\n')
    write_atomic(folder / "run.json", '{"version": 1}')
    page = report(folder)
    sweep(folder)
    assert private.read_text() == SECRET and not page.is_symlink()
    assert not list(folder.glob(".tmp-*")) and read_json(folder / "run.json") == {"version": 1}


@pytest.mark.fault(73)
@pytest.mark.parametrize(
    "name", ["recipe.toml", "run.json", "metrics.jsonl", "speed.jsonl", "probes.json", "gallery.png"]
)
def test_report_does_not_show_what_links_lead_to(received, private, tmp_path, name):
    """The page says that a link was not followed; what it leads to is not on the page."""
    if name == "run.json":
        private.write_text(json.dumps({"version": 1, "command": SECRET}))
    (received / name).unlink(missing_ok=True)
    (received / name).symlink_to(private)
    text = report(received, tmp_path / "page.html").read_text()
    assert f"{name} is a link" in text and "PRIVATE KEY" not in text


@pytest.mark.fault(74)
def test_pipes_and_devices_in_place_of_files(tmp_path):
    """A named pipe or a link to an endless device is refused at once: nothing waits, and nothing fills the memory."""
    for name, make in (("pipe", os.mkfifo), ("zero", lambda path: os.symlink("/dev/zero", path))):
        folder = tmp_path / name / "step-00000001"
        folder.mkdir(parents=True)
        for file in ("manifest.json", "state.json", "encoder.safetensors", "run.json", "metrics.jsonl"):
            make(str(folder / file))
        for read in (load, lambda path: read_weights(path / "encoder.safetensors")):
            with pytest.raises(StorageFault, match="not a regular file"):
                read(folder)
        for read, file in ((read_json, "run.json"), (read_json_lines, "metrics.jsonl")):
            with pytest.raises(StorageFault, match=f"{file}: not a regular file"):
                read(folder / file)
        with pytest.raises(CheckpointError, match="no valid checkpoint"):
            newest(folder.parent)
        (folder / "probes.json").write_text("{}")
        report(folder, tmp_path / "page.html")


@pytest.mark.fault(74)
def test_recipe_with_endless_keys_in_a_report(tmp_path):
    """A dotted key of 90,000 parts, for which tomllib needs minutes, is shown as text."""
    (tmp_path / "recipe.toml").write_text(".".join("a" * 90_000) + " = 1\n")
    assert "dots" in report(tmp_path, tmp_path / "page.html").read_text()


@pytest.mark.fault(74)
def test_bomb_as_gallery(received, tmp_path):
    """A sprite of ten kilobytes with 81 million pixels is not decoded; the page says that it is damaged."""
    Image.new("1", (9_000, 9_000)).save(received / "gallery.png")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gallery = {"points": [], "queries": [], "tile": 32, "columns": 1, "count": 1}
    (received / "gallery.json").write_text(json.dumps(gallery))
    assert "gallery.png is damaged" in report(received, tmp_path / "page.html").read_text()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150_000


@pytest.mark.fault(74)
def test_archives_that_unpack_to_gigabytes(tmp_path, monkeypatch):
    """A data set whose archive unpacks to more than its files ever have is refused with exit 3."""
    from kontrast.data import named_sets

    monkeypatch.setattr(named_sets, "LARGEST_IDX", 1 << 20)
    monkeypatch.setattr(named_sets, "LARGEST", 1 << 20)
    for stem in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"):
        (tmp_path / f"{stem}.gz").write_bytes(gzip.compress(bytes(8 << 20)))
    with pytest.raises(DataError, match="more than"):
        open_data("mnist", root=tmp_path)
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as tar:
        info = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
        info.size = 8 << 20
        tar.addfile(info, io.BytesIO(bytes(info.size)))
    with pytest.raises(KontrastError, match="more than"):
        open_data("cifar10", root=tmp_path)
