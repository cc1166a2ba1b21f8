"""A disk that fills up, can't be written or goes away: exit 6 naming the path; what was there before stays whole."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kontrast import files
from kontrast.cli import main as cli
from kontrast.files import read_json_lines
from kontrast.training import checkpoints

from support import kill_storm
from support.commands import TINY, Command, ends, steps_logged, until

SHORT = [*TINY, "training.max_steps=12", "training.log_every=1"]
LARGE = [*TINY, "training.max_steps=60", "encoder.width=64", "checkpoints.keep=100"]
"""Its checkpoints together are larger than the small disk."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True)
    if made.returncode:
        pytest.skip("needs the right to mount a small file system (root)")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path, leave: int) -> None:
    """Leave so many bytes free."""
    room = os.statvfs(place)
    (place / "ballast").write_bytes(b"\0" * max(0, room.f_bavail * room.f_bsize - leave))


def half_written(place: Path) -> list[Path]:
    return [p for p in place.rglob("*") if p.name.startswith((".tmp-", ".del-"))]


@pytest.mark.fault(5)
def test_the_disk_fills_up_while_a_checkpoint_is_written(small_disk, tmp_path):
    """Seen: exit 6, the checkpoint's path and its bytes. Remains: the older ones; with room again, equal bits."""
    run = small_disk / "run"
    said = Command(tmp_path / "log", *LARGE, "--out", str(run)).ended(6)
    told = re.search(r"no space left to write (\S+)/checkpoints/step-(\d+) \(([\d,]+) bytes needed\)", said)
    assert told and told[1] == str(run), said
    assert int(told[3].replace(",", "")) > 100_000
    assert not half_written(small_disk)
    saved = checkpoints.checkpoints(run / "checkpoints")
    assert saved and all(checkpoints.load(path) for path in saved)
    moved = Path(shutil.copytree(run, tmp_path / "moved"))
    Command(tmp_path / "log", "--resume", "--out", str(moved)).ended(0)
    whole = tmp_path / "whole"
    Command(tmp_path / "log", *LARGE, "--out", str(whole)).ended(0)
    assert ends(moved) == ends(whole)


def filled_at(argv: list[str], place: Path, name: str) -> int:
    """Run the command; the disk is filled just before the first line, or the whole, of the file of this name."""
    inner_atomic, inner_line = checkpoints.write_atomic, files.JsonLines.write

    def write_atomic(path: Path, content: str | bytes) -> None:
        if path.name == name:
            fill(place, 0)
        inner_atomic(path, content)

    def write(self: files.JsonLines, **record: object) -> None:
        if self.path.name == name and record["step"] == 1:
            fill(place, 0)
        inner_line(self, **record)

    checkpoints.write_atomic, files.JsonLines.write = write_atomic, write
    return cli.run(argv)


@pytest.mark.fault(5)
@pytest.mark.parametrize("name", ["metrics.jsonl", "encoder.safetensors"])
def test_the_disk_fills_up_while_the_run_folder_is_written(small_disk, tmp_path, name):
    """Seen: exit 6 and the file's path. Remains: whole lines, checkpoints, a run that goes on when there is room."""
    run = small_disk / "run"
    argv = ["pretrain", *SHORT, "--device", "cpu", "--no-probes", "--out", str(run)]
    said = Command(tmp_path / "log", instead=partial(filled_at, argv, small_disk, name)).ended(6)
    assert f"no space left to write {run / name}" in said
    assert not half_written(small_disk) and not (run / "encoder.safetensors").exists()
    (small_disk / "ballast").unlink()
    Command(tmp_path / "log", "--resume", "--out", str(run)).ended(0)
    assert [line["step"] for line in read_json_lines(run / "metrics.jsonl") if "loss" in line] == list(range(1, 13))


