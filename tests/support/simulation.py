"""Simulated time and order: several processes, ranks or threads as tasks, of which one seed decides who runs when.

The code that runs is kontrast's own. Each task is a thread, but only the one whose turn it is runs. At every traced
line of kontrast, and before every call that changes the disk, takes a lock, sleeps or meets other ranks, the seed
decides whether another task continues, whether a signal arrives, and whether the task is killed. A killed task changes
nothing on the disk any more, whatever its `finally` blocks try, and its locks are released, as the system does for a
process. Time stands still until every task waits, and then moves to the next moment at which
one continues.

One seed gives one interleaving: `Simulation(seed)` with the same tasks repeats it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from types import FrameType
from typing import Any
from unittest import mock

import torch

CHANGES = ("rename", "replace", "unlink", "remove", "mkdir", "rmdir", "truncate", "ftruncate", "pwrite", "fsync")
"""Functions of `os` that change the disk."""
MOST_TURNS = 200_000


class Killed(BaseException):
    """The task was killed. Like SIGKILL, nothing can be done about it: see `Simulation.kill`."""


class Deadlock(AssertionError):
    """No task can continue."""


class Task:
    """One process, rank or thread of the simulation."""

    def __init__(self, number: int, name: str, work: Callable[[], Any]):
        self.number, self.name, self.work = number, name, work
        self.turn = threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.due: float | None = None  # until when it sleeps
        self.ended = self.killed = False
        self.events: dict[int, Callable[[], None]] = {}  # what happens at which of its points
        self.points = 0
        self.locks: set[int] = set()  # descriptors
        self.error: BaseException | None = None
        self.result: Any = None


class Simulation:
    """Run tasks in an order that a seed decides.

    Args:
        seed: decides everything.
        traced: parts of the names of the files whose lines are points at which another task may continue.
        switching: the probability that another task continues at such a point.
    """

    def __init__(self, seed: int, traced: Sequence[str] = (), switching: float = 0.1):
        self.draw, self.traced, self.switching = random.Random(seed), tuple(traced), switching
        self.tasks: list[Task] = []
        self.now = 0.0
        self._idle = threading.Semaphore(0)
        self._task = threading.local()
        self._is_traced = functools.cache(lambda name: any(part in name for part in self.traced))

    def add(self, name: str, work: Callable[[], Any]) -> Task:
        """Add a task, before `run`."""
        self.tasks.append(Task(len(self.tasks), name, work))
        return self.tasks[-1]

    @property
    def current(self) -> Task | None:
        """The task that this thread runs; None outside of the simulation."""
        return getattr(self._task, "task", None)

    def run(self) -> None:
        """Run all tasks to their end. Raises `Deadlock` if they wait for each other."""
        with self._patched():
            threads = [threading.Thread(target=self._work, args=(task,), daemon=True) for task in self.tasks]
            for thread in threads:
                thread.start()
            try:
                for _ in range(MOST_TURNS):
                    if not (left := [task for task in self.tasks if not task.ended]):
                        break
                    self._give_turn(self.draw.choice(self._able_to_run(left)))
                else:
                    raise Deadlock(f"no end after {MOST_TURNS} turns: {[task.name for task in left]}")
            finally:
                for task in self.tasks:  # after a deadlock: end the threads
                    while not task.ended:
                        task.killed = True
                        self._give_turn(task)
                for thread in threads:
                    thread.join()

    def _able_to_run(self, left: list[Task]) -> list[Task]:
        able = [task for task in left if task.due is None and task.ready()]
        sleeping = [task for task in left if task.due is not None]
        awake = [task for task in sleeping if task.due <= self.now]  # type: ignore[operator]
        if not able and not awake and sleeping:
            self.now = min(task.due for task in sleeping if task.due is not None)
            awake = [task for task in sleeping if task.due <= self.now]  # type: ignore[operator]
        if not able and not awake:
            others = {task.name: repr(task.error) for task in self.tasks if task.ended}
            raise Deadlock(f"{', '.join(task.name for task in left)} can't continue; others ended with {others}")
        return able + awake

    def _give_turn(self, task: Task) -> None:
        task.turn.release()
        self._idle.acquire()

    def _work(self, task: Task) -> None:
        self._task.task = task
        task.turn.acquire()
        if self.traced:
            sys.settrace(self._trace)
        try:
            if not task.killed:
                task.result = task.work()
        except BaseException as error:
            task.error = error
        finally:
            sys.settrace(None)
            task.ended = True
            self._idle.release()

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not self._is_traced(frame.f_code.co_filename):
            return None

        def trace_line(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line":
                self.point()
            return trace_line

        return trace_line

    def point(self) -> None:
        """A point of the current task: an event may happen here, and another task may continue."""
        task = self.current
        if task is None:
            return
        if task.killed:
            raise Killed
        task.points += 1
        if len(self.tasks) > 1 and self.draw.random() < self.switching:
            self.wait()
        if event := task.events.pop(task.points, None):
            event()

    def wait(self, ready: Callable[[], bool] = lambda: True, due: float | None = None) -> None:
        """Let other tasks continue until this one is ready, or until the time `due`."""
        task = self.current
        assert task is not None
        task.ready, task.due = ready, due
        generator = torch.get_rng_state()  # every process has its own
        self._idle.release()
        task.turn.acquire()
        torch.set_rng_state(generator)
        task.ready, task.due = (lambda: True), None
        if task.killed:
            raise Killed

    def kill(self, task: Task) -> None:
        """Kill a task now: it changes nothing any more, and its locks are released."""
        task.killed = True
        for descriptor in task.locks:
            _close(descriptor)
        task.locks.clear()
        if task is self.current:
            raise Killed

    # What kontrast calls instead of the system

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name in CHANGES:
                stack.enter_context(mock.patch.object(os, name, self._changing(name)))
            replaced: list[tuple[Any, str, Any]] = [
                (os, "open", self._open), (os, "close", self._close_descriptor), (os, "getpid", self._getpid),
                (fcntl, "flock", self._flock), (time, "monotonic", self._monotonic), (time, "sleep", self._sleep),
            ]  # fmt: skip
            for place, name, function in replaced:
                stack.enter_context(mock.patch.object(place, name, function))
            yield

    def _changing(self, name: str) -> Callable[..., Any]:
        original = getattr(os, name)

        def change(*arguments: Any, **options: Any) -> Any:
            self.point()
            if name == "fsync" and self.current is not None:
                return None  # it only takes time
            return original(*arguments, **options)

        return change

    def _open(self, *arguments: Any, **options: Any) -> int:
        self.point()
        return _open(*arguments, **options)

    def _close_descriptor(self, descriptor: int) -> None:
        task = self.current
        if task is not None and task.killed:
            raise Killed
        if task is not None:
            task.locks.discard(descriptor)
        _close(descriptor)

    def _getpid(self) -> int:
        return _getpid() if self.current is None else 100_000 + self.current.number

    def _flock(self, descriptor: int, operation: int) -> None:
        if self.current is None:
            return _flock(descriptor, operation)
        self.point()
        self.current.locks.add(descriptor)
        if operation & (fcntl.LOCK_NB | fcntl.LOCK_UN):
            return _flock(descriptor, operation)

        def take() -> bool:
            try:
                _flock(descriptor, operation | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        if not take():
            self.wait(take)
        return None

    def _monotonic(self) -> float:
        return _monotonic() if self.current is None else self.now

    def _sleep(self, seconds: float) -> None:
        if self.current is None:
            return _sleep(seconds)
        self.wait(due=self.now + seconds)
        return None


_open, _close, _getpid, _flock = os.open, os.close, os.getpid, fcntl.flock
_monotonic, _sleep = time.monotonic, time.sleep


class LostRank(RuntimeError):
    """What a collective raises if another rank has ended, in the words of gloo."""

    def __init__(self) -> None:
        super().__init__("[gloo] Connection closed by peer")


class SimulatedRanks:
    """Ranks that meet in collectives: it stands in for `torch.distributed` in kontrast's modules.

    If ranks call different collectives, or one ends without calling those that another waits in, that is an error: on
    real machines they would wait until a timeout.
    """

    def __init__(self, simulation: Simulation, count: int):
        self.simulation, self.count = simulation, count
        self.tasks: list[Task] = []
        self._given: dict[int, tuple[str, Any]] = {}
        self._answers: dict[int, Any] = {}
        self.signed_in: set[str] = set()

    class ReduceOp:
        MAX, SUM = "max", "sum"

    class DistError(RuntimeError):
        pass

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.simulation.current in self.tasks

    def get_world_size(self) -> int:
        return self.count

    def get_rank(self) -> int:
        task = self.simulation.current
        assert task is not None
        return self.tasks.index(task)

    def get_backend(self) -> str:
        return "gloo"

    def set_timeout(self, _: Any) -> None:
        pass

    @property
    def distributed_c10d(self) -> Any:
        return self

    def _get_default_store(self) -> Any:
        return self

    def set(self, key: str, value: str) -> None:
        self.simulation.point()
        self.signed_in.add(key)

    def check(self, keys: list[str]) -> bool:
        self.simulation.point()
        return self.signed_in >= set(keys)

    def all_reduce(self, x: torch.Tensor, op: str = "sum") -> None:
        parts = self._meet(f"all_reduce {op} {tuple(x.shape)}", x.detach().clone())
        x.copy_(torch.stack(parts).amax(0) if op == "max" else torch.stack(parts).sum(0))

    def all_gather_into_tensor(self, out: torch.Tensor, x: torch.Tensor) -> None:
        out.copy_(torch.cat(self._meet(f"all_gather {tuple(x.shape)}", x.detach().clone())))

    def _meet(self, kind: str, value: Any) -> list[Any]:
        """Wait until every rank is here, and return their values in the order of ranks."""
        rank = self.get_rank()
        self.simulation.point()
        self._given[rank] = (kind, value)
        if len(self._given) == self.count:
            kinds = [kind for kind, _ in self._given.values()]
            assert len(set(kinds)) == 1, f"the ranks call different collectives: {kinds}"
            values = [self._given[one][1] for one in range(self.count)]
            self._given = {}
            self._answers = {one: values for one in range(self.count) if one != rank}
            return values
        others = [task for number, task in enumerate(self.tasks) if number != rank]
        self.simulation.wait(lambda: rank in self._answers or any(task.ended for task in others))
        if rank not in self._answers:
            self._given.pop(rank, None)
            raise LostRank
        return self._answers.pop(rank)

    def data_parallel(self, learner: torch.nn.Module, _: torch.device) -> torch.nn.Module:
        """Average every gradient over the ranks, as DistributedDataParallel does."""

        def average(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            self.all_reduce(parameter.grad)
            parameter.grad /= self.count

        for parameter in learner.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(average)
        return learner


class SimulatedPool:
    """Stands in for `ThreadPoolExecutor`: work is done when someone waits for a result, in an order of the seed.

    Make one class per simulation with `of`; the pools of one simulation share their waiting work.
    """

    draw: random.Random
    waiting: list[SimulatedFuture]

    @classmethod
    def of(cls, seed: int) -> type[SimulatedPool]:
        return type("SeededPool", (cls,), {"draw": random.Random(seed), "waiting": []})

    def __init__(self, workers: int, name: str = ""):
        self.workers, self.running, self.mine, self.open = workers, 0, [], True

    def submit(self, work: Callable[..., Any], *arguments: Any) -> SimulatedFuture:
        assert self.open, "work for a pool that was shut down"
        future = SimulatedFuture(self, functools.partial(work, *arguments))
        self.waiting.append(future)
        self.mine.append(future)
        while self.waiting and self.draw.random() < 0.4:
            self.work_once()
        return future

    def able(self, future: SimulatedFuture) -> bool:
        """Return whether a worker of the pool is free for this work: with one worker, work is done in its order."""
        pending = [one for one in future.pool.mine if one in self.waiting]
        return future.pool.running < future.pool.workers and future in pending[: future.pool.workers]

    def work_once(self) -> None:
        able = [future for future in self.waiting if self.able(future)]
        if not able:
            raise Deadlock("all workers wait for work that none of them does")
        future = self.draw.choice(able)
        self.waiting.remove(future)
        future.pool.running += 1
        try:
            future.value = future.work()
        except BaseException as error:
            future.error = error
        finally:
            future.pool.running -= 1
            future.done = True

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        self.open = False
        for future in [one for one in self.waiting if one.pool is self]:
            if cancel_futures:
                self.waiting.remove(future)
                future.done, future.error = True, CancelledError()
            elif wait:
                future.result()


class SimulatedFuture:
    """The result of work that a `SimulatedPool` does at some time."""

    def __init__(self, pool: SimulatedPool, work: Callable[[], Any]):
        self.pool, self.work, self.done = pool, work, False
        self.value: Any = None
        self.error: BaseException | None = None

    def result(self, timeout: float | None = None) -> Any:
        while not self.done:
            self.pool.work_once()
        if self.error is not None:
            raise self.error
        return self.value
