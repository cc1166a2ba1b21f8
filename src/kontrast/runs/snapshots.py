"""The networks of a run before training and at every saved checkpoint: encoder and head, in eval mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from kontrast import networks
from kontrast.errors import CheckpointError
from kontrast.files import read_json_lines
from kontrast.runs.run import Run
from kontrast.training import checkpoints
from kontrast.training.learner import Student, with_batch_norm
from kontrast.training.run_folder import result_prefix

ENCODER_ALONE = "training"
"""The unit of a run that has no checkpoints: only the trained encoder is left, and features replace projections."""


class Snapshot(NamedTuple):
    """The student at one time of training, in epochs, or in steps if the run logged no epochs."""

    time: float
    student: Student


def snapshots(
    run: Run, limit: int, device: torch.device, say: Callable[[str], None] = print
) -> tuple[list[Snapshot], str]:
    """Return at most `limit` snapshots, the network of step 0 first and the newest last, and their unit of time.

    Damaged checkpoints are skipped with a warning. If none is readable, the only snapshot is the encoder of the
    finished run, without its head.
    """
    saved = checkpoints.checkpoints(run.path / "checkpoints")
    scale, unit = _time_per_step(run)
    found: list[Snapshot] = []
    for path in spread_evenly(saved, max(1, limit - 1)):
        try:
            tensors, _, manifest = checkpoints.load(path)
            student = restore_student(run, checkpoints.under(result_prefix(run.recipe), tensors), device)
            found.append(Snapshot(manifest["step"] * scale, student))
        except CheckpointError as error:
            say(f"skipped {error}")
        except RuntimeError:  # from load_state_dict
            say(f"skipped checkpoint {path.name}: it does not fit the run's recipe")
    if not found:
        say(f"{run.path} has no readable checkpoint: the encoder's features are used in place of projections")
        encoder = run.encoder(device)
        return [Snapshot(1.0, Student(encoder, networks.head("identity", encoder.width)))], ENCODER_ALONE
    return [Snapshot(0.0, restore_student(run, None, device)), *found][-limit:], unit


def restore_student(run: Run, tensors: dict | None, device: torch.device) -> Student:
    """Build the student with these weights, or with those before the first step."""
    student = with_batch_norm(run.before_training(), run.recipe)
    if tensors is not None:
        student.load_state_dict(tensors)
    return student.to(device).eval()


def spread_evenly(items: list, limit: int) -> list:
    """Choose at most `limit` items, evenly over the list and ending with the last."""
    if len(items) <= limit:
        return items
    return [items[round((i + 1) * len(items) / limit) - 1] for i in range(limit)]


def _time_per_step(run: Run) -> tuple[float, str]:
    """Epochs per step from the newest logged loss; (1, "step") if there is none."""
    path = run.path / "metrics.jsonl"
    for line in reversed(read_json_lines(path) if path.exists() else []):
        step, epoch = line.get("step"), line.get("epoch")
        if isinstance(step, int) and isinstance(epoch, int | float) and step > 0 and epoch > 0 and "loss" in line:
            return epoch / step, "epoch"
    return 1.0, "step"
