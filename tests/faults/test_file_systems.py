"""File systems that lack locks, or that don't remove a file while somebody reads it."""

from __future__ import annotations

import errno
import fcntl
import os
from functools import partial
from pathlib import Path

import pytest

from kontrast.cli import main as cli

from support.command_line import kontrast
from support.commands import TINY, Command, ends

LONG = [*TINY, "training.max_steps=6", "training.log_every=1", "--recipe", "quickstart", "--device", "cpu"]
LONG += ["--no-probes"]
NUMBERS = [errno.ENOLCK, *(pytest.param(n, marks=pytest.mark.slow) for n in (errno.ENOSYS, errno.EOPNOTSUPP))]


def without_locks(number: int, argv: list[str]) -> int:
    """Run a command on a file system whose flock fails with this error."""

    def refuse(handle: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    fcntl.flock = refuse
    return cli.run(argv)


@pytest.mark.fault(56)
@pytest.mark.parametrize("number", NUMBERS)
def test_run_on_a_file_system_without_locks(tmp_path, number):
    """One warning that two processes are not kept apart; the run is made, and can be resumed."""
    run = str(tmp_path / "run")
    started = ["pretrain", *LONG, "training.max_steps=3", "--out", run]
    for argv in (
        started,
        ["pretrain", "--resume", "--device", "cpu", "--no-probes", "training.max_steps=6", "--out", run],
    ):
        said = Command(tmp_path / "log", instead=partial(without_locks, number, argv)).ended(0)
        assert said.count("file system without locks") == 1 and os.strerror(number) in said, said
    assert (tmp_path / "run" / "encoder.safetensors").exists()


@pytest.mark.fault(56)
def test_store_on_a_file_system_without_locks(tmp_path):
    """One warning for all parts of the store; it is packed."""
    argv = ["pack", "digits", str(tmp_path / "store")]
    said = Command(tmp_path / "log", instead=partial(without_locks, errno.ENOLCK, argv)).ended(0)
    assert said.count("file system without locks") == 1
    assert (tmp_path / "store" / "test" / "store.json").exists()


def busy(names: tuple[str, ...], argv: list[str], until: Path | None = None) -> int:
    """Run a command while nothing with these names can be removed; once the path `until` exists, it can."""
    for name in ("unlink", "rmdir"):
        inner = getattr(os, name)

        def refuse(path: object, *words: object, inner=inner, **options: object) -> None:
            place = os.fspath(path)
            handle = options.get("dir_fd")
            whole = os.path.join(os.readlink(f"/proc/self/fd/{handle}"), place) if handle is not None else place
            if any(f"/{start}" in whole for start in names) and not (until and until.exists()):
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), place)
            inner(path, *words, **options)

        setattr(os, name, refuse)
    return cli.run(argv)


def leftovers(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir() if path.name.startswith("."))


@pytest.mark.fault(57)
def test_checkpoints_that_cannot_be_removed(tmp_path):
    """Training goes on; the next start removes them, and so does the next checkpoint as soon as it is possible."""
    argv = ["pretrain", *LONG, "checkpoints.keep=1", "checkpoints.every=0.005", "--out"]
    Command(tmp_path / "log", instead=partial(busy, (".del-",), [*argv, str(tmp_path / "run")])).ended(0)
    assert len(leftovers(tmp_path / "run")) >= 2
    resume = ["pretrain", "--resume", "--device", "cpu", "--no-probes", "--out"]
    assert kontrast(*resume, str(tmp_path / "run")).returncode == 0
    assert leftovers(tmp_path / "run") == []
    later = tmp_path / "again" / "checkpoints" / "step-00000006"
    Command(tmp_path / "log", instead=partial(busy, (".del-",), [*argv, str(tmp_path / "again")], later)).ended(0)
    assert leftovers(tmp_path / "again") == []
    assert ends(tmp_path / "run") == ends(tmp_path / "again")


@pytest.mark.fault(57)
def test_leftovers_that_still_cannot_be_removed(tmp_path):
    """They stop nobody: the run is resumed, and a later start removes them."""
    run = tmp_path / "run"
    assert kontrast("pretrain", *LONG, "training.max_steps=3", "--out", str(run)).returncode == 0
    (run / ".tmp-1-report.html").touch()
    (run / ".del-1-old").mkdir()
    resume = ["pretrain", "--resume", "--out", str(run), "--device", "cpu", "--no-probes"]
    Command(tmp_path / "log", instead=partial(busy, (".tmp-1-report", ".del-1-old"), resume)).ended(0)
    assert (run / ".tmp-1-report.html").exists()
    assert kontrast(*resume).returncode == 0
    assert not [path.name for path in run.iterdir() if path.name.startswith((".tmp-", ".del-"))]