@pytest.mark.fault(5)
def test_the_disk_fills_up_while_packing(small_disk, tmp_path):
    """Seen: exit 6 and the store's path. Remains: the chunks that are whole; with room again it goes on from them."""
    pictures, _ = kill_storm.make_pictures(tmp_path)
    store = small_disk / "store"
    fill(small_disk, 50_000)
    said = Command(tmp_path / "log", instead=partial(cli.run, ["pack", str(pictures), str(store)])).ended(6)
    assert f"{store / 'train'}: No space left" in said
    assert not (store / "train").exists()
    (small_disk / "ballast").unlink()
    Command(tmp_path / "log", instead=partial(cli.run, ["pack", str(pictures), str(store)])).ended(0)
    Command(tmp_path / "log", instead=partial(cli.run, ["pack", str(pictures), str(tmp_path / "whole")])).ended(0)
    assert (store / "train" / "images.u8").read_bytes() == (tmp_path / "whole" / "train" / "images.u8").read_bytes()
    assert not list(store.glob("*.part"))


@pytest.mark.fault(5)
@pytest.mark.parametrize("name", ["vectors.parquet", "vectors.npy", "report.html"])
def test_the_disk_fills_up_while_a_result_is_written(small_disk, tmp_path, name):
    """Seen: exit 6 and the file's path. Remains: no file of that name; the run, and the same command works later."""
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    run, out = tmp_path / "run", small_disk / name
    pictures, _ = kill_storm.make_pictures(tmp_path)
    Command(tmp_path / "log", *SHORT, "--out", str(run)).ended(0)
    argv = ["embed", str(run), str(pictures), "--device", "cpu"] if name != "report.html" else ["report", str(run)]
    argv += ["--out", str(out)]
    fill(small_disk, 2048)
    said = Command(tmp_path / "log", instead=partial(cli.run, argv)).ended(6)
    assert "no space left to write" in said.lower() and str(small_disk) in said, said
    assert not out.exists() and not half_written(small_disk)
    (small_disk / "ballast").unlink()
    Command(tmp_path / "log", instead=partial(cli.run, argv)).ended(0)
    assert out.exists()


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder that nobody may write: root may write where rights forbid it, so for root it is a read-only mount."""
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
    """The data does not exist, which would be exit 3: the output is looked at first."""
    argv = ["pretrain", str(tmp_path / "no such data"), "--device", "cpu", "--out", str(out)]
    return Command(tmp_path / "log", instead=partial(cli.run, argv)).ended(6)


@pytest.mark.fault(6)
def test_a_read_only_output_is_refused_before_the_data_is_read(tmp_path, read_only):
    """Seen: exit 6 naming the place and another --out. Remains: the place as it was."""
    said = pretrain_without_data(tmp_path, read_only / "run")
    assert f"can't write {read_only / 'run'}: " in said and "choose another place" in said
    assert not list(read_only.iterdir())


@pytest.mark.fault(6)
@pytest.mark.parametrize("below", ["", "run"])
def test_a_file_in_the_outputs_place_is_refused_before_the_data_is_read(tmp_path, below):
    """Seen: exit 6 naming the place. Remains: the file."""
    place = tmp_path / "thesis.txt"
    place.write_text("mine")
    assert str(place) in pretrain_without_data(tmp_path, place / below)
    assert place.read_text() == "mine"


@pytest.mark.fault(6)
def test_a_run_folder_removed_under_a_running_process(tmp_path):
    """Seen: exit 6 naming the folder at the next checkpoint. Remains: nothing; no half of a run comes back."""
    run = tmp_path / "run"
    command = Command(tmp_path / "log", *TINY, "training.max_steps=300", "training.log_every=1", "--out", str(run))
    until(steps_logged(run, 2))
    os.rename(run, tmp_path / "gone")  # a removal by many calls may fall between two writes
    shutil.rmtree(tmp_path / "gone")
    said = command.ended(6)
    assert "can't write" in said and str(run) in said and "No such file or directory" in said
    assert not run.exists()
