"""Trackers for tests, in a file that `--import` can name: one that records, one that fails, one that hangs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from kontrast.training.trackers import TRACKERS, Tracker


@TRACKERS.register("recording")
class Recording(Tracker):
    """Writes each call as a line of RUN/recording.jsonl, and by that file knows what it has."""

    def __init__(self, run):
        super().__init__(run)
        self.path = run.path / f"{type(self).__name__.lower()}.jsonl"

    def start(self, known: int) -> int:
        self.write(start=self.run.checkpoint, id=self.run.id, settings=self.run.settings)
        return max([line["step"] for line in recorded(self.path) if "numbers" in line], default=-1)

    def log(self, step, numbers):
        self.write(step=step, numbers=dict(numbers))

    def summarize(self, step, numbers):
        self.write(summary=dict(numbers), at=step)

    def close(self, finished: bool) -> None:
        self.write(closed=finished)

    def write(self, **line) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")


@TRACKERS.register("forgetting")
class Forgetting(Recording):
    """Gets every number at once, and drops those that come after the step that it starts from."""

    can_forget = True

    def start(self, known: int) -> int:
        kept = [line for line in recorded(self.path) if line.get("step", -1) <= known]
        self.path.write_text("".join(json.dumps(line) + "\n" for line in kept))
        return known


@TRACKERS.register("failing")
class Failing(Recording):
    """Raises in the method that FAILING names, as long as the file FAILING_WHILE exists, and prints."""

    def log(self, step, numbers):
        print("printed by the tracker")
        self.fail("log")
        super().log(step, numbers)

    def close(self, finished: bool) -> None:
        self.fail("close")
        super().close(finished)

    def fail(self, method: str) -> None:
        if os.environ["FAILING"] == method and os.path.exists(os.environ["FAILING_WHILE"]):
            raise ConnectionError("no route to the tracker")


@TRACKERS.register("hanging")
class Hanging(Tracker):
    def log(self, step, numbers):
        time.sleep(3600)


@TRACKERS.register("lacking")
class Lacking(Tracker):
    package = "a_package_that_does_not_exist"


def recorded(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
