"""Optimizers and schedules, shared by training and by probes."""

from kontrast.optim.optimizers import OPTIMIZERS, Optimizer, build_optimizer, clip_gradients
from kontrast.optim.schedules import (
    cosine_decay,
    learning_rate,
    ramp,
    scaled_learning_rate,
    teacher_momentum,
    weight_decay,
)

__all__ = [
    "OPTIMIZERS", "Optimizer", "build_optimizer", "clip_gradients", "cosine_decay", "learning_rate", "ramp",
    "scaled_learning_rate", "teacher_momentum", "weight_decay",
]  # fmt: skip
