r"""Feature statistics: mean, covariance with a ridge, and whitening by Cholesky, without an explicit inverse.

n rows of this rank, count rows of all ranks, D width.  rows [n,D], mean [D], covariance [D,D].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FLOOR = 1e-8


def identity(x: Tensor) -> Tensor:
    return x


def mean_and_covariance(
    rows: Tensor, *, count: int | None = None, total: Callable[[Tensor], Tensor] = identity
) -> tuple[Tensor, Tensor]:
    """Return the mean [D] and the unbiased covariance [D,D]. `total` sums a tensor over ranks with `count` rows."""
    count = rows.shape[0] if count is None else count
    mean = total(rows.sum(0)) / count
    centered = rows - mean
    return mean, total(centered.T @ centered) / (count - 1)


def with_ridge(covariance: Tensor, ridge: float, *, absolute: bool = False) -> Tensor:
    r"""Make a covariance S solvable: `(1 - e) S + (e tr(S)/D + 1e-8) I`, or `S + e I` if `absolute`.

    The relative ridge scales with S, so that whitened features don't depend on the scale of the features. Ridge 0
    returns S itself, which must then have full rank.
    """
    if ridge == 0:
        return covariance
    D = covariance.shape[-1]
    eye = torch.eye(D, dtype=covariance.dtype, device=covariance.device)
    if absolute:
        return covariance + ridge * eye
    level = ridge * covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return (1 - ridge) * covariance + (level + FLOOR) * eye


def whiten(
    rows: Tensor, *, ridge: float, absolute: bool = False, detach: bool = False,
    count: int | None = None, total: Callable[[Tensor], Tensor] = identity,
) -> Tensor:  # fmt: skip
    r"""Whiten rows: y_i = L^-1 (z_i - mean) with L L^T the covariance, [n,D].

    Then <y_i, y_j> = (z_i - mean)^T S^-1 (z_j - mean). With `detach`, mean and covariance are constants.
    """
    # In float64: after rounding to float32 or tf32, nearly dependent features might not have a Cholesky factor.
    wide = rows.double()
    mean, covariance = mean_and_covariance(wide.detach() if detach else wide, count=count, total=total)
    factor, failed = torch.linalg.cholesky_ex(with_ridge(covariance, ridge, absolute=absolute))
    factor = torch.where(failed == 0, factor, torch.nan)  # a failed factor would give finite but meaningless numbers
    return torch.linalg.solve_triangular(factor, (wide - mean).T, upper=False).T.to(rows.dtype)
