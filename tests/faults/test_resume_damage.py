"""Bytes that changed on the disk after they were written: found by their hashes, named, and never trained on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from support.commands import TINY, Command, ends

PLAIN = [*TINY, "training.max_steps=12", "training.log_every=2"]
FILES = ("state.safetensors", "state.json", "manifest.json")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run that ended well; tests copy it."""
    place = tmp_path_factory.mktemp("finished")
    Command(place / "log", *PLAIN, "--out", str(place / "run")).ended(0)
    return place / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def flip(path: Path, place: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 1
    path.write_bytes(bytes(data))


HARMS = {
    "first byte": lambda path: flip(path, 0.0),
    "middle byte": lambda path: flip(path, 0.5),
    "last byte": lambda path: flip(path, 1.0),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
    "a digit": lambda path: path.write_text(path.read_text().replace('"world": 1', '"world": 3')),
}


QUICK = {("state.safetensors", "middle byte"), ("state.json", "cut"), ("manifest.json", "a digit")}
CASES = [(name, harm) for name in FILES for harm in HARMS if harm != "a digit" or name == "manifest.json"]


@pytest.mark.fault(4)
@pytest.mark.parametrize(
    ("name", "harm"), [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
def test_a_damaged_newest_checkpoint_is_named_and_the_older_one_used(run, tmp_path, name, harm):
    """Seen: one line with the checkpoint's name and what is wrong. Remains: the same end, from the older one."""
    whole, newest = ends(run), sorted((run / "checkpoints").glob("step-*"))[-1]
    assert newest.name == "step-00000012"
    HARMS[harm](newest / name)
    said = Command(tmp_path / "log", "--resume", "--out", str(run)).ended(0)
    assert said.count("skipped checkpoint step-00000012: ") == 1, said
    assert "from step" in said and ends(run) == whole


@pytest.mark.fault(4)
def test_a_damaged_checkpoint_takes_no_good_ones_place(run, tmp_path):
    """Seen: the same line. Remains: of one that is to be kept, the newest good one, also before the damaged one's step
    is reached again."""
    flip(sorted((run / "checkpoints").glob("step-*"))[-1] / "state.safetensors")
    again = ["--resume", "--out", str(run), "checkpoints.keep=1", "training.max_steps=11"]
    Command(tmp_path / "log", *again).ended(0)
    assert "from step 11 of 11" in Command(tmp_path / "log-again", *again).ended(0)


@pytest.mark.fault(4)
def test_with_every_checkpoint_damaged_resuming_is_refused(run, tmp_path):
    """Seen: exit 4 with each checkpoint's reason. Remains: everything as it was; nothing starts afresh."""
    for path in (run / "checkpoints").glob("step-*/state.json"):
        flip(path)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    said = Command(tmp_path / "log", "--resume", "--out", str(run)).ended(4)
    assert "no valid checkpoint" in said and said.count("state.json is damaged") >= 2
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"}.items() <= before.items()


@pytest.mark.fault(4)
@pytest.mark.parametrize("harm", ["a digit", "middle byte", "cut", "empty"])
def test_a_damaged_recipe_is_refused(run, tmp_path, harm):
    """Seen: exit 4 naming recipe.toml, also where it still is valid TOML. Remains: the checkpoints."""
    recipe = run / "recipe.toml"
    if harm == "a digit":
        text = recipe.read_text()
        assert "\nseed = 0" in text
        recipe.write_text(text.replace("\nseed = 0", "\nseed = 1"))
    else:
        HARMS[harm](recipe)
    said = Command(tmp_path / "log", "--resume", "--out", str(run)).ended(4)
    assert "recipe.toml" in said and "damaged" in said


@pytest.mark.fault(4)
@pytest.mark.parametrize("harm", ["middle byte", "cut", "empty"])
def test_a_damaged_run_json_is_refused(run, tmp_path, harm):
    """Seen: exit 4 naming run.json, or, where the flipped bit left it readable, nothing. Remains: the checkpoints."""
    HARMS[harm](run / "run.json")
    try:
        json.loads((run / "run.json").read_bytes())
        readable = True
    except ValueError:
        readable = False
    command = Command(tmp_path / "log", "--resume", "--out", str(run))
    assert "run.json is damaged" in command.ended(4) if not readable else command.wait() in (0, 3, 4)


@pytest.mark.fault(4)
def test_damaged_lines_of_the_metrics_are_left_out_and_said(run, tmp_path):
    """Seen: one line counting them. Remains: every other line; those after the checkpoint are written again."""
    path, whole = run / "metrics.jsonl", (run / "metrics.jsonl").read_bytes().splitlines()
    torn = [whole[0], whole[1][:-9], b"\xff\x00" + whole[2], *whole[3:], whole[-1][:5]]
    path.write_bytes(b"\n".join(torn))
    said = Command(tmp_path / "log", "--resume", "--out", str(run)).ended(0)
    assert said.count("metrics.jsonl: dropped 2 damaged lines") == 1, said
    assert path.read_bytes().splitlines() == [whole[0], *whole[3:]]
