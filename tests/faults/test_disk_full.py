"""A disk that is full, read-only or gone: exit 6 names the path, and existing files stay intact."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kontrast import files
from kontrast.cli import main as cli
from kontrast.files import read_json_lines
from kontrast.training import checkpoints

from support import kill_storm, tiny_run
from support.commands import TINY, Command, ends, steps_logged, until

SHORT = [*TINY, "training.max_steps=12", "training.log_every=1"]
LARGE = [*TINY, "training.max_steps=20", "encoder.width=64", "checkpoints.keep=100"]
"""A run whose checkpoints, of 250 kB each, don't fit into a megabyte."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 2 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True)
    if made.returncode:
        pytest.skip("needs the right to mount a small file system (root)")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path, leave: int) -> None:
    """Fill the disk, except for `leave` bytes."""
    room = os.statvfs(place)
    (place / "ballast").write_bytes(b"\0" * max(0, room.f_bavail * room.f_bsize - leave))


def half_written(place: Path) -> list[Path]:
    return [p for p in place.rglob("*") if p.name.startswith((".tmp-", ".del-"))]


@pytest.mark.fault(5)
def test_disk_full_at_a_checkpoint(small_disk, tmp_path):
    """Exit 6 has the checkpoint's path and size. Older ones remain; with room again, it resumes to equal bits."""
    run = small_disk / "run"
    fill(small_disk, 1_000_000)
    said = Command(tmp_path / "log", *LARGE, "--out", str(run)).ended(6)
    match = re.search(r"(\S+)/checkpoints/step-(\d+) .*?([\d,]+) bytes", said)
    assert match and match[1] == str(run), said
    assert int(match[3].replace(",", "")) > 100_000
    assert not half_written(small_disk)
    saved = checkpoints.checkpoints(run / "checkpoints")
    assert saved and all(checkpoints.load(path) for path in saved)
    moved = Path(shutil.copytree(run, tmp_path / "moved"))
    Command(tmp_path / "log", "--resume", "--out", str(moved)).ended(0)
    whole = tmp_path / "whole"
    Command(tmp_path / "log", *LARGE, "--out", str(whole)).ended(0)
    assert ends(moved) == ends(whole)


def fill_disk_before(argv: list[str], place: Path, name: str) -> int:
    """Run the command, and fill the disk just before it writes the file `name` (or its first line)."""
    write_whole, write_line = files.write_atomic, files.JsonLines.write

    def write_atomic(path: Path, *content: object, **options: object) -> None:
        if path.name == name:
            fill(place, 0)
        write_whole(path, *content, **options)

    def write(self: files.JsonLines, **record: object) -> None:
        if self.path.name == name and record["step"] == 1:
            fill(place, 0)
        write_line(self, **record)

    files.JsonLines.write = write
    for module in list(sys.modules.values()):  # those that imported the function by name too
        if getattr(module, "write_atomic", None) is write_whole:
            module.write_atomic = write_atomic
    return cli.run(argv)


@pytest.mark.fault(5)
@pytest.mark.parametrize("name", ["metrics.jsonl", "encoder.safetensors"])
def test_disk_full_in_the_run_folder(small_disk, tmp_path, name):
    """Exit 6 has the file's path. Complete lines and checkpoints remain, and the run resumes once there is room."""
    run = small_disk / "run"
    argv = ["pretrain", *SHORT, "--device", "cpu", "--no-probes", "--out", str(run)]
    said = Command(tmp_path / "log", instead=partial(fill_disk_before, argv, small_disk, name)).ended(6)
    assert "no space left" in said.lower() and str(run / name) in said
    assert not half_written(small_disk) and not (run / "encoder.safetensors").exists()
    (small_disk / "ballast").unlink()
    Command(tmp_path / "log", "--resume", "--out", str(run)).ended(0)
    assert [line["step"] for line in read_json_lines(run / "metrics.jsonl") if "loss" in line] == list(range(1, 13))


