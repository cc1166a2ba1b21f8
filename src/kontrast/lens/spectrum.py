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
    centred = (features - features.mean(0)).double()
    return torch.linalg.eigvalsh(centred.T @ centred / max(len(features) - 1, 1)).clamp_min(0).flip(0)


def effective_rank(features: Tensor) -> float:
    """exp of the entropy of the spectrum's shares: F when all directions carry the same, 1 when one carries all."""
    values = spectrum(features)
    if values.sum() <= NOTHING:
        return 1.0
    shares = values / values.sum()
    return math.exp(-torch.xlogy(shares, shares).sum().item())
