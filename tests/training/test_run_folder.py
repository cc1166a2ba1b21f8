"""The run folder: one writer, complete files, lines that survive a crash."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from kontrast.errors import CheckpointError, EnvironmentFault, UsageError
from kontrast.files import JsonLines, read_json_lines, write_atomic
from kontrast.training.run_folder import RunFolder


def test_a_folder_that_contains_a_run_is_refused(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    (folder / "recipe.toml").write_text("")
    with pytest.raises(UsageError, match="already contains a run"):
        folder.create()


def test_a_file_instead_of_a_folder_is_refused(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(EnvironmentFault, match="Not a directory"):
        RunFolder(tmp_path / "run").create()
    assert (tmp_path / "run").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(EnvironmentFault, match="can't write"):
        RunFolder(tmp_path / "run").create()


def hold(path, queue):
    try:
        RunFolder(path).hold()
        queue.put("held")
    except EnvironmentFault as error:
        queue.put(str(error))


def test_a_second_process_learns_who_uses_the_folder(tmp_path):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()

    def ask() -> str:
        process = context.Process(target=hold, args=(tmp_path, queue))
        process.start()
        process.join()
        return queue.get()

    folder = RunFolder(tmp_path)
    folder.hold()
    assert f"pid {os.getpid()} on" in ask()
    folder.release()
    assert ask() == "held"
    folder.hold()  # the process that held the lock is dead, and so is the lock


def test_an_incomplete_last_line_and_later_steps_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 0.5}\n{"step": 2}\n{"step": 3}\n{"st')
    lines = JsonLines(path)
    lines.open(keep_until_step=2)
    lines.write(step=3, loss=0.25)
    lines.close()
    assert read_json_lines(path) == [{"step": 1, "loss": 0.5}, {"step": 2}, {"step": 3, "loss": 0.25}]


def test_an_atomic_write_leaves_the_old_file_on_failure(tmp_path, monkeypatch):
    path = tmp_path / "probes.json"
    write_atomic(path, "old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvironmentFault, match="no space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_newer_or_damaged_run_is_refused(tmp_path):
    folder = RunFolder(tmp_path)
    (folder / "run.json").write_text('{"version": 999}')
    with pytest.raises(CheckpointError, match="newer"):
        folder.info()
    (folder / "run.json").write_text('{"version"')
    with pytest.raises(CheckpointError, match="damaged"):
        folder.info()
