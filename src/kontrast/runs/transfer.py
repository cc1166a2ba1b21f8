"""What a run's encoder does after transfer: detection, masks, keypoints, and many small classification sets."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kontrast.config.overrides import Overrides, override_layers
from kontrast.errors import EnvironmentFault, UsageError
from kontrast.files import LockHeld, disk_faults, take_lock
from kontrast.registry import nearest
from kontrast.runs.classification_transfer import transfer_to_classification
from kontrast.runs.detection_transfer import FOLDER, transfer_to_detection
from kontrast.runs.run import open_run
from kontrast.runs.transfer_encoders import transfer_encoders
from kontrast.runs.transfer_jobs import in_part, measure_in_processes
from kontrast.runs.transfer_results import FILE, TransferResults
from kontrast.training.device import choose_device

DETECTION = ("boxes", "masks", "keypoints")
TASKS = (*DETECTION, "classify")


def transfer(
    run: str | os.PathLike[str],
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = "canvases",
    task: str = "boxes",
    *,
    labels: float = 1.0,
    seeds: int = 3,
    against: Sequence[str | os.PathLike[str]] = (),
    control: bool = True,
    protocol: str = "",
    overrides: Overrides = (),
    metric: str = "",
    shots: Sequence[int] = (0, 5),
    methods: Sequence[str] = ("linear", "fine-tuned"),
    search: bool = True,
    jobs: int = 1,
    device: str = "auto",
    say: Callable[[str], None] = print,
) -> TransferResults:
    """Measure what a run's encoder does after transfer, next to the same encoder with random weights.

    The results are saved in the run's transfer.json and shown in its report. Repeat a call after a kill to continue it:
    what was measured is not measured again.

    Args:
        run: A run folder or a `kontrast.Run`. Detection needs a ResNet.
        data: For detection: "canvases" (default, embedded), or a folder in the layout of COCO or VOC. To classify: one
            or more folders with class sub-folders, named sets, or CSV files `name,label` beside their images, where
            "|" separates the labels of an image that has several.
        task: "boxes" (Faster R-CNN, default), "masks" (Mask R-CNN), "keypoints" (Keypoint R-CNN) or "classify".
        labels: The share of the training images that is used, drawn anew for each seed; default: 1.
        seeds: How many times to train, each time with another seed; default: 3.
        against: Other runs to compare with, for example one that was trained with labels.
        control: Compare with random weights; default: true.
        protocol: A protocol of detection: "canvases", "folder", "cacr-voc", "cacr-coco", "jcl-coco" or a .toml file;
            default: "canvases" for the embedded set, else "folder".
        overrides: Settings of the protocol to replace, as `key=value` texts or a mapping; to classify, those of
            `kontrast.probes.FineTuning`.
        metric: To classify: "accuracy", "mean-per-class", "map" or "roc-auc"; default: the one that the set asks for.
        shots: To classify: the training images per class; 0 for all; default: all, and 5.
        methods: To classify: "linear" and "fine-tuned" (default: both).
        search: To classify: choose learning rate and weight decay on a fifth of the training images; default: true.
        jobs: How many measurements to run at once on the device, each in a process of its own; default: 1.
        device: "auto" (default), "cpu" or "cuda".
        say: Called with each warning; default: print.

    Returns:
        A sequence with one `TransferResult` per encoder and seed, which prints as a table.

    Example:
        >>> import kontrast
        >>> quick = {"methods": ["linear"], "shots": [5], "search": False, "overrides": {"epochs": 2}, "device": "cpu"}
        >>> results = kontrast.transfer("runs/digits", ["photos"], "classify", seeds=1, **quick)
        >>> [one.encoder for one in results]
        ['trained', 'random']
    """
    if task not in TASKS:
        raise UsageError(f"unknown task {task!r}: {nearest(task, TASKS)}")
    if seeds < 1 or jobs < 1:
        raise UsageError(f"seeds = {seeds} and jobs = {jobs}: give at least one")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("transfer runs in one process: start it without torchrun")
    opened, on = open_run(run), choose_device(device)
    sources = [os.fspath(data)] if isinstance(data, str | os.PathLike) else [os.fspath(one) for one in data]
    if task in DETECTION and len(sources) != 1:
        raise UsageError(f"--task {task} takes one DATA, not {len(sources)}: {', '.join(sources)}")
    place = opened.path / FOLDER
    if place.is_symlink():  # in a folder of others, it may lead to a folder of this user
        raise UsageError(f"{place} is a link, and nothing is written where it leads: remove it")
    with disk_faults(place):
        place.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        if not in_part():
            stack.callback(os.close, lock_results(place))
        if jobs > 1 and not in_part():
            arguments = command_line(
                opened.path, sources, task=task, labels=labels, seeds=seeds, against=against, control=control,
                protocol=protocol, overrides=overrides, metric=metric, shots=shots, methods=methods, search=search,
                device=device,
            )  # fmt: skip
            measure_in_processes(arguments, jobs, place, on, say)
        encoders = transfer_encoders(opened, against, control)
        options: dict[str, Any] = {"overrides": overrides, "seeds": seeds, "device": on, "say": say}
        if task == "classify":
            found = transfer_to_classification(
                opened.path, encoders, sources, metric=metric, shots=shots, methods=methods, search=search, **options
            )
        else:
            found = transfer_to_detection(
                opened.path, encoders, sources[0], task=task, protocol=protocol, labels=labels, **options
            )
    return TransferResults(tuple(found), opened.path / FILE)


def lock_results(place: Path) -> int:
    """Lock the results of a run for this call, or say that another one is writing them."""
    try:
        return take_lock(place / ".lock", wait=False)
    except LockHeld:
        raise EnvironmentFault(f"another `kontrast transfer` is writing to {place.parent}: wait for it") from None


def command_line(
    run: Path, data: Sequence[str], *, against: Sequence[Any], control: bool, search: bool, overrides: Overrides,
    shots: Sequence[int], methods: Sequence[str], **options: Any,
) -> list[str]:  # fmt: skip
    """Return the arguments of `kontrast transfer` that measure the same."""
    given = [f"{key}={json.dumps(value)}" for layer in override_layers(overrides) for key, value in layer.items()]
    repeated = {"against": [os.fspath(one) for one in against], "shots": shots, "method": methods}
    named = [(key, value) for key, values in repeated.items() for value in values]
    named += [(key, value) for key, value in options.items() if value != ""]
    switches = ["--control" if control else "--no-control", "--search" if search else "--no-search"]
    return [*(f"--{key}={value}" for key, value in named), *switches, "--", str(run), *data, *given]
