"""Prototypes: keys that are learned (SwAV, DINO).  K prototypes, D width."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from kontrast.errors import UsageError
from kontrast.networks.checks import check_choice, check_whole


class Prototypes(nn.Module):
    """A set of learned unit vectors that an objective assigns projections to; calling it returns its rows.

    `unit` keeps the weights themselves on the sphere: in training each call first scales them to length one, without
    gradient, so that the optimizer moves points of the sphere (SwAV). `weight-norm` returns the directions of the
    weights and differentiates through the division by their lengths (DINO); with `learn_scale` each prototype also has
    a learned length.

    Args:
        count: number of prototypes K.
        width: width D of a projection.
        kind: "unit" or "weight-norm".
        learn_scale: learn the length of each prototype, which starts at 1; only for "weight-norm".

    Shape:
        - output: [K,D]

    Example:
        >>> prototypes = Prototypes(count=5, width=3)
        >>> prototypes().shape, prototypes().norm(dim=1).sum().round().item()
        (torch.Size([5, 3]), 5.0)
    """

    def __init__(self, count: int, width: int, kind: str = "unit", learn_scale: bool = False):
        super().__init__()
        check_choice("kind of prototypes", kind, ("unit", "weight-norm"))
        if learn_scale and kind != "weight-norm":
            raise UsageError("prototypes.learn_scale needs prototypes.kind='weight-norm': others have length 1")
        shape = check_whole("prototypes.count", count, least=2), check_whole("prototypes width", width)
        self.kind = kind
        weight = torch.empty(shape)
        if kind == "unit":
            nn.init.kaiming_uniform_(weight, a=5**0.5)  # as torch's linear layer, whose directions SwAV starts from
            weight = functional.normalize(weight, dim=1)
        else:
            nn.init.trunc_normal_(weight, std=0.02)
        self.weight = nn.Parameter(weight)
        self.scale = nn.Parameter(torch.ones(shape[0])) if learn_scale else None

    def forward(self) -> Tensor:
        if self.kind == "unit" and self.training:
            with torch.no_grad():
                self.weight.copy_(functional.normalize(self.weight, dim=1))
            return self.weight
        rows = functional.normalize(self.weight, dim=1)
        return rows if self.scale is None else rows * self.scale[:, None]

    def extra_repr(self) -> str:
        K, D = self.weight.shape
        return f"{K}, {D}, kind={self.kind!r}, learn_scale={self.scale is not None}"
