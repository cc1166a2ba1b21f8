"""Inputs for the tests of the statistics of the affinity matrix, and their value and gradient per implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize


def unit_rows(count: int, width: int, kind: torch.dtype = torch.float64) -> Tensor:
    return normalize(torch.randn(count, width, dtype=torch.float64), dim=1).to(kind).requires_grad_()


def scalar(value: float, kind: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(value, dtype=kind, requires_grad=True)


def ids(kind: str, count: int) -> Tensor | None:
    """Return ids that are shared by no, one or many other rows, the same for all rows, or None."""
    return {
        "absent": None,
        "none": torch.arange(count),
        "one": torch.arange(count) // 2 - 2**40,
        "many": torch.arange(count) % 3,
        "same": torch.zeros(count, dtype=torch.int64),
    }[kind]


def value_and_gradients(compute: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs and the gradients of a random combination of them; -inf has no gradient."""
    generator = torch.Generator().manual_seed(7)
    found = [x for x in compute() if x.numel()]
    parts = []
    for x in found:
        if x.is_floating_point() and x.requires_grad:
            weights = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype).to(x.device)
            parts.append((weights * x.masked_fill(x.isneginf(), 0)).sum())
    gradients = torch.autograd.grad(torch.stack(parts).sum(), inputs)
    return [*(x.detach() for x in found), *gradients]
