"""Files that were damaged after they were written: detected by hash, named, and never used for training."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from support.commands import TINY, Command, ends, resumed_step

PLAIN = [*TINY, "training.max_steps=12", "training.log_every=2"]
FILES = ("state.safetensors", "state.json", "manifest.json")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Train a run that tests copy."""
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
def test_damaged_newest_checkpoint(run, tmp_path, name, harm):
    """One line names the checkpoint; the run resumes from the older one, to the same bits."""
    whole, newest = ends(run), sorted((run / "checkpoints").glob("step-*"))[-1]
    assert newest.name == "step-00000012"
    HARMS[harm](newest / name)
    said = Command(tmp_path / "log", "--resume", "--out", str(run)).ended(0)
    assert len([line for line in said.splitlines() if "step-00000012" in line]) == 1, said
    assert resumed_step(said) < 12 and ends(run) == whole


@pytest.mark.fault(4)
def test_damaged_checkpoint_does_not_count_as_kept(run, tmp_path):
    """With checkpoints.keep=1 the newest good checkpoint is kept, even before the damaged step is reached again."""
    flip(sorted((run / "checkpoints").glob("step-*"))[-1] / "state.safetensors")
    again = ["--resume", "--out", str(run), "checkpoints.keep=1", "training.max_steps=11"]
    Command(tmp_path / "log", *again).ended(0)
    assert resumed_step(Command(tmp_path / "log-again", *again).ended(0)) == 11


@pytest.mark.fault(4)
def test_all_checkpoints_damaged(run, tmp_path):
    """Exit 4 with a reason per checkpoint; nothing starts over and nothing changes."""
    for path in (run / "checkpoints").glob("step-*/state.json"):
        flip(path)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    said = Command(tmp_path / "log", "--resume", "--out", str(run)).ended(4)
    assert said.count("state.json") >= 2
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"}.items() <= before.items()


@pytest.mark.fault(4)
@pytest.mark.parametrize("harm", ["a digit", "middle byte", "cut", "empty"])
def test_damaged_recipe(run, tmp_path, harm):
    """Exit 4 names recipe.toml, even if it is still valid TOML."""
    recipe = run / "recipe.toml"
    if harm == "a digit":
        text = recipe.read_text()
        assert "\nseed = 0" in text
        recipe.write_text(text.replace("\nseed = 0", "\nseed = 1"))
    else:
        HARMS[harm](recipe)
    said = Command(tmp_path / "log", "--resume", "--out", str(run)).ended(4)
    assert "recipe.toml" in said


@pytest.mark.fault(4)
@pytest.mark.parametrize("harm", ["middle byte", "cut", "empty"])
def test_damaged_run_json(run, tmp_path, harm):
    """Exit 4 names run.json, unless the flipped bit left it readable."""
    HARMS[harm](run / "run.json")
    try:
        json.loads((run / "run.json").read_bytes())
        readable = True
    except ValueError:
        readable = False
    command = Command(tmp_path / "log", "--resume", "--out", str(run))
    assert "run.json" in command.ended(4) if not readable else command.wait() in (0, 3, 4)


@pytest.mark.fault(4)
def test_damaged_lines_of_the_metrics(run, tmp_path):
    """One message counts them; every other line stays, and lines after the checkpoint are written again."""
    path, whole = run / "metrics.jsonl", (run / "metrics.jsonl").read_bytes().splitlines()
    torn = [whole[0], whole[1][:-9], b"\xff\x00" + whole[2], *whole[3:], whole[-1][:5]]
    path.write_bytes(b"\n".join(torn))
    said = Command(tmp_path / "log", "--resume", "--out", str(run)).ended(0)
    assert len(re.findall(r"metrics\.jsonl.* 2 damaged lines", said)) == 1, said
    assert path.read_bytes().splitlines() == [whole[0], *whole[3:]]
