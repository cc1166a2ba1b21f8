r"""Feature statistics: mean, covariance with a ridge, and whitening by Cholesky; never an explicit inverse.

n rows of this rank, count rows of all ranks, D width.  rows [n,D], mean [D], covariance [D,D].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FLOOR = 1e-8


def own(x: Tensor) -> Tensor:
    return x


def mean_and_covariance(
    rows: Tensor, *, count: int | None = None, total: Callable[[Tensor], Tensor] = own
) -> tuple[Tensor, Tensor]:
    """Mean [D] and unbiased covariance [D,D]; `total` sums a tensor over ranks, which hold `count` rows together."""
    count = rows.shape[0] if count is None else count
    mean = total(rows.sum(0)) / count
    centred = rows - mean
    return mean, total(centred.T @ centred) / (count - 1)


def with_ridge(covariance: Tensor, ridge: float, *, absolute: bool = False) -> Tensor:
    r"""A covariance that can be solved: `(1 - e) S + e tr(S)/D I` plus a floor of 1e-8, or `S + e I` where absolute.

    The relative ridge scales with S, so what is whitened does not change with the scale of the features. Ridge 0 leaves
    S as it is, which must then have full rank.
    """
    if ridge == 0:
        return covariance
    D = covariance.shape[-1]
    identity = torch.eye(D, dtype=covariance.dtype, device=covariance.device)
    if absolute:
        return covariance + ridge * identity
    level = ridge * covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return (1 - ridge) * covariance + (level + FLOOR) * identity


def whiten(
    rows: Tensor,
    *,
    ridge: float,
    absolute: bool = False,
    detach: bool = False,
    count: int | None = None,
    total: Callable[[Tensor], Tensor] = own,
) -> Tensor:
    r"""Rows y_i = L^-1 (z_i - mean) with L L^T the covariance, so <y_i, y_j> = (z_i - mean)^T S^-1 (z_j - mean): [n,D].

    `detach` takes mean and covariance as constants.
    """
    # float64: after the rounding of float32, or tf32, nearly dependent features could have no Cholesky factor.
    wide = rows.double()
    mean, covariance = mean_and_covariance(wide.detach() if detach else wide, count=count, total=total)
    factor, failed = torch.linalg.cholesky_ex(with_ridge(covariance, ridge, absolute=absolute))
    factor = torch.where(failed == 0, factor, torch.nan)  # else a factor that is none would give finite nonsense
    return torch.linalg.solve_triangular(factor, (wide - mean).T, upper=False).T.to(rows.dtype)
