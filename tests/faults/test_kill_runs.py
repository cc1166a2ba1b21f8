"""SIGKILL at any moment: the resumed run, or packing, ends with the bits of an undisturbed one."""

from __future__ import annotations

import pytest

from support import kill_storm
from support.commands import TINY, Command, ends, resumed_step, steps_logged, until

QUICK = {"teacher, bank, split batch norm": 4, "adamw, evaluation": 3, "pack": 2}


def storm(folder, tally, kills: dict[str, int], seed: int) -> kill_storm.Storm:
    lines: list[str] = []
    made = kill_storm.Storm(folder, seed, lines.append)
    for name, count in kills.items():
        made.storm(name, count)
    tally("kills", made.kills)
    tally("kills inside a save", made.wheres["save"])
    assert not made.unequal, "\n".join([*made.unequal, *lines])
    assert made.kills == sum(kills.values())
    return made


@pytest.mark.fault(1)
def test_kills_at_random_moments(tmp_path, tally):
    """The resumed run, or the packed store, equals that of an undisturbed process bit for bit."""
    made = storm(tmp_path, tally, QUICK, seed=1)
    assert made.wheres["save"] >= 2, made.wheres  # every other kill aims at a save
    assert made.wheres["pack"] and made.wheres["evaluation"], made.wheres


@pytest.mark.slow
@pytest.mark.fault(1)
@pytest.mark.parametrize("name", kill_storm.variants())
def test_every_objective_and_option_survives_kills(tmp_path, tally, name):
    """The resumed run equals an undisturbed one bit for bit, for everything that can be trained."""
    made = storm(tmp_path, tally, {name: 20}, seed=2)
    assert name == "pack" or made.wheres["save"] >= 3, made.wheres


@pytest.mark.fault(1)
def test_restart_by_torchrun_resumes(tmp_path, tally):
    """The same command without --resume, with torchrun's restart count, resumes to the same bits."""
    argv = [*TINY, "training.max_steps=16", "--recipe", "quickstart", "--out"]
    Command(tmp_path / "log", *argv, str(tmp_path / "whole")).ended(0)
    first = Command(tmp_path / "log", *argv, str(tmp_path / "run"))
    until(steps_logged(tmp_path / "run", 1))
    first.send(9)
    assert first.wait() == -9
    tally("kills", 1)
    again = Command(tmp_path / "log", *argv, str(tmp_path / "run"), environment={"TORCHELASTIC_RESTART_COUNT": "1"})
    assert resumed_step(again.ended(0)) >= 1
    assert ends(tmp_path / "run") == ends(tmp_path / "whole")


@pytest.mark.fault(1)
def test_restart_before_the_run_began(tmp_path):
    """The run starts at its first step."""
    argv = [*TINY, "training.max_steps=4", "--out", str(tmp_path / "run")]
    Command(tmp_path / "log", *argv, environment={"TORCHELASTIC_RESTART_COUNT": "1"}).ended(0)
    assert (tmp_path / "run" / "encoder.safetensors").exists()
