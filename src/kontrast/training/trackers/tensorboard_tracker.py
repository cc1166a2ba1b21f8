"""TensorBoard: scalars by step, in RUN/tensorboard."""

from __future__ import annotations

import time
from typing import Any

from kontrast.training.trackers.tracker import TRACKERS, Numbers, TrackedRun, Tracker


@TRACKERS.register("tensorboard")
class TensorBoard(Tracker):
    """TensorBoard's event files. A resumed run makes TensorBoard drop the events of later steps."""

    package = "tensorboard"
    folder = "tensorboard"
    can_forget = True

    def __init__(self, run: TrackedRun):
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        super().__init__(run)
        self.writer = EventFileWriter(str(run.path / self.folder))

    def start(self, known: int) -> int:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._add(known + 1, session_log=SessionLog(status=SessionLog.START))
        return known

    def log(self, step: int, numbers: Numbers) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._add(step, summary=Summary(value=values))

    def _add(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self.writer.add_event(Event(wall_time=time.time(), step=step, **content))

    def flush(self) -> None:
        self.writer.flush()

    def close(self, finished: bool) -> None:
        self.writer.close()
