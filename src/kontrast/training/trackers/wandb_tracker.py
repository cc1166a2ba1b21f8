"""Weights & Biases, offline in RUN/wandb unless WANDB_MODE says otherwise."""

from __future__ import annotations

import os
import shutil
from typing import Any

from kontrast.training.trackers.tracker import TRACKERS, Numbers, TrackedRun, Tracker


@TRACKERS.register("wandb")
class WeightsAndBiases(Tracker):
    """A run of Weights & Biases, in the project WANDB_PROJECT or "kontrast".

    Offline, a run is a file that a killed process may have cut off, and W&B can't continue it. So a resumed run writes
    it anew from metrics.jsonl, unless `wandb sync` has sent it already: then a second file continues it.
    """

    package = "wandb"
    folder = "wandb"

    def __init__(self, run: TrackedRun):
        super().__init__(run)
        self.offline = os.environ.setdefault("WANDB_MODE", "offline") == "offline"
        if self.offline:
            os.environ["WANDB_ERROR_REPORTING"] = "false"
        self.place = run.path / self.folder
        self.session: Any = None

    def start(self, known: int) -> int:
        import wandb

        if self.offline:
            earlier = sorted(self.place.glob(f"offline-run-*-{self.run.id}"))
            sent = [path for path in earlier if any(path.glob("*.wandb.synced"))]
            for path in earlier:
                if path not in sent:
                    shutil.rmtree(path)
            known = known if sent else -1
        self.session = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "kontrast"),
            id=self.run.id,
            name=self.run.name,
            dir=str(self.run.path),
            resume="allow",
            config={**self.run.settings, **{f"run.{name}": value for name, value in self.run.facts.items()}},
            allow_val_change=True,
            settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
        )
        return known if self.offline else self.session.step - 1

    def log(self, step: int, numbers: Numbers) -> None:
        self.session.log(dict(numbers), step=step)

    def summarize(self, step: int, numbers: Numbers) -> None:
        self.session.summary.update(dict(numbers))

    def close(self, finished: bool) -> None:
        if not finished:
            self.session.mark_preempting()
        self.session.finish(exit_code=0 if finished else 1)
