"""MLflow, in a store in RUN/mlruns unless MLFLOW_TRACKING_URI names another."""

from __future__ import annotations

import os
import time
from typing import Any

from kontrast.training.trackers.tracker import TRACKERS, Numbers, TrackedRun, Tracker

TAG = "kontrast.run"
"""The tag by which a resumed run is found again."""
PER_REQUEST, PARAMETERS, LONGEST_VALUE = 1000, 100, 500
"""The most metrics and parameters of one request, and characters of a parameter's value, that MLflow takes."""


@TRACKERS.register("mlflow")
class MLflow(Tracker):
    """A run of MLflow, in the experiment MLFLOW_EXPERIMENT_NAME or "kontrast"."""

    package = "mlflow"
    folder = "mlruns"

    def __init__(self, run: TrackedRun):
        super().__init__(run)
        self.uri = os.environ.get("MLFLOW_TRACKING_URI")
        if self.uri is None:
            self.uri = (run.path / self.folder).absolute().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 prefers a database, another package
            os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        self.client: Any = None
        self.id = ""
        self.last: dict[str, int] = {}  # the last step of each number

    def start(self, known: int) -> int:
        from mlflow import MlflowClient

        self.client = MlflowClient(tracking_uri=self.uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "kontrast")
        experiment = self.client.get_experiment_by_name(name)
        place = self.client.create_experiment(name) if experiment is None else experiment.experiment_id
        found = self.client.search_runs([place], f"tags.`{TAG}` = '{self.run.id}'")
        if not found:
            self.id = self.client.create_run(place, tags={TAG: self.run.id}, run_name=self.run.name).info.run_id
            self._describe()
            return -1
        self.id = found[0].info.run_id
        self.client.update_run(self.id, status="RUNNING")
        self.last = {
            name: max(point.step for point in self.client.get_metric_history(self.id, name))
            for name in found[0].data.metrics
        }
        return -1  # a crash may have left the numbers of a step in part, so each number is compared with its own steps

    def _describe(self) -> None:
        from mlflow.entities import Param

        settings = {**self.run.settings, **{f"run.{name}": value for name, value in self.run.facts.items()}}
        given = [Param(key, str(value)[:LONGEST_VALUE]) for key, value in settings.items()]
        for first in range(0, len(given), PARAMETERS):
            self.client.log_batch(self.id, params=given[first : first + PARAMETERS])

    def log(self, step: int, numbers: Numbers) -> None:
        self._send(step, {name: value for name, value in numbers.items() if self.last.get(name, -1) < step})

    def summarize(self, step: int, numbers: Numbers) -> None:
        self._send(step, numbers)

    def _send(self, step: int, numbers: Numbers) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        metrics = [Metric(name, value, now, step) for name, value in numbers.items()]
        for first in range(0, len(metrics), PER_REQUEST):
            self.client.log_batch(self.id, metrics=metrics[first : first + PER_REQUEST])

    def close(self, finished: bool) -> None:
        self.client.set_terminated(self.id, "FINISHED" if finished else "KILLED")
