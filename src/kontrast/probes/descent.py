"""Gradient steps for a probe's few tensors: SGD, Adam and LARS, on torch's fused kernels, each from zero state.

p parameters, g gradients, b momentum. The learning rate comes with every step; torch.optim is not constructed,
because that imports torch's compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kontrast.errors import UsageError
from kontrast.registry import nearest

TRUST = 0.001


class Descent:
    """`step(gradients, lr)` moves the parameters in place. LARS adapts matrices and treats vectors as SGD does."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        kind: str = "sgd",
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
    ):
        if kind not in ("sgd", "lars", "adam"):
            raise UsageError(f"unknown optimizer {kind!r} for a probe: {nearest(kind, ('sgd', 'lars', 'adam'))}")
        self.kind, self.parameters = kind, list(parameters)
        self.momentum, self.nesterov, self.weight_decay, self.betas = momentum, nesterov, weight_decay, betas
        self.first = [torch.zeros_like(p) for p in self.parameters]
        self.second = [torch.zeros_like(p) for p in self.parameters] if kind == "adam" else []
        self.steps = [torch.zeros((), device=p.device) for p in self.parameters] if kind == "adam" else []

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], lr: float) -> None:
        # The fused CPU kernels read memory in order and ignore strides: lay gradients out as their parameters are.
        gradients = [
            g if g.stride() == p.stride() else torch.empty_like(p).copy_(g) for p, g in zip(self.parameters, gradients)
        ]
        if self.kind == "adam":
            self.adam(gradients, lr)
            return
        if self.kind == "lars":
            gradients = [self.adapted(p, g) for p, g in zip(self.parameters, gradients)]
        decay = 0.0 if self.kind == "lars" else self.weight_decay
        rule: dict[str, Any] = {"weight_decay": decay, "momentum": self.momentum, "lr": lr, "nesterov": self.nesterov}
        state = self.first if self.momentum else []  # the kernel insists
        torch._fused_sgd_(self.parameters, gradients, state, dampening=0.0, maximize=False, is_first_step=False, **rule)

    def adapted(self, p: Tensor, g: Tensor) -> Tensor:
        if p.ndim <= 1:
            return g
        g = g + self.weight_decay * p
        size_p, size_g = p.norm(), g.norm()
        return g * torch.where((size_p > 0) & (size_g > 0), TRUST * size_p / size_g, 1.0)

    def adam(self, gradients: list[Tensor], lr: float) -> None:
        torch._foreach_add_(self.steps, 1)
        torch._fused_adam_(
            self.parameters,
            gradients,
            self.first,
            self.second,
            [],
            self.steps,
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.weight_decay,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
