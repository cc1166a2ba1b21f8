"""Mean, covariance, ridge and whitening equal their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from kontrast.kernels import covariance as module
from kontrast.kernels.covariance import (
    FLOOR,
    identity,
    mean_and_covariance,
    whiten,
    whiten_by_definition,
    with_ridge,
)


def rows(n: int = 30, D: int = 4, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(D, D, generator=generator, dtype=torch.float64)
    return torch.randn(n, D, generator=generator, dtype=torch.float64) @ mixing + 2.0


def test_mean_and_covariance() -> None:
    x = rows()
    mean, covariance = mean_and_covariance(x)
    torch.testing.assert_close(mean, x.mean(0, keepdim=True))
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
    assert torch.autograd.gradgradcheck(lambda x: whiten(x, ridge=0.1), (x,))


def value_and_gradient(call, x):
    """Return the whitened rows and the gradient of a weighted sum of them."""
    x = x.clone().requires_grad_()
    y = call(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    return y.detach(), torch.autograd.grad((weights * y).sum(), x)[0]


@pytest.mark.parametrize("ridge", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("shape", [(12, 4), (3, 12, 4), (2, 3, 12, 4)])
def test_few_operations_equal_the_definition(ridge, absolute, detach, shape) -> None:
    x = rows(72)[: math.prod(shape[:-1])].view(shape)
    ours = value_and_gradient(lambda x: whiten(x, ridge=ridge, absolute=absolute, detach=detach), x)
    expected = value_and_gradient(lambda x: whiten_by_definition(x, ridge, absolute, detach, 12, identity), x)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


def test_matrices_of_a_batch_are_whitened_separately() -> None:
    x = rows(24).view(2, 12, 4)
    torch.testing.assert_close(whiten(x, ridge=0.1), torch.stack([whiten(part, ridge=0.1) for part in x]))


def test_the_definition_is_used_by_transforms_and_double_backward_alone(monkeypatch) -> None:
    monkeypatch.setattr(module, "whiten_by_definition", None)
    x = rows().requires_grad_()
    torch.autograd.grad(whiten(x, ridge=0.1).square().sum(), x)
    with pytest.raises(TypeError):
        torch.func.grad(lambda x: whiten(x, ridge=0.1).sum())(x.detach())
    with pytest.raises(TypeError):
        torch.autograd.grad(whiten(x, ridge=0.1).sum(), x, create_graph=True)


@pytest.mark.parametrize("definition", [False, True])
def test_a_covariance_without_a_factor_gives_nan(definition) -> None:
    """Only the matrix of the batch that fails."""
    x = torch.stack([rows(12), torch.zeros(12, 4, dtype=torch.float64)])
    y = whiten_by_definition(x, 0.0, False, False, 12, identity) if definition else whiten(x, ridge=0.0)
    assert y[0].isfinite().all() and y[1].isnan().all()


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
        assert y.dtype == torch.float32
        assert bool(torch.isfinite(y).all())
        assert bool(torch.isfinite(torch.autograd.grad(y.sum(), x)[0]).all())
