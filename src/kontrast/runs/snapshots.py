"""The networks of a run as they were before training and at every kept checkpoint: encoder and head, in eval mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from kontrast import networks
from kontrast.errors import CheckpointError
from kontrast.files import read_json_lines
from kontrast.runs.run import Run
from kontrast.training import checkpoints
from kontrast.training.learner import Student, with_batch_norm

ENCODER_ALONE = "training"
"""The word of the axis where no checkpoint is left, and features stand in for projections."""


class Snapshot(NamedTuple):
    """A moment of training: its place on the axis (epochs, or steps where epochs are not known) and its student."""

    at: float
    student: Student


def snapshots(
    run: Run, limit: int, device: torch.device, say: Callable[[str], None] = print
) -> tuple[list[Snapshot], str]:
    """At most `limit` moments, the untrained network first and the newest last, and the axis' word.

    A damaged checkpoint is left out and said. Where none is left, the encoder of a finished run stands alone, without
    its head.
    """
    kept: list[tuple[int, Path]] = []
    for path in checkpoints.checkpoints(run.path / "checkpoints"):
        step = path.name.removeprefix("step-")
        if step.isdigit():
            kept.append((int(step), path))
    rate, word = _epochs_a_step(run)
    found: list[Snapshot] = []
    for step, path in evenly(kept, max(1, limit - 1)):
        try:
            tensors, _, _ = checkpoints.load(path)
            found.append(Snapshot(step * rate, restored(run, checkpoints.under("learner.student", tensors), device)))
        except CheckpointError as error:
            say(f"skipped {error}")
    if not found:
        say(f"{run.path} has no readable checkpoint: the encoder's features stand in for projections")
        encoder = run.encoder(device)
        found.append(Snapshot(1.0, Student(encoder, networks.head("identity", encoder.width))))
        return found, ENCODER_ALONE
    return [Snapshot(0.0, restored(run, None, device)), *found][-limit:], word


def restored(run: Run, tensors: dict | None, device: torch.device) -> Student:
    """The student with these weights; without, as it was before the first step."""
    student = with_batch_norm(run.untrained(), run.recipe)
    if tensors is not None:
        try:
            student.load_state_dict(tensors)
        except RuntimeError:
            raise CheckpointError(f"a checkpoint of {run.path} does not fit its recipe") from None
    return student.to(device).eval()


def evenly(items: list, limit: int) -> list:
    """At most `limit` items, the last among them, spread over the list."""
    if len(items) <= limit:
        return items
    return [items[round((i + 1) * len(items) / limit) - 1] for i in range(limit)]


def _epochs_a_step(run: Run) -> tuple[float, str]:
    path = run.path / "metrics.jsonl"
    for line in reversed(read_json_lines(path) if path.exists() else []):
        step, epoch = line.get("step"), line.get("epoch")
        if isinstance(step, int) and isinstance(epoch, int | float) and step > 0 and epoch > 0 and "loss" in line:
            return epoch / step, "epoch"
    return 1.0, "step"
