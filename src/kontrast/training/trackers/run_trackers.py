"""The trackers of a run, as the training sees them: it tells their processes how far metrics.jsonl is final."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import IO, Any

from kontrast.config.overrides import flat
from kontrast.config.recipe import Recipe, to_tree
from kontrast.errors import CheckpointError, KontrastError
from kontrast.files import disk_faults, open_without_links
from kontrast.import_path import python_environment
from kontrast.operating_system import blocked_signals
from kontrast.training.run_folder import RunFolder
from kontrast.training.trackers.tracker import TRACKERS, Numbers, TrackedRun, check_trackers
from kontrast.training.trackers.tracker_process import STOPPING

Say = Callable[[str], None]
FACTS = ("kontrast", "torch", "python", "device", "world", "precision", "started")
"""Entries of run.json that trackers show beside the recipe."""
PATIENCE, STOP_PATIENCE = 60.0, 5.0
"""Seconds without any progress after which a tracker is given up when training ends, or is left alone if it is stopped.
KONTRAST_TRACKER_TIMEOUT overrides the first."""


class TrackerProcess:
    """A tracker's process. No method waits for it, except for `wait`.

    Args:
        name: the name of the tracker.
        run: its run.
    """

    def __init__(self, name: str, run: TrackedRun):
        self.name, self.run = name, run
        self.has, self.error, self.closed = -1, "", False
        self.notes: list[str] = []
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._progress = threading.Event()
        command = "from kontrast.training.trackers import serve; serve()"
        place = run.path / "trackers"
        with disk_faults(place):
            place.mkdir(exist_ok=True)
            log = open(place / f"{name}.log", "ab", opener=open_without_links)  # noqa: SIM115
        with log, blocked_signals(STOPPING):
            self._process = subprocess.Popen(
                [sys.executable, "-c", command],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=python_environment(),
            )  # fmt: skip
        for work, stream in ((self._send, self._process.stdin), (self._receive, self._process.stdout)):
            threading.Thread(target=work, args=(stream,), name=f"kontrast-{name}", daemon=True).start()
        self.tell(tracker=name, **{**asdict(run), "path": str(run.path.absolute())})

    def tell(self, **message: Any) -> None:
        """Send a message as soon as the process takes it."""
        self._messages.put(message)

    def _send(self, stream: IO[bytes]) -> None:
        """Pass messages on. A tracker that hangs fills the pipe, which stops this thread alone."""
        with contextlib.suppress(OSError, ValueError):
            while (message := self._messages.get()) is not None:
                stream.write(json.dumps(message).encode() + b"\n")
                stream.flush()
        with contextlib.suppress(OSError):
            stream.close()

    def _receive(self, stream: IO[bytes]) -> None:
        for line in stream:
            answer = json.loads(line)
            self.has, self.closed = answer.get("step", self.has), answer.get("closed", self.closed)
            self.notes += [answer["note"]] if "note" in answer else []
            self.error = answer.get("error", self.error)
            self._progress.set()
        if not self.closed and not self.error:
            self.error = "its process ended"
        self._progress.set()

    def wait(self, patience: float) -> None:
        """Wait until the tracker has closed or failed, or made no progress for so many seconds."""
        self._messages.put(None)
        while not (self.closed or self.error) and self._progress.wait(patience):
            self._progress.clear()

    def kill(self) -> None:
        """End the process, whatever it is waiting for."""
        self._process.kill()
        self._process.wait()


class RunTrackers:
    """All trackers of a run, of which only the first rank has any.

    Args:
        folder: the run folder.
        names: the names of the trackers.
        say: receives a line about each tracker that fails.
    """

    def __init__(self, folder: RunFolder, names: Sequence[str], say: Say):
        self.folder, self.names, self.say = folder, tuple(dict.fromkeys(names)), say
        check_trackers(self.names)
        self.processes: list[TrackerProcess] = []
        self._failed: set[str] = set()

    def start(self, recipe: Recipe, checkpoint: int) -> None:
        """Start the processes of a run that begins, or continues after a checkpoint; they show its recipe."""
        if self.names:
            run = tracked_run(self.folder, recipe, checkpoint)
            self.processes = [TrackerProcess(name, run) for name in self.names]

    def logged(self, step: int) -> None:
        """Tell those that can forget a step about a new record."""
        for process in self.processes:
            if TRACKERS[process.name].can_forget:  # type: ignore[attr-defined]
                process.tell(step=step, final=False)

    def commit(self, step: int) -> None:
        """Tell all that the records up to a step are final."""
        for process in self.processes:
            process.tell(step=step, final=True)
            self._report(process)

    def _report(self, process: TrackerProcess) -> None:
        """Say once that a tracker has failed."""
        while process.notes:
            self.say(f"tracker {process.name}: {process.notes.pop(0)}")
        if process.error and process.name not in self._failed:
            self._failed.add(process.name)
            has = f"it has the numbers up to step {max(0, process.has)}, and is tried again when the training ends"
            self.say(f"tracker {process.name} failed: {process.error}: {has} (see {self._log(process)})")

    def _log(self, process: TrackerProcess) -> str:
        return str(self.folder / "trackers" / f"{process.name}.log")

    def stop(self) -> None:
        """End because the training is interrupted. Slow trackers finish what they know by themselves, or are told again
        when the run is resumed."""
        for process in self.processes:
            process.tell(close=False)
        for process in self.processes:
            process.wait(STOP_PATIENCE)
            self._report(process)
        self.processes = []

    def finish(self, step: int, results: Numbers) -> None:
        """End because the training has. Those that failed before are tried once more.

        Args:
            step: the last step.
            results: numbers of the whole run.
        """
        for process in self.processes:
            self._tell_end(process, step, results)
        for process in self.processes:
            process.wait(patience())
            if process.error:
                self._report(process)
                process.kill()
                process = TrackerProcess(process.name, replace(process.run, checkpoint=step))
                process.tell(step=step, final=True)
                self._tell_end(process, step, results)
                process.wait(patience())
            self._report(process)
            if not process.closed:
                reason = process.error or f"it does not answer for {patience():g} s"
                process.kill()
                lost = f"it lacks the numbers after step {max(0, process.has)}, which metrics.jsonl has"
                again = "`kontrast pretrain --resume` gives them to it"
                self.say(f"tracker {process.name}: {reason}: {lost}; {again} (see {self._log(process)})")
        self.processes = []

    def _tell_end(self, process: TrackerProcess, step: int, results: Numbers) -> None:
        process.tell(summary=dict(results), step=step)
        process.tell(close=True)


def patience() -> float:
    """Return after how many seconds without any progress a tracker is given up."""
    with contextlib.suppress(KeyError, ValueError):
        return max(0.1, float(os.environ["KONTRAST_TRACKER_TIMEOUT"]))
    return PATIENCE


def tracked_run(folder: RunFolder, recipe: Recipe, checkpoint: int) -> TrackedRun:
    """Describe a run for its trackers. run.json keeps the id that it has there."""
    info = folder.info() if (folder / "run.json").exists() else {}
    name = info.get("tracker_id")
    if name is None:
        name = secrets.token_hex(8)
        folder.update_info(tracker_id=name)
    if not isinstance(name, str) or not re.fullmatch(r"[0-9a-f]{16}", name):
        raise CheckpointError(f"{folder / 'run.json'} is damaged: tracker_id is not what kontrast wrote; remove it")
    facts = {key: info[key] for key in FACTS if isinstance(info.get(key), str | int)}
    title = recipe.title or folder.path.absolute().name
    return TrackedRun(folder.path, name, title, flat(to_tree(recipe)), facts, checkpoint)


def track_results(folder: RunFolder, recipe: Recipe, results: Mapping[str, float], say: Say) -> None:
    """Add results that were measured after training, for example of probes, to the run's trackers."""
    info = folder.info()
    if not recipe.training.track or not results or "finished" not in info or "tracker_id" not in info:
        return
    try:
        trackers = RunTrackers(folder, recipe.training.track, say)
    except KontrastError as error:
        say(f"the results are not tracked: {error}")
        return
    trackers.start(recipe, info["steps"])
    trackers.commit(info["steps"])
    trackers.finish(info["steps"], results)