@pytest.mark.fault(5)
def test_disk_full_while_packing(small_disk, tmp_path):
    """Exit 6 has the store's path. Complete chunks remain, and packing continues after them once there is room."""
    pictures, _ = kill_storm.make_pictures(tmp_path)
    store = small_disk / "store"
    fill(small_disk, 50_000)
    said = Command(tmp_path / "log", instead=partial(cli.run, ["pack", str(pictures), str(store)])).ended(6)
    assert "no space left" in said.lower() and str(store / "train") in said
    assert not (store / "train").exists()
    (small_disk / "ballast").unlink()
    Command(tmp_path / "log", instead=partial(cli.run, ["pack", str(pictures), str(store)])).ended(0)
    Command(tmp_path / "log", instead=partial(cli.run, ["pack", str(pictures), str(tmp_path / "whole")])).ended(0)
    assert (store / "train" / "images.u8").read_bytes() == (tmp_path / "whole" / "train" / "images.u8").read_bytes()
    assert not list(store.glob("*.part"))


@pytest.mark.fault(5)
@pytest.mark.parametrize("name", ["vectors.parquet", "vectors.npy", "report.html"])
def test_disk_full_while_a_result_is_written(small_disk, tmp_path, name):
    """Exit 6 has the file's path. No file of that name is left, and the same command works later."""
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    run, out = tiny_run.copy(tmp_path), small_disk / name
    pictures, _ = kill_storm.make_pictures(tmp_path)
    argv = ["embed", str(run), str(pictures), "--device", "cpu"] if name != "report.html" else ["report", str(run)]
    argv += ["--out", str(out)]
    fill(small_disk, 2048)
    said = Command(tmp_path / "log", instead=partial(cli.run, argv)).ended(6)
    assert "no space left" in said.lower() and str(small_disk) in said, said
    assert not out.exists() and not half_written(small_disk)
    (small_disk / "ballast").unlink()
    Command(tmp_path / "log", instead=partial(cli.run, argv)).ended(0)
    assert out.exists()


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """Make a folder that nobody can write to. Root ignores permissions, so for root it is a read-only mount."""
    place = tmp_path / "place"
    place.mkdir()
    if os.geteuid():
        place.chmod(0o555)
        yield place
        place.chmod(0o755)
        return
    options = ["-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(place)]
    if subprocess.run(["mount", *options], capture_output=True).returncode:
        pytest.skip("root may write anywhere, and may not mount here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def pretrain_without_data(tmp_path: Path, out: Path) -> str:
    """Train on data that don't exist. That would be exit 3, so exit 6 shows that the output is checked first."""
    argv = ["pretrain", str(tmp_path / "no such data"), "--device", "cpu", "--out", str(out)]
    return Command(tmp_path / "log", instead=partial(cli.run, argv)).ended(6)


@pytest.mark.fault(6)
def test_read_only_output_is_refused_before_reading_data(tmp_path, read_only):
    """Exit 6 names the folder. Nothing is written to it."""
    said = pretrain_without_data(tmp_path, read_only / "run")
    assert str(read_only / "run") in said
    assert not list(read_only.iterdir())


@pytest.mark.fault(6)
@pytest.mark.parametrize("below", ["", "run"])
def test_output_that_is_a_file_is_refused_before_reading_data(tmp_path, below):
    """Exit 6 names the path. The file stays."""
    place = tmp_path / "thesis.txt"
    place.write_text("mine")
    assert str(place) in pretrain_without_data(tmp_path, place / below)
    assert place.read_text() == "mine"


@pytest.mark.fault(6)
def test_run_folder_removed_while_training(tmp_path):
    """Exit 6 names the folder at the next checkpoint. The folder is not recreated in part."""
    run = tmp_path / "run"
    command = Command(tmp_path / "log", *TINY, "training.max_steps=300", "training.log_every=1", "--out", str(run))
    until(steps_logged(run, 2))
    os.rename(run, tmp_path / "gone")  # deleting file by file could happen between two writes
    shutil.rmtree(tmp_path / "gone")
    said = command.ended(6)
    assert str(run) in said and "No such file or directory" in said
    assert not run.exists()
