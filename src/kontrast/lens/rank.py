"""How many dimensions a representation uses.

N images, F width, values: eigenvalues of the covariance, largest first.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

NOTHING = 1e-12


def spectrum(features: Tensor) -> Tensor:
    """Eigenvalues [F] of the covariance of features [N,F], largest first."""
    features = torch.as_tensor(features)
    centred = features - features.mean(0, dtype=torch.float64)  # in float32 a sum of large features is infinite
    return torch.linalg.eigvalsh(centred.T @ centred / max(len(features) - 1, 1)).clamp_min(0).flip(0)


def shares(features: Tensor) -> Tensor:
    """Each eigenvalue's share of their sum; where features do not vary beside their length, the first has all of it."""
    features = torch.as_tensor(features)
    values = spectrum(features)
    if values.sum() <= NOTHING * features.double().square().sum(1).mean():
        return torch.eye(len(values), dtype=values.dtype)[0]
    return values / values.sum()


def effective_rank(features: Tensor) -> float:
    """exp of the entropy of the spectrum's shares: F when all directions carry the same, 1 when one carries all."""
    share = shares(features)
    return math.exp(-torch.xlogy(share, share).sum().item())


def dimension_variance(features: Tensor) -> Tensor:
    """Variance [F] of each dimension over images; a dimension near 0 says nothing about any image."""
    return torch.as_tensor(features).double().var(0, correction=0)
