"""One system call of a command fails, made to fail by a library that is loaded with LD_PRELOAD.

By default, one case of each promise that takes about a second is tried; the others are slow.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kontrast.cli import main as cli
from kontrast.data.store import open_store
from kontrast.files import read_json
from kontrast.training import checkpoints

from support import inject_faults, tiny_run
from support.commands import TINY, ends
from support.failing_calls import Point, compile_library, environment_with
from support.faulty_commands import Ended, FaultyCommands
from support.folder_checks import contents, half_written, leftovers
from support.kill_storm import make_pictures

CPU = ["--device", "cpu"]
SHORT = [*TINY, "training.epochs=4", "training.max_steps=4", "training.log_every=1", "checkpoints.keep=2"]
"""With the pictures, a checkpoint at every step."""


def slow(*values: object) -> Any:
    """Return a case that only runs with the marker `slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = compile_library(tmp_path_factory.mktemp("library"))
    if found is None:
        pytest.skip("needs Linux and a C compiler (cc)")
    return found


@pytest.fixture(scope="module")
def faulty(library: Path) -> Iterator[FaultyCommands]:
    commands = FaultyCommands(library)
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("data"))[0]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tiny_run.copy(tmp_path)


def failed(ended: Ended, code: int = 6) -> str:
    """Check that a call did fail and that the command ended with this code and one line; return the line."""
    assert ended.failed, f"no call failed: {ended.said}"
    assert ended.code == code, ended.said
    assert "Traceback" not in ended.said, ended.said
    assert sum(line.startswith("kontrast: ") for line in ended.said.splitlines()) == (code != 0), ended.said
    return ended.line


def driver(library: Path, *arguments: str) -> int:
    """Run the script that tries many points; return how many it tried. All of them must hold."""
    command = [sys.executable, inject_faults.__file__, *arguments]
    done = subprocess.run(command, env=environment_with(library), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    tried = re.search(r"(\d+) of (\d+) points held", done.stdout)
    assert tried and tried[1] == tried[2]
    return int(tried[2])


@pytest.mark.slow
@pytest.mark.fault(58)
def test_calls_of_a_command_fail_one_after_another(library, tally):
    """One line and a documented exit code, nothing half-written; the same command then ends with the same bytes."""
    tried = driver(library, "--commands", "pretrain", "--points", "12")
    assert tried == 12
    tally("injected faults", tried)


@pytest.mark.slow
@pytest.mark.fault(58)
def test_many_calls_of_every_command_fail(library, tally):
    """The same, for every command and every kind of call."""
    tried = driver(library, "--limit", "4", "--more", "2")
    assert tried > 500
    tally("injected faults", tried)


@pytest.mark.slow
def test_library_catches_the_calls_of_python_numpy_and_safetensors(library, tmp_path):
    """Every kind of call is counted, whoever makes it: Python, numpy's mmap, and safetensors, in Rust."""
    script = f"""
import os, numpy as np, pathlib, torch
from safetensors.torch import save_file, load_file
from support.failing_calls import FailingCalls
calls, place = FailingCalls(), pathlib.Path({str(tmp_path)!r})
def counted(kind, work, says="ermission denied"):
    calls.arm(place)
    work()
    assert calls.counts[kind] > 0, (kind, calls.counts)
    calls.arm(place, kind, 1, "EACCES")
    try:
        work()
    except Exception as error:
        assert says in str(error), error
    else:
        assert kind == "stat", kind
    assert calls.failed.startswith(str(place)), kind
    calls.disarm()
file = place / "file"
counted("open", lambda: file.write_bytes(b"12"))
counted("write", lambda: file.write_bytes(b"12"))
file.write_bytes(b"12")
counted("read", lambda: file.read_bytes())
counted("close", lambda: file.read_bytes())
counted("mmap", lambda: np.memmap(file, dtype=np.uint8, mode="r"))
counted("rename", lambda: os.replace(file, file))
counted("truncate", lambda: os.truncate(file, 1))
counted("list", lambda: list(place.iterdir()))
counted("stat", lambda: os.path.exists(file))
counted("mkdir", lambda: os.makedirs(place / "new", exist_ok=True) or os.rmdir(place / "new"))
counted("unlink", lambda: (place / "missing").unlink(missing_ok=True))
with open(file, "ab") as opened:
    counted("fsync", lambda: os.fsync(opened.fileno()))
tensors = {{"a": torch.zeros(3)}}
counted("write", lambda: save_file(tensors, place / "a.safetensors"))
counted("open", lambda: load_file(place / "a.safetensors"), says="No such file")  # whatever the error
counted("mmap", lambda: load_file(place / "a.safetensors"))
"""
    subprocess.run([sys.executable, "-c", script], env=environment_with(library), check=True)


@pytest.mark.fault(59)
@pytest.mark.parametrize(
    "argv, file",
    [
        slow(["export"], "encoder.safetensors"),
        slow(["export"], "recipe.toml"),
        (["report"], "metrics.jsonl"),
        slow(["probe", "knn", *CPU], "run.json"),
    ],
)
def test_file_that_can_be_opened_but_not_read(faulty, run, argv, file):
    """Exit 6 names the file. Nothing was written, and the same command works later."""
    before = contents(run)
    command = [argv[0], run, *argv[1:]]
    line = failed(faulty.run(command, run / file, Point("read", 1, "EIO")))
    assert f"can't read {run / file}: Input/output error" in line
    assert contents(run) == before
    assert faulty.run(command, run).code == 0


@pytest.mark.slow
@pytest.mark.fault(59)
def test_store_that_can_not_be_mapped(faulty, pictures, tmp_path):
    """Exit 6 names the store, and no run is left."""
    assert cli.run(["pack", str(pictures), str(tmp_path / "store")]) == 0
    command = ["pretrain", tmp_path / "store", *SHORT, *CPU, "--no-probes", "--out", tmp_path / "run"]
    line = failed(faulty.run(command, tmp_path / "store", Point("mmap", 1, "EIO")))
    assert f"can't read {tmp_path / 'store' / 'train'}: Input/output error" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.fault(59)
@pytest.mark.parametrize("kind, error", [("read", "EIO"), slow("open", "EACCES")])
def test_manifest_of_a_store_that_can_not_be_read(faulty, pictures, tmp_path, kind, error):
    """Exit 6 names the manifest. The store is not packed again, as a damaged one would be; the command works later."""
    store = tmp_path / "store"
    assert cli.run(["pack", str(pictures), str(store)]) == 0
    manifest = store / "train" / "store.json"
    before = (contents(store), manifest.stat().st_ino)
    line = failed(faulty.run(["pack", pictures, store], manifest, Point(kind, 1, error)))
    assert f"can't read {manifest}: {os.strerror(getattr(errno, error))}" in line
    assert (contents(store), manifest.stat().st_ino) == before
    assert faulty.run(["pack", pictures, store], store).code == 0


@pytest.mark.slow
@pytest.mark.fault(60)
def test_newest_checkpoint_can_not_be_read(faulty, pictures, tmp_path):
    """The checkpoint is skipped with its name and the reason, and the older one leads to the same bits."""
    run = tmp_path / "run"
    start = ["pretrain", str(pictures), "--recipe", "quickstart", *SHORT]
    assert cli.run([*start, *CPU, "--no-probes", "--out", str(run)]) == 0
    before, last = ends(run), checkpoints.checkpoints(run / "checkpoints")[-1] / "state.safetensors"
    resume = ["pretrain", "--resume", *CPU, "--no-probes", "--out", run]
    ended = faulty.run(resume, last, Point("read", 1, "EIO"))
    failed(ended, 0)
    assert f"skipped can't read {last}: Input/output error" in ended.said
    assert "resuming from step 3 of 4" in ended.said
    assert ends(run) == before


@pytest.mark.fault(60)
@pytest.mark.parametrize("argv", [["pretrain", "--resume", "--no-probes", *CPU, "--out"], slow(["lens", *CPU])])
def test_folder_of_checkpoints_that_can_not_be_listed(faulty, run, argv):
    """Exit 6 names the folder: no run starts over, and the lens does not show less than there is."""
    before = contents(run / "checkpoints")
    command = [*argv, run] if argv[0] == "pretrain" else [argv[0], run, *argv[1:], "--images", "16"]
    number = 2 if argv[0] == "pretrain" else 1  # the first lists what a killed process left
    line = failed(faulty.run(command, run / "checkpoints", Point("list", number, "EACCES")))
    assert f"can't read {run / 'checkpoints'}: Permission denied" in line
    assert contents(run / "checkpoints") == before and not (run / "lens.json").exists()


@pytest.mark.fault(61)
@pytest.mark.parametrize("error", ["EIO", slow("EACCES")])
def test_new_store_can_not_be_renamed(faulty, pictures, tmp_path, error):
    """Exit 6 names the store, and the old one stays in its place; the same command then replaces it."""
    store = tmp_path / "store"
    assert cli.run(["pack", str(pictures), str(store), "--size", "10"]) == 0
    before = contents(store / "train")
    line = failed(faulty.run(["pack", pictures, store], store / "train", Point("rename", 1, error)))
    assert str(store / "train") in line
    assert contents(store / "train") == before and open_store(store / "train", full=True)
    assert faulty.run(["pack", pictures, store], store).code == 0
    assert cli.run(["pack", str(pictures), str(tmp_path / "whole")]) == 0
    assert contents(store / "train") == contents(tmp_path / "whole" / "train")


@pytest.mark.fault(62)
@pytest.mark.parametrize(
    "kind, error", [("write", "SHORT"), slow("read", "EINTR"), slow("read", "SHORT"), slow("write", "EINTR")]
)
def test_interrupted_and_short_calls_are_continued(faulty, pictures, tmp_path, kind, error):
    """Nothing is seen: the command ends with the same bytes."""
    assert cli.run(["pack", str(pictures), str(tmp_path / "whole")]) == 0
    store, file = tmp_path / "store", "store.json" if kind == "read" else "images.u8"
    below = store / "train" / file if kind == "read" else store / "train.part" / file
    failed(faulty.run(["pack", pictures, store], below, Point(kind, 1, error)), 0)
    assert contents(store) == contents(tmp_path / "whole")


@pytest.mark.fault(58, 63)
@pytest.mark.parametrize("verb, name", [("report", "page.html"), slow("export", "encoder.safetensors")])
def test_closing_a_written_file_fails(faulty, run, tmp_path, verb, name):
    """Exit 6 names the file, which may not be on the disk. No file has its name; the same command works later."""
    out = tmp_path / "out" / name
    out.parent.mkdir()
    line = failed(faulty.run([verb, run, "--out", out], out.parent, Point("close", 1, "EIO")))
    assert f"can't write {out}: Input/output error" in line
    assert not list(out.parent.iterdir())
    assert faulty.run([verb, run, "--out", out], out.parent).code == 0
    assert out.exists() and not half_written(out.parent)


@pytest.mark.fault(64)
def test_disk_fault_in_a_run_of_a_study(faulty, pictures, tmp_path):
    """Exit 6 names the file. No run counts as failed, and the same command finishes all of them."""
    study = tmp_path / "study"
    command = ["compare", "nt-xent", "dcl", pictures, *SHORT, "--seeds", "1", *CPU, "--out", study]
    encoder = study / "runs" / "nt-xent-seed0" / "encoder.safetensors"
    line = failed(faulty.run(command, encoder, Point("rename", 1, "ENOSPC")))
    assert f"no space left to write {encoder}" in line
    assert not (study / "runs" / "dcl-seed0").exists() and not (study / "runs" / "nt-xent-seed0" / "cell.json").exists()
    assert faulty.run(command, study).code == 0
    assert [read_json(path)["status"] for path in sorted(study.glob("runs/*/cell.json"))] == ["finished"] * 2


@pytest.mark.fault(65)
@pytest.mark.parametrize("error", ["EIO", slow("EACCES")])
def test_old_checkpoint_can_not_be_removed(faulty, pictures, tmp_path, error):
    """Training continues, and what was left is removed when it ends."""
    run = tmp_path / "run"
    command = ["pretrain", pictures, "--recipe", "quickstart", *SHORT, *CPU, "--no-probes", "--out", run]
    failed(faulty.run(command, run / "checkpoints", Point("unlink", 1, error)), 0)
    assert not leftovers(run)
    assert len(os.listdir(run / "checkpoints")) == 2


@pytest.mark.slow
@pytest.mark.fault(65)
def test_replaced_store_can_not_be_removed(faulty, pictures, tmp_path):
    """Packing succeeds, and the next command that packs there removes what was left."""
    store = tmp_path / "store"
    assert cli.run(["pack", str(pictures), str(store), "--size", "10"]) == 0
    failed(faulty.run(["pack", pictures, store], store / "train.replaced", Point("unlink", 1, "EACCES")), 0)
    assert leftovers(store)
    assert faulty.run(["pack", pictures, store], store).code == 0
    assert not leftovers(store)


@pytest.mark.fault(66)
@pytest.mark.parametrize("error", ["ENOSPC", slow("EIO")])
def test_card_of_an_export_can_not_be_written(faulty, run, tmp_path, error):
    """Exit 6 names the card. The same command writes the same bytes as one that was not disturbed."""
    out, card = tmp_path / "encoder.safetensors", tmp_path / "encoder.safetensors.json"
    ended = faulty.run(["export", run, "--out", out], card, Point("rename", 1, error))
    assert str(card) in failed(ended)
    assert not card.exists() and not leftovers(tmp_path)
    whole = [out.read_bytes()]
    for _ in range(2):  # a random order of the metadata would hardly be the same three times
        assert faulty.run(["export", run, "--out", out], tmp_path).code == 0
        whole.append(out.read_bytes())
    assert len(set(whole)) == 1
