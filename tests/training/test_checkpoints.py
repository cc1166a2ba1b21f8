"""Checkpoints: complete or absent, every byte verified, the newest valid one loaded, nothing ever unpickled."""

from __future__ import annotations

import errno
import json
import os
import pickle

import pytest
import torch

from kontrast.errors import CheckpointError, EnvironmentFault, StorageFault
from kontrast.files import replaced_folder, sweep
from kontrast.training import checkpoints

TENSORS = {"learner.weight": torch.arange(6.0).view(2, 3), "window": torch.zeros(0), "learner.count": torch.tensor(7)}


def save(folder, step):
    return checkpoints.save(folder, step, TENSORS, {"step": step}, {"torch": "x"})


def test_what_is_saved_is_loaded(tmp_path):
    tensors, state, manifest = checkpoints.load(save(tmp_path, 3))
    assert all(torch.equal(tensors[k], t) and tensors[k].dtype == t.dtype for k, t in TENSORS.items())
    assert state == {"step": 3} and manifest["torch"] == "x"


def test_the_newest_is_loaded_and_older_ones_are_pruned(tmp_path):
    for step in (1, 2, 30, 4):
        save(tmp_path, step)
    assert checkpoints.newest(tmp_path)[1] == {"step": 30}
    checkpoints.prune(tmp_path, 2)
    assert [p.name for p in checkpoints.checkpoints(tmp_path)] == ["step-00000004", "step-00000030"]


def test_a_checkpoint_whose_state_differs_is_replaced(tmp_path):
    """The evaluation of its step was repeated. Of the old checkpoint nothing is left."""
    save(tmp_path, 1)
    checkpoints.save(tmp_path, 1, TENSORS, {"step": 1, "owed": True}, {})
    assert checkpoints.newest(tmp_path)[1] == {"step": 1, "owed": True}
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_a_checkpoint_that_can_not_be_replaced_keeps_its_name(tmp_path, monkeypatch):
    """If the new one can't be renamed, the path is named, and the old one is in its place at once."""
    save(tmp_path, 1)
    rename = os.rename

    def fail(source, target):
        if source.name.startswith(".tmp-"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(StorageFault, match="step-00000001"):
        checkpoints.save(tmp_path, 1, TENSORS, {"step": 1, "owed": True}, {})
    assert os.listdir(tmp_path) == ["step-00000001"]
    assert checkpoints.load(tmp_path / "step-00000001")[1] == {"step": 1}


@pytest.mark.parametrize("new", [False, True])
def test_a_replacement_that_a_kill_interrupted_is_finished(tmp_path, new):
    """The old checkpoint gets its name back, unless the new one has it. It is never taken for one of its own."""
    final = save(tmp_path, 1)
    final.rename(replaced_folder(final))
    assert checkpoints.checkpoints(tmp_path) == []
    if new:
        checkpoints.save(tmp_path / "aside", 1, TENSORS, {"step": 1, "owed": True}, {}).rename(final)
        (tmp_path / "aside").rmdir()
    assert checkpoints.newest(tmp_path)[1] == ({"step": 1, "owed": True} if new else {"step": 1})
    assert os.listdir(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("name", ["state.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "empty"])
def test_a_damaged_checkpoint_is_skipped_with_its_reason(tmp_path, name, harm):
    save(tmp_path, 1)
    path = save(tmp_path, 2) / name
    data = bytearray(path.read_bytes())
    if harm == "flip":
        data[len(data) // 2] ^= 4
    damaged = {"flip": bytes(data), "cut": bytes(data[: len(data) // 2]), "empty": b""}.get(harm)
    path.unlink() if damaged is None else path.write_bytes(damaged)
    said = []
    try:
        state = checkpoints.newest(tmp_path, said.append)[1]
    except CheckpointError:
        pytest.fail("the older checkpoint is good")
    if harm == "flip" and name == "manifest.json" and state == {"step": 2}:
        return  # a flipped bit in a fact that nothing depends on
    assert state == {"step": 1}
    assert len(said) == 1 and "step-00000002" in said[0]


def test_without_a_valid_checkpoint_nothing_starts_from_scratch(tmp_path):
    (save(tmp_path, 1) / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        checkpoints.newest(tmp_path)
    assert checkpoints.newest(tmp_path / "nothing") is None


def test_incomplete_checkpoints_are_ignored_and_removed(tmp_path):
    save(tmp_path, 1)
    (tmp_path / ".tmp-123-9").mkdir()
    (tmp_path / ".tmp-123-9" / "state.json").write_text("{}")
    assert checkpoints.newest(tmp_path)[1] == {"step": 1}
    sweep(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_a_failed_write_leaves_nothing_and_names_the_path(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kontrast.files.sync", full)
    with pytest.raises(EnvironmentFault, match="no space left"):
        save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


class Evil:
    def __reduce__(self):
        return (open, ("canary", "w"))


@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
def test_pickles_are_never_opened(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "checkpoints", 1)
    (path / name).write_bytes(pickle.dumps(Evil()))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = checkpoints.describe_file((path / name).read_bytes())
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError):
        checkpoints.load(path)
    (tmp_path / "encoder.safetensors").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="can execute code"):
        checkpoints.read_weights(tmp_path / "encoder.safetensors")
    assert not (tmp_path / "canary").exists()
