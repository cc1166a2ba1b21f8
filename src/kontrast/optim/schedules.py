"""Learning rate, teacher momentum and ramps as pure functions of the step: nothing to save, nothing to lose.

t step from 0, T steps in all. Epochs may be fractions; a step belongs to epoch t / steps_per_epoch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kontrast.errors import UsageError
from kontrast.registry import nearest

SCHEDULES = ("cosine", "steps", "constant", "linear")
SCALINGS = ("none", "linear", "sqrt")


def scaled_learning_rate(lr: float, batch: int, scaling: str = "none") -> float:
    """The peak learning rate of a batch: `linear` lr B/256, `sqrt` lr sqrt(B) (SimCLR: 0.075 sqrt(B)), `none` lr."""
    if scaling not in SCALINGS:
        raise UsageError(f"unknown lr scaling {scaling!r}: {nearest(scaling, SCALINGS)}")
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
    """The learning rate of a step (from 0).

    warmup: epochs of linear rise, the first step at lr / (warm-up steps), then the schedule over what is left.
    milestones: epochs at which `steps` multiplies by `factor`, counted from the start, warm-up included.
    final: where `cosine` and `linear` end. per_epoch: the schedule stands still within an epoch (MoCo, JCL).
    """
    if schedule not in SCHEDULES:
        raise UsageError(f"unknown schedule {schedule!r}: {nearest(schedule, SCHEDULES)}")
    warm = warmup * steps_per_epoch
    if step + 1 <= warm:
        return lr * (step + 1) / warm
    at = step - step % steps_per_epoch if per_epoch else step
    if schedule == "constant":
        return lr
    if schedule == "steps":
        return lr * factor ** sum(at >= m * steps_per_epoch for m in milestones)
    progress = min(max(at - warm, 0.0) / max(epochs * steps_per_epoch - warm, 1e-9), 1.0)
    left = (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else 1 - progress
    return final + (lr - final) * left


def teacher_momentum(step: int, *, total: int, momentum: float, schedule: str = "constant") -> float:
    """The teacher's momentum: constant, or MoCo v3's m_t = 1 - (1 - m)(1 + cos(pi t/T))/2, which ends at 1."""
    if schedule not in ("constant", "cosine"):
        raise UsageError(f"unknown momentum schedule {schedule!r}: {nearest(schedule, ('constant', 'cosine'))}")
    if schedule == "constant":
        return momentum
    return 1 - (1 - momentum) * (1 + math.cos(math.pi * min(step, total) / max(total, 1))) / 2


def joint_weight(epoch: int, *, epochs: int, weight: float, ramp: bool = False) -> float:
    """JCL's lambda: constant in the paper, lambda (epoch + 1) / epochs in its code."""
    return weight * (epoch + 1) / epochs if ramp else weight
