"""What a tracker is, and the registry of their names."""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kontrast.errors import EnvironmentFault, UsageError
from kontrast.plugins import files_in_variable
from kontrast.registry import Registry

Numbers = Mapping[str, float]
TRACKERS = Registry("tracker", hints={"wb": "Weights & Biases is 'wandb'", "tb": "TensorBoard is 'tensorboard'"})


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker knows of its run.

    Attributes:
        path: the run folder.
        id: the name of the run in every tracker, which stays the same if the run is resumed.
        name: a name for people.
        settings: the recipe, by dotted keys such as `training.lr`.
        facts: versions, device and precision.
        checkpoint: the step that the run continues from; what came after it is no part of the run.
    """

    path: Path
    id: str
    name: str
    settings: dict[str, Any]
    facts: dict[str, Any]
    checkpoint: int = 0


class Tracker:
    """A receiver of the numbers of a run. It may raise and be slow; the training goes on.

    Args:
        run: the run.
    """

    package = ""
    """The package that it imports, which an extra of kontrast installs; "" for none."""
    folder = ""
    """The folder inside the run folder that it writes to; "" for none."""
    can_forget = False
    """Whether `start` makes it forget the steps after the checkpoint. Then it gets all numbers at once; others get
    those of a step when a checkpoint makes sure that the run will not take the step again."""

    def __init__(self, run: TrackedRun):
        self.run = run

    def start(self, known: int) -> int:
        """Continue after an earlier process, if there was one; return the last step that the tracker has.

        Args:
            known: the last step that it was given; -1 if there is none. After a crash it may have been given more: a
                tracker that can look into its store doesn't take the same step twice.
        """
        return known

    def log(self, step: int, numbers: Numbers) -> None:
        """Add the numbers of one step, under their names in metrics.jsonl. Steps arrive in their order."""
        raise NotImplementedError

    def summarize(self, step: int, numbers: Numbers) -> None:
        """Add results of the whole run: those of training when it ends, and those of probes later."""
        self.log(step, numbers)

    def flush(self) -> None:
        """Return when everything is stored."""

    def close(self, finished: bool) -> None:
        """End.

        Args:
            finished: whether the training has ended; false if it was stopped and can be resumed.
        """


def check_trackers(names: Sequence[str]) -> None:
    """Raise an error if a tracker is unknown, lacks its package, or can't be imported by its own process."""
    known = {os.path.dirname(path) for path in files_in_variable()}
    for name in names:
        tracker = TRACKERS[name]
        package = getattr(tracker, "package", "")
        if package and not is_installed(package):
            advice = f"pip install 'kontrast[{name}]', or leave it out of training.track"
            raise EnvironmentFault(f"the tracker {name} needs the package {package}: {advice}")
        file = os.path.abspath(inspect.getsourcefile(tracker) or "")
        if not tracker.__module__.startswith("kontrast.") and os.path.dirname(file) not in known:
            advice = "a tracker has a process of its own, which imports it: name the file with --import FILE.py"
            raise UsageError(f"the tracker {name} is registered in {file}: {advice}, or in KONTRAST_IMPORT")


def is_installed(package: str) -> bool:
    """Return whether a package can be imported. A folder of its name, such as the `wandb` that W&B writes, is none."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None
