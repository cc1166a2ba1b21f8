"""How many dimensions a representation uses.

N images, F width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

NOTHING = 1e-12


def spectrum(features: Tensor) -> Tensor:
    """Return the eigenvalues of the covariance, largest first.

    Args:
        features: One row per image.

    Shape:
        features: [N,F] -> [F].

    Example:
        >>> import torch, kontrast
        >>> kontrast.lens.spectrum(torch.tensor([[3.0, 0], [-3, 0]]))
        tensor([18.,  0.], dtype=torch.float64)
    """
    features = torch.as_tensor(features)
    centered = features - features.mean(0, dtype=torch.float64)  # a float32 sum of large features is infinite
    return torch.linalg.eigvalsh(centered.T @ centered / max(len(features) - 1, 1)).clamp_min(0).flip(0)


def spectrum_shares(features: Tensor) -> Tensor:
    """Return each eigenvalue's share of their sum; if the features don't vary, the first has all of it."""
    features = torch.as_tensor(features)
    values = spectrum(features)
    if values.sum() <= NOTHING * features.double().square().sum(1).mean():
        return torch.eye(len(values), dtype=values.dtype)[0]
    return values / values.sum()


def effective_rank(features: Tensor) -> float:
    """Return exp of the entropy of the spectrum's shares: F if all directions vary equally, 1 if only one varies.

    Args:
        features: One row per image.

    Shape:
        features: [N,F].

    Example:
        >>> import torch, kontrast
        >>> round(kontrast.lens.effective_rank(torch.cat([torch.eye(6), -torch.eye(6)])), 3)
        6.0
    """
    share = spectrum_shares(features)
    return math.exp(-torch.xlogy(share, share).sum().item())


def dimension_variance(features: Tensor) -> Tensor:
    """Return the variance of each dimension over images; a dimension near 0 carries no information.

    Args:
        features: One row per image.

    Shape:
        features: [N,F] -> [F].

    Example:
        >>> import torch, kontrast
        >>> kontrast.lens.dimension_variance(torch.tensor([[3.0, 1], [-3, 1]]))
        tensor([9., 0.], dtype=torch.float64)
    """
    return torch.as_tensor(features).double().var(0, correction=0)
