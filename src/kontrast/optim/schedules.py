"""The learning rate with its warm-up, weight decay, the teacher's momentum and ramps, as pure functions of the step.

t step from 0, T steps in all. Nothing has to be saved or restored. Epochs may be fractions; step t belongs to epoch
t / steps_per_epoch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def scaled_learning_rate(lr: float, batch: int, scaling: str = "none") -> float:
    """Scale the peak learning rate to the batch size.

    Args:
        lr: the learning rate of the recipe.
        batch: images per step.
        scaling: "none" returns lr, "linear" lr * batch / 256, "sqrt" lr * sqrt(batch) (SimCLR: 0.075 sqrt(batch)).

    Example:
        >>> scaled_learning_rate(0.5, batch=512, scaling="linear")
        1.0
    """
    return {"none": lr, "linear": lr * batch / 256, "sqrt": lr * math.sqrt(batch)}[scaling]


def learning_rate(
    step: int,
    *,
    lr: float,
    epochs: float,
    steps_per_epoch: int,
    schedule: str = "cosine",
    warmup: float = 0.0,
    milestones: Sequence[float] = (),
    factor: float = 0.1,
    final: float = 0.0,
    per_epoch: bool = False,
) -> float:
    """Return the learning rate of a step.

    Args:
        step: the step, counted from 0.
        lr: the peak learning rate.
        epochs: length of the training in epochs.
        steps_per_epoch: steps in one epoch.
        schedule: "cosine", "linear", "steps" or "constant". It covers what the warm-up leaves.
        warmup: epochs of linear warm-up. The first step has lr / (number of warm-up steps).
        milestones: epochs at which "steps" multiplies the rate by `factor`, counted from the start, warm-up included.
        factor: multiplier at each milestone.
        final: the rate at which "cosine" and "linear" end.
        per_epoch: change the rate only between epochs (MoCo, JCL).

    Example:
        >>> [learning_rate(t, lr=1.0, epochs=2, steps_per_epoch=2, schedule="linear", warmup=1) for t in range(4)]
        [0.5, 1.0, 1.0, 0.5]
    """
    warmup_steps = warmup * steps_per_epoch
    if step + 1 <= warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    if per_epoch:
        step -= step % steps_per_epoch
    if schedule == "steps":
        return lr * factor ** sum(step >= m * steps_per_epoch for m in milestones)
    progress = min(max(step - warmup_steps, 0.0) / max(epochs * steps_per_epoch - warmup_steps, 1e-9), 1.0)
    left = {"cosine": (1 + math.cos(math.pi * progress)) / 2, "linear": 1 - progress}[schedule]
    return final + (lr - final) * left


def cosine_decay(start: float, elapsed: float, total: float) -> float:
    """Return start (1 + cos(pi elapsed/total)) / 2, which falls from `start` to 0.

    Example:
        >>> cosine_decay(0.5, elapsed=5, total=10)
        0.25
    """
    return start * (1 + math.cos(math.pi * elapsed / total)) / 2


def teacher_momentum(step: int, *, total: int, momentum: float, schedule: str = "constant") -> float:
    """Return the teacher's momentum: constant, or MoCo v3's m_t = 1 - (1 - m)(1 + cos(pi t/T))/2, which ends at 1.

    Args:
        step: the step t, counted from 0.
        total: all steps T.
        momentum: the momentum m at the start.
        schedule: "constant" or "cosine".

    Example:
        >>> teacher_momentum(50, total=50, momentum=0.99, schedule="cosine")
        1.0
    """
    if schedule == "constant":
        return momentum
    assert schedule == "cosine", schedule
    return 1 - cosine_decay(1 - momentum, min(step, total), max(total, 1))


def weight_decay(step: int, *, total: int, start: float, final: float | None = None) -> float:
    """Return the weight decay of a step: constant, or a cosine from `start` to `final` (DINO).

    Args:
        step: the step, counted from 0.
        total: all steps.
        start: the weight decay of the first step.
        final: the weight decay after the last step; None for a constant one.

    Example:
        >>> round(weight_decay(50, total=100, start=0.04, final=0.4), 3)
        0.22
    """
    return start if final is None else final + cosine_decay(start - final, min(step, total), max(total, 1))


def ramp(epoch: int, *, epochs: float, end: float, start: float | None = None) -> float:
    """Return an argument that grows linearly from epoch to epoch.

    Args:
        epoch: the epoch, counted from 0.
        epochs: how many epochs it grows; it then stays at `end`.
        end: its last value.
        start: its value in epoch 0, from which the last of the growing epochs reaches `end` (DINO's teacher
            temperature). None: it is end (epoch + 1) / epochs, which begins one epoch after 0 (JCL's lambda).

    Example:
        >>> [ramp(e, epochs=4, end=8.0) for e in range(5)], [ramp(e, epochs=3, end=4.0, start=2.0) for e in range(4)]
        ([2.0, 4.0, 6.0, 8.0, 8.0], [2.0, 3.0, 4.0, 4.0])
    """
    if start is None:
        return end * min((epoch + 1) / max(epochs, 1), 1.0)
    return start + (end - start) * min(epoch / max(epochs - 1, 1), 1.0)
