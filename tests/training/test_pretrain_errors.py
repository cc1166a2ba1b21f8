"""Errors of pretraining: one line that says what is wrong, what is allowed and what to do, and an exit code."""

from __future__ import annotations

import re

import pytest
import torch
from PIL import Image

from kontrast.training.run_folder import RunFolder

from support.commands import TINY, Command

SHORT = [*TINY, "training.max_steps=6", "training.log_every=2"]


def run(tmp_path, *argv: str, out: str = "run") -> tuple[int, str]:
    """Return the command's exit code and its output."""
    command = Command(tmp_path / "log", *argv, "--out", str(tmp_path / out))
    code = command.wait()
    lines = [line for line in command.said.splitlines() if line.startswith("kontrast: ")]
    assert code == 0 or len(lines) == 1, command.said
    assert "Traceback" not in command.said
    return code, command.said


def test_a_folder_that_contains_a_run_or_is_a_file(tmp_path):
    assert run(tmp_path, *SHORT)[0] == 0
    code, said = run(tmp_path, *SHORT)
    assert code == 2 and "--resume" in said
    (tmp_path / "file").write_text("mine")
    assert run(tmp_path, *SHORT, out="file")[0] == 6
    code, said = run(tmp_path, "--resume", out="nothing")
    assert code == 2 and "contains no run" in said


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["training.batch=100000"], 3, "fewer than one batch of 100000"),
        (["training.bach=3"], 2, "'training.bach': did you mean 'batch'"),
        (["objective.ramp=temperature"], 2, "objective.ramp = 'temperature' can't be used here"),
        (["objective.name=jcl", "objective.ramp=covariance"], 2, "did you mean 'covariance_weight'"),
        (
            ["training.batch=8", "batch_norm.kind=split", "batch_norm.splits=8", "batch_norm.joint=false"],
            2,
            "at least 16",
        ),
        (["nowhere"], 3, "nowhere"),
    ],
)
def test_mistakes_leave_no_folder(tmp_path, argv, code, words):
    found, said = run(tmp_path, *argv)
    assert found == code and words in said, said
    assert not (tmp_path / "run").exists()


def test_a_mistake_removes_the_folders_it_made_and_no_other(tmp_path):
    """`runs/` is removed too if this command made it and it is empty; otherwise it stays."""
    for mine in ("a/b/run", "old/run"):
        (tmp_path / "old").mkdir(exist_ok=True)
        assert run(tmp_path, "training.bach=3", out=mine)[0] == 2
        assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "old"]
    folder = RunFolder(tmp_path / "new" / "run")
    folder.create()
    (tmp_path / "new" / "other").mkdir()
    folder.abandon()
    assert (tmp_path / "new" / "run").exists()  # without the lock, the folder may be that of another process
    folder.hold()
    folder.abandon()
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["other"]


def test_a_collapse_is_reported_while_it_happens(tmp_path):
    """Alignment alone collapses, and the warning is printed before the end."""
    tiny = [t for t in TINY if not t.startswith(("training", "evaluation"))]
    place = tmp_path / "pictures"
    place.mkdir()
    made = torch.Generator().manual_seed(0)
    for number in range(64):
        pixels = torch.randint(0, 256, (20, 20, 3), dtype=torch.uint8, generator=made)
        Image.fromarray(pixels.numpy()).save(place / f"{number}.png")
    argv = [
        "objective.name=alignment",
        "head.name=identity",
        "training.batch=16",
        "training.epochs=12",
        "training.lr=1",
        "training.lr_scaling=none",
        "evaluation.every=3",
    ]
    code, said = run(tmp_path, str(place), *tiny, *argv)
    assert code == 0
    epochs = [float(e) for e in re.findall(r"collapsed: effective rank \S+ at epoch (\S+)", said)]
    assert epochs and epochs[0] < 12, said
