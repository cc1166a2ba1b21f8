"""Orders in which processes, ranks, threads and signals may meet, as seeds of a simulation: support/simulation.py.

A failing seed is kept here. `python -m support.interleavings --seeds 0 2000` tries more of them.
"""

from __future__ import annotations

import pytest

from kontrast.errors import EnvironmentFault
from kontrast.files import take_lock

from support.fuzzing import amounts
from support.interleavings import interrupt_evaluations, try_seed
from support.simulation import Deadlock, Simulation


@pytest.mark.fault(68)
@pytest.mark.parametrize("scenario", ["one process", "two ranks"])
@amounts(3, 400)
def test_signals_failures_and_kills_at_any_line(scenario, cases, tally):
    """Whatever happens at whatever line of whatever rank, all ranks stop at one step, and resuming gives equal bits."""
    for seed in range(cases):
        try_seed(scenario, seed)
    tally("interleavings", cases)


@pytest.mark.fault(75)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("times", [1, 2, 4])
def test_interrupted_evaluation_is_repeated(tmp_path, ranks, times, tally):
    """An evaluation that signals interrupt, even again and again, is repeated by the resumed run and lost in no log."""
    interrupt_evaluations(ranks, times, tmp_path)
    tally("interleavings", 1)


@pytest.mark.fault(69)
@amounts(25, 10_000)
def test_processes_that_want_one_run_folder(cases, tally):
    """At most one is inside, none changes the files of another, and one that gives up leaves a usable folder."""
    for seed in range(cases):
        try_seed("three on a run folder", seed)
    tally("interleavings", cases)


@pytest.mark.fault(70)
@amounts(10, 2_000)
def test_processes_that_pack_the_same_images(cases, tally):
    """With one of them killed at any point, the others finish the store, which has the same bytes."""
    for seed in range(cases):
        try_seed("packing together", seed)
    tally("interleavings", cases)


@pytest.mark.fault(70)
@amounts(15, 3_000)
def test_workers_that_finish_in_any_order(cases, tally):
    """The batches are the same; a lost worker is one error, and a consumer that leaves early hangs nothing."""
    for seed in range(cases):
        try_seed("feeding", seed)
    tally("interleavings", cases)


def test_a_seed_repeats_its_order():
    def order(seed: int) -> list[int]:
        simulation, seen = Simulation(seed), []

        def work(number: int) -> None:
            for _ in range(20):
                simulation.wait()
                seen.append(number)

        for number in range(3):
            simulation.add(f"task {number}", lambda number=number: work(number))
        simulation.run()
        return seen

    assert order(1) == order(1) != order(2)


def test_locks_time_and_kills_are_simulated(tmp_path):
    """A task waits for a lock until its holder is killed; sleeping takes no time; a dead lock is noticed."""
    import os
    import time

    simulation, seen = Simulation(0), []

    def hold() -> None:
        take_lock(tmp_path / "lock")
        seen.append("held")
        time.sleep(1e6)
        simulation.kill(holder)

    def want() -> None:
        time.sleep(1.0)
        os.close(take_lock(tmp_path / "lock"))
        seen.append(time.monotonic())

    holder = simulation.add("holder", hold)
    simulation.add("other", want)
    simulation.run()
    assert seen == ["held", 1e6]

    def both(first: str, second: str) -> None:
        take_lock(tmp_path / first)
        time.sleep(1.0)
        take_lock(tmp_path / second)

    crossed = Simulation(0)
    crossed.add("one", lambda: both("a", "b"))
    crossed.add("two", lambda: both("b", "a"))
    with pytest.raises(Deadlock, match="one, two"):
        crossed.run()


def test_ranks_that_disagree_are_noticed():
    """The simulated collectives find ranks that call different ones, which would wait for each other for minutes."""
    import torch

    from support.simulation import LostRank, SimulatedRanks

    simulation = Simulation(0)
    ranks = SimulatedRanks(simulation, 2)
    ranks.tasks += [
        simulation.add("rank 0", lambda: ranks.all_reduce(torch.zeros(1))),
        simulation.add("rank 1", lambda: ranks.all_reduce(torch.zeros(1), "max")),
    ]
    simulation.run()
    kinds = {type(task.error) for task in ranks.tasks}
    assert kinds == {AssertionError, LostRank}
    assert not isinstance(LostRank(), EnvironmentFault)  # kontrast turns it into one that names the rank
