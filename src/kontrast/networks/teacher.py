"""The momentum teacher: a copy of the student whose parameters follow it slowly. p_t <- m p_t + (1 - m) p_s."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from kontrast.sharding import local


class Teacher(nn.Module):
    """Parameters are averaged; batch-norm statistics are the teacher's own, from its own forward passes.

    `update(student, m)` comes before the keys are made. A momentum given as a 0-dim tensor is read on the device, so
    that a captured CUDA graph follows its schedule.
    """

    def __init__(self, student: nn.Module):
        super().__init__()
        self.module = copy.deepcopy(student).requires_grad_(False)

    @torch.no_grad()
    def update(self, student: nn.Module, momentum: Tensor | float) -> None:
        mine = {n: local(p) for n, p in self.module.named_parameters()}
        theirs = {n: local(p) for n, p in student.named_parameters()}
        assert mine.keys() == theirs.keys(), "the student is not the module that the teacher copied"
        away = torch._foreach_sub([theirs[n] for n in mine], list(mine.values()))
        torch._foreach_mul_(away, 1 - momentum)
        torch._foreach_add_(list(mine.values()), away)

    @torch.no_grad()
    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)
