"""The process of one tracker: it reads messages from stdin, follows metrics.jsonl, and answers on stdout.

    {"step": 40, "final": true}      give the tracker the numbers up to step 40; false: step 40 may get more
    {"summary": {...}, "step": 40}   results of the whole run
    {"close": true}                  end; true if the training has ended

Each message and answer is one line of JSON. Answers are {"step": 40}, how far the tracker has got, {"note": "..."},
{"error": "..."} and {"closed": true}. The process ends when its stdin is closed, soon even if the tracker hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kontrast import plugins
from kontrast.errors import StorageFault
from kontrast.files import read_json_lines, take_lock, write_atomic
from kontrast.operating_system import ignore_signals
from kontrast.training.trackers.tracker import TRACKERS, TrackedRun, Tracker

STOPPING = (signal.SIGTERM, signal.SIGINT)
LAST_SECONDS = 60.0
"""How long the process may work after the training's has ended."""
Answer = Callable[..., None]


def serve() -> None:
    """Run the tracker that the first line describes: the main function of the process."""
    ignore_signals(STOPPING)
    answers = os.fdopen(os.dup(1), "w", encoding="ascii", newline="\n")
    os.dup2(2, 1)  # what a tracker prints goes to its log

    def answer(**message: Any) -> None:
        with contextlib.suppress(OSError):  # the training's process was killed; the tracker gets what it was promised
            answers.write(json.dumps(message) + "\n")
            answers.flush()

    messages = read_messages()
    try:
        described = next(messages)
        name = described.pop("tracker")
        run = TrackedRun(**{**described, "path": Path(described["path"])})
        plugins.import_files()
        follow(name, run, messages, answer)
    except Exception as error:
        import traceback

        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {error}"[:500])
        sys.stderr.flush()
        os._exit(1)  # without what the tracker may still do


def read_messages() -> Iterator[dict[str, Any]]:
    """Yield messages until stdin ends. A thread reads them, so that a tracker that hangs outlives it only briefly."""
    waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin.buffer:
            waiting.put(line)
        waiting.put(None)
        last = threading.Timer(LAST_SECONDS, os._exit, [1])
        last.daemon = True
        last.start()

    threading.Thread(target=read, daemon=True).start()
    while (line := waiting.get()) is not None:
        yield json.loads(line)


def follow(name: str, run: TrackedRun, messages: Iterator[dict[str, Any]], answer: Answer) -> None:
    """Give a tracker what the messages tell. One process does it at a time: an earlier one may not have ended yet."""
    place = run.path / "trackers"
    take_lock(place / f"{name}.lock")
    own = getattr(TRACKERS[name], "folder", "")
    if own and (run.path / own).is_symlink():  # in a folder of others, it may lead to a folder of this user
        raise StorageFault(f"{run.path / own} is a link: replace it by a folder")
    tracker = TRACKERS.build(name, run=run)
    follower = Follower(tracker, run, place / f"{name}.json", answer)
    finished = False
    for message in messages:
        if "summary" in message:
            tracker.summarize(message["step"], message["summary"])
        elif "close" in message:
            finished = message["close"]
        else:
            follower.follow(message["step"], message["final"])
    tracker.close(finished)
    answer(closed=True)


class Follower:
    """Gives a tracker the records of metrics.jsonl, each once, and remembers how far it has got.

    Args:
        tracker: the tracker.
        run: its run.
        memory: the file that remembers it.
        answer: sends an answer.
    """

    def __init__(self, tracker: Tracker, run: TrackedRun, memory: Path, answer: Answer):
        self.tracker, self.run, self.memory, self.answer = tracker, run, memory, answer
        self.seen = 0  # bytes of metrics.jsonl
        self.waiting: list[dict[str, Any]] = []
        self.given: tuple[int, set[str]] = -1, set()  # the last step, and the names of the numbers that it had
        known = self._remembered()
        if tracker.can_forget:
            known = min(known, run.checkpoint)
        self.has = tracker.start(known)
        if self.has > run.checkpoint:
            steps = f"steps {run.checkpoint + 1} to {self.has}"
            answer(note=f"it keeps the numbers of {steps} from before the run went back to {run.checkpoint}")
        answer(step=self.has)

    def _remembered(self) -> int:
        with contextlib.suppress(OSError, StorageFault, ValueError, IndexError):
            record = read_json_lines(self.memory)[-1]
            if record.get("id") == self.run.id and type(record.get("step")) is int:
                return int(record["step"])
        return -1

    def follow(self, step: int, final: bool) -> None:
        """Give the tracker the numbers up to a step.

        Args:
            step: the last step.
            final: whether the step has all of its numbers.
        """
        self._read()
        while self.waiting and self.waiting[0]["step"] <= step:
            now: int = self.waiting[0]["step"]
            numbers: dict[str, float] = {}
            while self.waiting and self.waiting[0]["step"] == now:
                numbers |= {k: v for k, v in self.waiting.pop(0).items() if is_number(v) and k != "step"}
            given = self.given[1] if self.given[0] == now else set()  # an evaluation's record repeats the epoch
            self.tracker.log(now, {name: value for name, value in numbers.items() if name not in given})
            self.given = now, given | set(numbers)
            self.answer(step=now)
        self.tracker.flush()
        self.has = max(self.has, step if final else step - 1)
        write_atomic(self.memory, json.dumps({"id": self.run.id, "step": self.has}) + "\n")

    def _read(self) -> None:
        """Read the lines that were added, and keep those of steps that the tracker lacks."""
        with open(self.run.path / "metrics.jsonl", "rb") as file:
            file.seek(self.seen)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.seen += len(whole)
        records = map(json.loads, whole.splitlines())
        self.waiting += [record for record in records if record["step"] > self.has]


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
