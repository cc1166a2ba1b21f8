"""Mean, covariance, ridge and whitening equal their definitions."""

from __future__ import annotations

import pytest
import torch

from kontrast.kernels.covariance import FLOOR, mean_and_covariance, whiten, with_ridge


def rows(n: int = 30, D: int = 4, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(D, D, generator=generator, dtype=torch.float64)
    return torch.randn(n, D, generator=generator, dtype=torch.float64) @ mixing + 2.0


def test_mean_and_covariance() -> None:
    x = rows()
    mean, covariance = mean_and_covariance(x)
    torch.testing.assert_close(mean, x.mean(0))
    torch.testing.assert_close(covariance, torch.cov(x.T))


def test_sums_of_two_ranks() -> None:
    """`total` gets the sum of each rank; here it adds the sum of the other half of the rows."""
    x = rows()
    mean, covariance = mean_and_covariance(x)
    half, other = x[:10], x[10:]
    sums = iter([other.sum(0), (other - mean).T @ (other - mean)])
    ours = mean_and_covariance(half, count=30, total=lambda part: part + next(sums))
    torch.testing.assert_close(ours, (mean, covariance))


@pytest.mark.parametrize("ridge", [1e-3, 0.3])
def test_relative_ridge_keeps_the_trace_and_scales(ridge) -> None:
    covariance = torch.cov(rows().T)
    ours = with_ridge(covariance, ridge)
    torch.testing.assert_close(ours.trace(), covariance.trace() + 4 * FLOOR)
    torch.testing.assert_close(with_ridge(9 * covariance, ridge), 9 * ours, rtol=1e-7, atol=1e-6)
    smallest = torch.linalg.eigvalsh(ours)[0]
    torch.testing.assert_close(
        smallest, (1 - ridge) * torch.linalg.eigvalsh(covariance)[0] + ridge * covariance.trace() / 4 + FLOOR
    )


def test_absolute_and_no_ridge() -> None:
    covariance = torch.cov(rows().T)
    torch.testing.assert_close(
        with_ridge(covariance, 0.01, absolute=True), covariance + 0.01 * torch.eye(4, dtype=torch.float64)
    )
    assert with_ridge(covariance, 0.0) is covariance


def test_whitened_rows_have_identity_covariance_and_mahalanobis_products() -> None:
    x = rows()
    y = whiten(x, ridge=0.0)
    torch.testing.assert_close(torch.cov(y.T), torch.eye(4, dtype=torch.float64))
    centered = x - x.mean(0)
    torch.testing.assert_close(y @ y.T, centered @ torch.linalg.inv(torch.cov(x.T)) @ centered.T)


def test_gradient_of_whitening() -> None:
    x = rows(8, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: whiten(x, ridge=0.1), (x,))


def test_detached_whitening_is_linear_in_the_rows() -> None:
    x = rows().requires_grad_()
    y = whiten(x, ridge=0.0, detach=True)
    factor = torch.linalg.cholesky(torch.cov(x.detach().T))
    grad = torch.autograd.grad(y[3, 2], x)[0]
    torch.testing.assert_close(grad[3], torch.linalg.inv(factor)[2])
    assert grad[:3].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fewer_rows_than_width_and_constant_rows_stay_finite(dtype) -> None:
    for x in (torch.randn(4, 32), torch.ones(8, 5), torch.zeros(8, 5)):
        x = x.to(dtype).requires_grad_()
        y = whiten(x, ridge=1e-3)
        assert y.dtype == dtype
        assert bool(torch.isfinite(y).all())
        assert bool(torch.isfinite(torch.autograd.grad(y.sum(), x)[0]).all())
