r"""Feature statistics: mean, covariance with a ridge, standardization, and whitening by Cholesky or symmetrically.

n rows of this rank, count rows of all ranks, D width.  rows [...,n,D], mean [...,1,D], covariance [...,D,D]: each
matrix of rows in a batch has statistics of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kontrast.float64 import where_float64_is
from kontrast.kernels.dense import in_torch_func

FLOOR = 1e-8
Total = Callable[[Tensor], Tensor]


def identity(x: Tensor) -> Tensor:
    return x


def mean_and_covariance(rows: Tensor, *, count: int | None = None, total: Total = identity) -> tuple[Tensor, Tensor]:
    """Return the mean [...,1,D] and the unbiased covariance. `total` sums a tensor over ranks with `count` rows."""
    count = rows.shape[-2] if count is None else count
    mean = total(rows.sum(-2, keepdim=True)) / count
    centered = rows - mean
    return mean, total(centered.mT @ centered) / (count - 1)


def standardize(rows: Tensor, *, count: int | None = None, total: Total = identity) -> Tensor:
    """Scale each feature to mean 0 and variance 1 over all rows, like batch norm (eps 1e-5), [...,n,D]."""
    count = rows.shape[-2] if count is None else count
    centered = rows - total(rows.sum(-2, keepdim=True)) / count
    return centered * torch.rsqrt(total(centered.square().sum(-2, keepdim=True)) / count + 1e-5)


def inverse_root(correlation: Tensor, ridge: float) -> Tensor:
    r"""Return the symmetric (C + ridge I)^(-1/2) of correlation matrices C [...,D,D], whose diagonal is at most 1.

    It is computed by the coupled Newton-Schulz iteration, because a CUDA graph can't capture `torch.linalg.eigh`.
    Divided by its largest possible eigenvalue, the matrix has eigenvalues from ridge/(D + ridge) to 1. Small ones grow
    by 9/4 in each round, and those near 1 converge quadratically: six more rounds reach float64's precision.
    """
    D = correlation.shape[-1]
    largest = D + ridge
    rounds = math.ceil(math.log(largest / ridge) / math.log(9 / 4)) + 6
    eye = torch.eye(D, dtype=correlation.dtype, device=correlation.device)
    root, inverse = (correlation + ridge * eye) / largest, eye
    for _ in range(rounds):
        factor = 1.5 * eye - 0.5 * inverse @ root
        root, inverse = root @ factor, factor @ inverse
    return inverse / math.sqrt(largest)


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
    count: int | None = None, total: Total = identity,
) -> Tensor:  # fmt: skip
    r"""Whiten rows: y_i = L^-1 (z_i - mean) with L L^T the covariance, [...,n,D].

    Then <y_i, y_j> = (z_i - mean)^T S^-1 (z_j - mean). With `detach`, mean and covariance are constants. The result is
    float32 at least. The arithmetic is in float64: after rounding to float32 or tf32, nearly dependent features might
    not have a Cholesky factor.
    """
    count, rows, device = rows.shape[-2] if count is None else count, where_float64_is(rows), rows.device
    if torch.compiler.is_compiling() or in_torch_func():
        return whiten_by_definition(rows, ridge, absolute, detach, count, total).to(device)
    return _Whiten.apply(rows, ridge, absolute, detach, count, total).to(device)


def whiten_by_definition(rows: Tensor, ridge: float, absolute: bool, detach: bool, count: int, total: Total) -> Tensor:
    """Whiten rows step by step, differentiated by autograd."""
    wide = rows.double()
    mean, covariance = mean_and_covariance(wide.detach() if detach else wide, count=count, total=total)
    factor, failed = torch.linalg.cholesky_ex(with_ridge(covariance, ridge, absolute=absolute))
    factor = factor.masked_fill(failed.bool()[..., None, None], torch.nan)
    white = torch.linalg.solve_triangular(factor, (wide - mean).mT, upper=False).mT
    return white.to(torch.promote_types(rows.dtype, torch.float32))


class _Whiten(torch.autograd.Function):
    r"""The same in few operations: called from Python on a GPU, each costs more time than its arithmetic.

    With X the centered rows, S the covariance with its ridge, L L^T = S and Y = X L^-T, a gradient G of Y gives

        dS = -1/2 L^-T T L^-1       T the symmetric matrix that has the lower triangle of G^T Y
        dX = (G - (1 - e)/(count - 1) Y T) L^-1 + 2 e tr(dS)/(D (count - 1)) X

    of which the last term is that of the relative ridge. The gradient of the rows is dX without its mean, which is that
    of G L^-1, because the columns of X and Y sum to zero. Sums over rows are sums over ranks too.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ridge: float, absolute: bool, detach: bool, count: int, total: Total) -> Tensor:
        n, D = rows.shape[-2:]
        x = rows.reshape(-1, n, D)
        centered = torch.sub(x, total(x.sum(1, keepdim=True, dtype=torch.float64)), alpha=1 / count)
        eye = torch.eye(D, dtype=torch.float64, device=x.device)
        # Each rank adds its share of the constant level, which is the same before and after a relative ridge.
        level = (ridge if absolute else FLOOR) * n / count if ridge else 0.0
        everywhere = eye.expand(len(x), D, D)
        covariance = total(torch.baddbmm(everywhere, centered.mT, centered, beta=level, alpha=1 / (count - 1)))
        if ridge and not absolute:
            diagonal = covariance.diagonal(dim1=1, dim2=2)
            variance = diagonal.mean(1, keepdim=True)
            covariance.mul_(1 - ridge)
            diagonal.add_(variance, alpha=ridge)
        factor, failed = torch.linalg.cholesky_ex(covariance)
        factor.masked_fill_(failed.bool()[:, None, None], torch.nan)  # it would give finite but meaningless numbers
        inverse = torch.linalg.solve_triangular(factor, everywhere, upper=False)
        white = centered @ inverse.mT
        ctx.save_for_backward(rows, centered, white, inverse)
        ctx.arguments = ridge, absolute, detach, count, total
        return white.to(torch.promote_types(rows.dtype, torch.float32)).view(rows.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, centered, white, inverse = ctx.saved_tensors
        ridge, absolute, detach, count, total = ctx.arguments
        if torch.is_grad_enabled():  # with create_graph: the gradient will be differentiated again
            white = whiten_by_definition(rows, *ctx.arguments)
            return *torch.autograd.grad(white, rows, grads[0], create_graph=True), None, None, None, None, None
        grad = grads[0].reshape(centered.shape)
        if detach:
            grad = grad.double() @ inverse
        else:
            grad = torch.sub(grad, total(grad.sum(1, keepdim=True, dtype=torch.float64)), alpha=1 / count)
            slope = total(grad.mT @ white)
            slope = slope.tril() + slope.tril(-1).mT
            relative = 0.0 if absolute else ridge
            grad = torch.baddbmm(grad, white, slope, alpha=(relative - 1) / (count - 1)) @ inverse
            if relative:
                trace = (inverse @ inverse.mT).mul_(slope).sum((1, 2), keepdim=True)
                grad.addcmul_(centered, trace, value=-relative / (rows.shape[-1] * (count - 1)))
        return grad.to(rows.dtype).view(rows.shape), None, None, None, None, None
