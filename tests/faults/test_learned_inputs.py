"""Files that a fuzzer learned to make, for every parser: a result or one of kontrast's own errors, and nothing else.

tests/support/corpus has the first inputs and every find. `python -m support.fuzz_targets --minutes 10` learns more.
"""

from __future__ import annotations

import os
import pickle
import subprocess
from pathlib import Path

import pytest

from support.fuzz_targets import TARGETS
from support.fuzzing import amounts
from support.learning_fuzzer import CORPUS, Target, attempt, fuzz_target

SLOWER = {"journals": 8, "stores": 2, "reports": 2, "checkpoints": 2, "recipes": 2, "encoders": 2}
"""By how much the number of mutations is divided, since these targets write many files for each."""


def usable(name: str) -> Target:
    target = TARGETS[name]
    if not target.can_run():
        pytest.skip(f"needs {target.needs}")
    return target


@pytest.mark.fault(71)
@pytest.mark.parametrize("name", sorted(TARGETS))
@amounts(60, 20_000)
def test_learned_inputs(tmp_path, name, cases, tally):
    """No traceback, no file outside of the folder, no process, no connection and no code, within bounded memory."""
    outcome = fuzz_target(usable(name), tmp_path, executions=cases // SLOWER.get(name, 1))
    assert not outcome.finds, "\n".join(find.problem for find in outcome.finds.values())
    tally("fuzz cases", outcome.executions)


FINDS = [path for path in sorted(CORPUS.rglob("find-*")) if path.is_file()]


@pytest.mark.fault(72)
@pytest.mark.parametrize("path", FINDS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_finds_stay_mended(tmp_path, path, tally):
    """A file with right digests and wrong entries, which once was a traceback, is refused by one of our own errors."""
    problem, _, _ = attempt(usable(path.parent.name), path.read_bytes(), tmp_path)
    assert not problem, problem
    tally("fuzz cases", 1)


def test_the_corpus_is_small_and_complete():
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    assert len(FINDS) >= 20 and sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < 100_000


def test_the_fuzzer_learns_and_repeats_itself(tmp_path):
    """It meets five nested conditions, which single mutations practically never do, and repeats itself with a seed."""
    target = Target("metrics", _nested_conditions, (ValueError,), [b"\1", b"\2", b"\3", b"\4", b"\5"], (__file__,))
    one, other = (fuzz_target(target, tmp_path, seed=1, executions=500) for _ in range(2))
    assert one.kept == other.kept and len(one.kept) >= 3
    assert [find.problem.splitlines()[-1] for find in one.finds.values()] == ["ZeroDivisionError: reached"]


def _nested_conditions(content: bytes, folder: Path) -> None:
    if b"\1" not in content:
        raise ValueError
    if b"\2" not in content:
        raise ValueError
    if b"\3" not in content:
        raise ValueError
    if b"\4" not in content:
        raise ValueError
    if b"\5" not in content:
        raise ValueError
    raise ZeroDivisionError("reached")


@pytest.mark.parametrize("what", ["write", "read", "remove", "process", "pickle", "execute"])
def test_the_watch_notices(tmp_path, what):
    """What no file may cause is a find, whatever error follows."""
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.write_text("x")
    inside.mkdir()
    (inside / "link").symlink_to(outside)
    evil = pickle.dumps(subprocess.Popen)

    def run(content: bytes, folder: Path) -> None:
        if what == "write":
            (folder / "../new").write_text("x")
        elif what == "read":
            outside.read_text()
        elif what == "remove":
            os.remove(outside)
        elif what == "process":
            subprocess.run(["true"], check=True)
        elif what == "pickle":
            pickle.loads(evil)
        else:
            exec(compile("1 + 1", str(folder / "own.py"), "exec"))

    problem, place, _ = attempt(Target("recipes", run, (ValueError,)), b"", inside)
    assert problem and place
