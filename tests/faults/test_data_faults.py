"""Data that can't be read or packed, through the command: folders that are closed, files that are none, limits of the
system."""

from __future__ import annotations

import os
import resource
import tempfile
from functools import partial
from pathlib import Path

import pytest

from kontrast.cli import main as cli
from kontrast.data import open_data
from kontrast.errors import DataError

from support.command_line import kontrast, one_line
from support.commands import Command, as_nobody
from support.made_images import folder_of
from support.tiny_run import copy


@pytest.mark.fault(16)
@pytest.mark.parametrize("rights", [0o700, 0o744], ids=["closed", "names-only"])
def test_a_folder_that_may_not_be_read_is_named(rights):
    """Exit 3 and the folder, also where it is one of many: a part of the images never stands for all."""
    with tempfile.TemporaryDirectory() as place:  # not pytest's own: nobody may not enter that
        os.chmod(place, 0o755)
        root = folder_of(Path(place) / "pictures", 12, classes=4)
        inner = root / "class3" / "inner"
        inner.mkdir()
        (root / "class3" / "0003.png").rename(inner / "0003.png")
        (root / "class3").chmod(rights)
        closed = root / "class3" if rights == 0o700 else inner
        code, said = as_nobody(lambda: refused(root))
        assert code == 3 and f"{closed}: Permission denied (13)" in said


def refused(root: Path) -> tuple[int, str]:
    try:
        return 0, f"{len(open_data(root, max_bad=0.5))} images"
    except DataError as error:
        return error.exit_code, str(error)


@pytest.mark.fault(12)
def test_what_is_no_regular_file_has_no_neighbours(tmp_path):
    """Seen: exit 3 naming it, where a pipe without a writer would be waited for and /dev/zero read without end."""
    run = str(copy(tmp_path))
    os.mkfifo(tmp_path / "pipe.jpg")
    for image in (str(tmp_path / "pipe.jpg"), "/dev/null"):
        one_line(kontrast("neighbors", run, image, "--device", "cpu"), 3, image, "not a regular file")


def _limited(argv: list[str], most: int) -> int:
    """Run the command with `ulimit -f`."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    return cli.run(argv)


@pytest.mark.fault(5)
def test_a_limit_on_the_size_of_files_while_packing(tmp_path):
    """Seen: exit 6 and the store's path. Remains: what is whole; without the limit the same command goes on."""
    root, store = folder_of(tmp_path / "pictures", 300), tmp_path / "store"
    argv = ["pack", str(root), str(store)]
    said = Command(tmp_path / "log", instead=partial(_limited, argv, 210_000)).ended(6)
    assert f"{store / 'train'}: File too large" in said
    assert not (store / "train").exists()
    assert kontrast(*argv).returncode == 0 and (store / "train" / "images.u8").stat().st_size == 300 * 768
