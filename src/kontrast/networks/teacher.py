"""The momentum teacher: a copy of the student whose parameters follow it slowly. p_t <- m p_t + (1 - m) p_s."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from kontrast.sharding import local

DROP_PATHS = {"DropPath": "drop_prob", "StochasticDepth": "p"}
"""The layers that leave out branches, ours and timm's, and torchvision's, with the name of their probability."""


class Teacher(nn.Module):
    """A copy of the student that makes the keys, without gradients.

    Its parameters are a moving average of the student's. Its batch-norm statistics come from its own forward passes. It
    leaves out no branches of residual networks (drop path), as in DINO. Dropout of single units stays as in the
    student, where DINO and MoCo v3 have none.

    Args:
        student: the module to copy and follow.

    Example:
        >>> student = nn.Linear(2, 2)
        >>> teacher = Teacher(student)
        >>> teacher.update(student, momentum=0.99)
        >>> teacher(torch.zeros(1, 2)).requires_grad
        False
    """

    def __init__(self, student: nn.Module):
        super().__init__()
        self.module = copy.deepcopy(student).requires_grad_(False)
        for module in self.module.modules():
            if rate := DROP_PATHS.get(type(module).__name__):
                setattr(module, rate, 0.0)

    @torch.no_grad()
    def update(self, student: nn.Module, momentum: Tensor | float) -> None:
        """Move the parameters toward the student's; call it before the keys are made.

        Args:
            student: the module that was copied.
            momentum: m, the share of the old parameters. A 0-dim tensor is read on the device, so that a captured CUDA
                graph follows its schedule.
        """
        mine = {n: local(p) for n, p in self.module.named_parameters()}
        theirs = {n: local(p) for n, p in student.named_parameters()}
        assert mine.keys() == theirs.keys(), "the student is not the module that the teacher copied"
        difference = torch._foreach_sub([theirs[n] for n in mine], list(mine.values()))
        torch._foreach_mul_(difference, 1 - momentum)
        torch._foreach_add_(list(mine.values()), difference)

    @torch.no_grad()
    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)
