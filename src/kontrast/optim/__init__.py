"""Optimizers and schedules, shared by training and by probes."""

from kontrast.optim.optimizers import OPTIMIZERS, Optimizer, build_optimizer
from kontrast.optim.schedules import cosine_decay, joint_weight, learning_rate, scaled_learning_rate, teacher_momentum

__all__ = [
    "OPTIMIZERS", "Optimizer", "build_optimizer", "cosine_decay", "joint_weight", "learning_rate",
    "scaled_learning_rate", "teacher_momentum",
]  # fmt: skip
