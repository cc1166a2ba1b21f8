"""kill -9 at any moment: the resumed run, or packing, ends with the bits of one that was left alone."""

from __future__ import annotations

import pytest

from support import kill_storm
from support.commands import TINY, Command, ends, steps_logged, until

QUICK = {"plain": 8, "teacher, bank, split batch norm": 20, "adamw, evaluation": 10, "multi-crop": 8, "pack": 14}


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
def test_sixty_kills(tmp_path, tally):
    """Seen: `resuming from step N`. Remains: encoder, checkpoint, metrics, store of an undisturbed run, to the bit."""
    made = storm(tmp_path, tally, QUICK, seed=1)
    assert made.wheres["save"] >= 9, made.wheres  # 15%
    assert made.wheres["pack"] and made.wheres["evaluation"], made.wheres


@pytest.mark.slow
@pytest.mark.fault(1)
@pytest.mark.parametrize("name", kill_storm.variants())
def test_every_objective_and_option_killed_twenty_times(tmp_path, tally, name):
    """Seen: `resuming from step N`. Remains: the bits of an undisturbed run, for everything that can be trained."""
    made = storm(tmp_path, tally, {name: 20}, seed=2)
    assert name == "pack" or made.wheres["save"] >= 3, made.wheres


@pytest.mark.fault(1)
def test_a_restarted_rank_goes_on_by_itself(tmp_path, tally):
    """Seen: the same command again, with torchrun's count and no --resume, says where it goes on. Remains: the bits."""
    argv = [*TINY, "training.max_steps=16", "--recipe", "quickstart", "--out"]
    Command(tmp_path / "log", *argv, str(tmp_path / "whole")).ended(0)
    first = Command(tmp_path / "log", *argv, str(tmp_path / "run"))
    until(steps_logged(tmp_path / "run", 1))
    first.send(9)
    assert first.wait() == -9
    tally("kills", 1)
    again = Command(tmp_path / "log", *argv, str(tmp_path / "run"), environment={"TORCHELASTIC_RESTART_COUNT": "1"})
    assert "resuming from step" in again.ended(0)
    assert ends(tmp_path / "run") == ends(tmp_path / "whole")


@pytest.mark.fault(1)
def test_a_restart_before_the_run_began_starts_it(tmp_path):
    """Seen: nothing new. Remains: a run, from its first step."""
    argv = [*TINY, "training.max_steps=4", "--out", str(tmp_path / "run")]
    Command(tmp_path / "log", *argv, environment={"TORCHELASTIC_RESTART_COUNT": "1"}).ended(0)
    assert (tmp_path / "run" / "encoder.safetensors").exists()
