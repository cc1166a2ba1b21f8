"""Projections in float64, from a fixed seed.  z [V,B,D], keys [W,B,D], bank [M,D]."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def projections() -> Tensor:
    return draw(2, 7, 5)


@pytest.fixture
def three_views() -> Tensor:
    return draw(3, 6, 4, seed=1)


@pytest.fixture
def keys() -> Tensor:
    return draw(4, 7, 5, seed=2)


@pytest.fixture
def bank() -> Tensor:
    return normalize(draw(11, 5, seed=3), dim=-1)
