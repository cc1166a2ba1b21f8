"""What goes wrong in a run: one line that says what, what is allowed and what to do, with its exit code."""

from __future__ import annotations

import json
import os
import re

import pytest
import torch
from forked import TINY, Command, steps_logged, until
from PIL import Image

from kontrast import cli
from kontrast.training.folder import read_lines

SHORT = [*TINY, "training.max_steps=6", "training.log_every=2"]


def run(tmp_path, *argv: str, out: str = "run") -> tuple[int, str]:
    """The command's exit code and what it said, its standard error."""
    command = Command(tmp_path / "log", *argv, "--out", str(tmp_path / out))
    code = command.wait()
    lines = [line for line in command.said.splitlines() if line.startswith("kontrast: ")]
    assert code == 0 or len(lines) == 1, command.said
    assert "Traceback" not in command.said
    return code, command.said


def folder(tmp_path, count: int, same: bool = False):
    place = tmp_path / "pictures"
    place.mkdir()
    made = torch.Generator().manual_seed(0)
    for number in range(count):
        pixels = torch.randint(0, 256, (20, 20, 3), dtype=torch.uint8, generator=made)
        Image.fromarray((torch.full_like(pixels, 90) if same else pixels).numpy()).save(place / f"{number}.png")
    return place


def test_nan_stops_with_its_step_and_keeps_the_last_good_checkpoint(tmp_path):
    out = tmp_path / "run"
    assert run(tmp_path, *SHORT, "training.schedule=constant")[0] == 0
    recipe = (out / "recipe.toml").read_text()
    (out / "recipe.toml").write_text(re.sub(r"\nlr = .*", "\nlr = 1e30", recipe))
    code, said = run(tmp_path, "--resume", "training.max_steps=20")
    assert code == 5
    told = re.search(r"not finite at step (\d+) \(lr 4?.*e\+2[0-9].*attraction .*repulsion ", said)
    assert told and 6 < int(told[1]) <= 20, said
    assert "the last good checkpoint is" in said and "lower training.lr" in said
    last = sorted((out / "checkpoints").glob("step-*"))[-1]
    assert last.name == f"step-{min(int(told[1]) - 1, 20):08d}" or int(last.name[5:]) < int(told[1])
    from safetensors.torch import load_file

    assert all(torch.isfinite(t).all() for t in load_file(last / "state.safetensors").values() if t.is_floating_point())


def test_nan_before_the_first_checkpoint(tmp_path):
    code, said = run(tmp_path, *SHORT, "training.lr=1e30", "training.warmup=0", "checkpoints.every=0")
    assert code == 5 and "there is no checkpoint before it" in said


def test_resume_refuses_a_changed_recipe_key_by_key(tmp_path):
    assert run(tmp_path, *SHORT)[0] == 0
    code, said = run(tmp_path, "--resume", "training.lr=0.7", "seed=3", "training.max_steps=8")
    assert code == 2 and "seed 0 -> 3" in said and re.search(r"training.lr \S+ -> 0.7", said)
    assert "max_steps" not in said
    code, said = run(tmp_path, "--resume", "--recipe", "digits/dcl", *SHORT)
    assert code == 2 and "objective.name nt-xent -> dcl" in said
    code, said = run(tmp_path, "--resume", "training.max_steps=8", "training.log_every=1")
    assert code == 0 and read_lines(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 8
    assert "max_steps = 8" in (tmp_path / "run" / "recipe.toml").read_text()


def test_resume_refuses_changed_images_unless_told(tmp_path):
    place = folder(tmp_path, 40)
    tiny = [t for t in SHORT if "epochs" not in t]
    assert run(tmp_path, str(place), *tiny)[0] == 0
    (place / "3.png").unlink()
    code, said = run(tmp_path, "--resume")
    assert code == 3 and "the images changed" in said and "--accept-data-change" in said
    assert run(tmp_path, "--resume", "--accept-data-change")[0] == 0
    assert "data_before" in json.loads((tmp_path / "run" / "run.json").read_text())


def test_a_folder_held_by_another_process(tmp_path):
    holder = Command(tmp_path / "held", *TINY, "training.max_steps=300", "--out", str(tmp_path / "run"))
    until(steps_logged(tmp_path / "run", 1))
    code, said = run(tmp_path, "--resume")
    holder.send(9)
    holder.wait()
    assert code == 6 and f"held by pid {holder.process} on " in said


def test_a_folder_that_holds_a_run_or_is_a_file(tmp_path):
    assert run(tmp_path, *SHORT)[0] == 0
    code, said = run(tmp_path, *SHORT)
    assert code == 2 and "already holds a run: use --resume" in said
    (tmp_path / "file").write_text("mine")
    assert run(tmp_path, *SHORT, out="file")[0] == 6
    code, said = run(tmp_path, "--resume", out="nothing")
    assert code == 2 and "holds no run" in said


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["training.batch=100000"], 3, "fewer than one batch of 100000"),
        (["training.bach=3"], 2, "unknown key 'training.bach': did you mean 'batch'?"),
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


def test_cuda_where_there_is_none(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert cli.run(["pretrain", "--device", "cuda", "--out", str(tmp_path / "run")]) == 6
    assert "no usable NVIDIA GPU" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_that_can_not_be_written(tmp_path):
    tmp_path.chmod(0o500)
    code = cli.run(["pretrain", "--device", "cpu", "--out", str(tmp_path / "run")])
    tmp_path.chmod(0o700)
    assert code == 6


def test_no_epochs_give_the_untrained_encoder(tmp_path):
    code, said = run(tmp_path, *TINY, "training.epochs=0")
    assert code == 0, said
    from kontrast.training import Run

    found = Run(tmp_path / "run")
    trained, untrained = found.encoder().state_dict(), found.encoder(trained=False).state_dict()
    assert all(torch.equal(trained[k], untrained[k]) for k in untrained)


def test_two_images(tmp_path):
    code, said = run(tmp_path, str(folder(tmp_path, 2)), "training.epochs=3")
    assert code == 0, said


def test_identical_images_train_and_are_called_collapsed(tmp_path):
    tiny = [t for t in TINY if "epochs" not in t]
    code, said = run(tmp_path, str(folder(tmp_path, 32, same=True)), *tiny, "training.epochs=2")
    assert code == 0 and "collapsed: effective rank 1.0" in said, said


def test_collapse_is_said_while_it_happens(tmp_path):
    """Alignment alone, without teacher, predictor or stop-gradient, collapses; the warning comes before the end."""
    tiny = [t for t in TINY if not t.startswith(("training", "evaluation"))]
    place = folder(tmp_path, 64)
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


def test_a_batch_larger_than_the_images_where_that_is_allowed(tmp_path):
    tiny = [t for t in TINY if not t.startswith("training")]
    argv = [*tiny, "training.epochs=1", "training.batch=64", "data.allow_small=true"]
    code, said = run(tmp_path, str(folder(tmp_path, 24)), *argv)
    assert code == 0 and "batch 64 -> 24" in said
