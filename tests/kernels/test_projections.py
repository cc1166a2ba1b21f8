"""Sliced Wasserstein distance, random directions, priors, and their random numbers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from kontrast.kernels.projections import (
    PRIORS,
    directions_and_prior,
    gaussian_and_prior,
    orthogonalize,
    sliced_wasserstein,
    sliced_wasserstein_by_definition,
    uniform,
)

from support.interpreter import assert_tests_pass_interpreted


def step(number: int = 0):
    return torch.tensor(number)


def directions(d: int = 5, number: int = 0):
    return directions_and_prior("normal", 1, d, 0, step(number))[0]


def orthogonality_error(W):
    return (W.T @ W - torch.eye(len(W), dtype=W.dtype)).abs().max().item()


@pytest.mark.parametrize(("d", "draws"), [(1, 100), (2, 1000), (5, 500), (32, 100), (128, 20), (300, 2)])
def test_directions_are_orthogonal(d, draws) -> None:
    assert max(orthogonality_error(directions(d, number)) for number in range(draws)) < 1e-13


@pytest.mark.slow
@pytest.mark.parametrize(("d", "draws"), [(2, 50_000), (8, 20_000), (64, 5_000), (512, 100)])
def test_directions_of_thousands_of_draws_are_orthogonal(d, draws) -> None:
    assert max(orthogonality_error(directions(d, number)) for number in range(draws)) < 1e-13


@pytest.mark.parametrize("d", [2, 8, 128])
@pytest.mark.parametrize("smallest", [1e-6, 1e-8, 1e-10, 1e-11])
def test_directions_survive_a_nearly_singular_draw(d, smallest) -> None:
    """Cholesky without the shift would fail, or divide by rounding noise."""
    U, singular, V = torch.linalg.svd(gaussian_and_prior("normal", 1, d, 0, step())[0])
    singular[-1] = smallest
    assert orthogonality_error(orthogonalize(U * singular @ V)) < 1e-9


def test_directions_are_the_q_of_the_gaussian() -> None:
    Q, R = torch.linalg.qr(gaussian_and_prior("normal", 1, 5, 0, step())[0])
    torch.testing.assert_close(directions(), Q * R.diagonal().sign())


def test_directions_are_uniform() -> None:
    """Uniform over rotations: each entry of W has mean 0 and variance 1/d."""
    W = torch.stack([directions(4, n) for n in range(800)])
    assert W.mean(0).abs().max() < 5 * 0.5 / math.sqrt(800)
    assert (W.square().mean(0) - 0.25).abs().max() < 0.05


def test_draws_are_pure_functions_of_their_counter() -> None:
    first = uniform(1000, 3, step(7))
    torch.testing.assert_close(uniform(1000, 3, step(7)), first, rtol=0, atol=0)
    torch.testing.assert_close(uniform(10, 3, step(7)), first[:10], rtol=0, atol=0)
    for other in (uniform(1000, 4, step(7)), uniform(1000, 3, step(8))):
        assert (other == first).sum() == 0
        assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1]) < 0.12


def test_draws_are_uniform_and_normal() -> None:
    u = uniform(100_000, 0, step())
    assert u.min() >= 0
    assert u.max() < 1
    counts = torch.histc(u, bins=50, min=0, max=1)
    assert ((counts - 2000).square() / 2000).sum() < 100  # chi-squared with 49 degrees: 85.4 at 0.1%
    g = gaussian_and_prior("normal", 1, 300, 0, step())[0]
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert g.pow(power).mean().item() == pytest.approx(moment, abs=0.1)
    pairs = g.flatten()[: 300 * 300 // 2 * 2].view(-1, 2).T
    for power in (1, 2):  # the two numbers of a pair share their radius, and are independent nevertheless
        assert abs(torch.corrcoef(pairs.pow(power))[0, 1]) < 0.02


@pytest.mark.parametrize("d", [3, 6])
def test_priors(d) -> None:
    """Also if the number of draws is odd. No number is used for both the directions and the prior."""
    draws = {prior: gaussian_and_prior(prior, 2001, d, 0, step()) for prior in PRIORS}
    torch.testing.assert_close(draws["hypersphere"][1].norm(dim=1), torch.ones(2001, dtype=torch.float64))
    assert draws["hypercube"][1].abs().max() <= 1
    variance = {"hypersphere": 1 / d, "hypercube": 1 / 3, "normal": 1.0}
    for prior, (gaussian, rows) in draws.items():
        torch.testing.assert_close(gaussian, draws["normal"][0], rtol=0, atol=0)
        assert rows.mean(0).abs().max() < 0.1
        assert rows.var().item() == pytest.approx(variance[prior], rel=0.05)
        assert not torch.isin(rows, gaussian).any()


@pytest.mark.slow
def test_triton_draws_the_same_numbers() -> None:
    assert_tests_pass_interpreted(Path(__file__).parents[1] / "support" / "interpreted_projections.py")


@pytest.mark.gpu
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize(("b", "d"), [(512, 128), (5, 3), (2, 1), (64, 2050)])
def test_draws_on_the_gpu_equal_those_on_the_cpu(prior, b, d) -> None:
    expected = gaussian_and_prior(prior, b, d, 3, step(9))
    from kontrast.kernels.triton_projections import triton_gaussian_and_prior

    gaussian, rows = triton_gaussian_and_prior(prior, b, d, 3, step(9).cuda(), torch.float32)
    torch.testing.assert_close(gaussian.cpu(), expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rows.cpu(), expected[1].float())
    if d <= 128:
        W = directions_and_prior(prior, b, d, 3, step(9).cuda())[0].cpu()
        torch.testing.assert_close(W, directions_and_prior(prior, b, d, 3, step(9))[0], rtol=0, atol=1e-9)


@pytest.mark.parametrize(("b", "d"), [(1, 1), (7, 3), (30, 12)])
def test_few_operations_equal_the_definition(b, d) -> None:
    """In value, gradient and second derivative."""
    P, W = torch.randn(b, d, dtype=torch.float64), directions(d)
    found = []
    for distance in (sliced_wasserstein, sliced_wasserstein_by_definition):
        h = torch.randn(b, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
        value = distance(h, P, W)
        (gradient,) = torch.autograd.grad(value, h, create_graph=True)
        (second,) = torch.autograd.grad(gradient.pow(3).sum(), h)
        found.append((value, torch.autograd.grad(distance(h, P, W), h)[0], gradient, second))
    torch.testing.assert_close(*found)


def test_distance_of_permuted_sets_is_zero() -> None:
    h = torch.randn(20, 5, dtype=torch.float64)
    assert sliced_wasserstein(h[torch.randperm(20)], h, directions()).item() < 1e-25


def test_shift_scale_symmetry() -> None:
    """SWD(H+c, H) = ||c||^2/d and SWD(aH, H) = (a-1)^2 ||H||^2/(b d)."""
    h, c, W = torch.randn(20, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64), directions()
    torch.testing.assert_close(sliced_wasserstein(h + c, h, W), c.square().mean())
    torch.testing.assert_close(sliced_wasserstein(3 * h, h, W), 4 * h.square().mean())
    other = torch.randn(20, 5, dtype=torch.float64)
    torch.testing.assert_close(sliced_wasserstein(other, h, W), sliced_wasserstein(h, other, W))


def test_one_dimension_is_the_difference_of_quantiles() -> None:
    a, b = torch.randn(2, 30, 1, dtype=torch.float64)
    expected = (a[:, 0].sort().values - b[:, 0].sort().values).square().mean()
    torch.testing.assert_close(sliced_wasserstein(a, b, torch.ones(1, 1, dtype=torch.float64)), expected)


def test_prior_gets_no_gradient() -> None:
    h, p = torch.randn(2, 8, 3, dtype=torch.float64, requires_grad=True).unbind()
    loss = sliced_wasserstein(h, p, directions(3))
    grads = torch.autograd.grad(loss, (h, p), allow_unused=True)
    assert grads[0].abs().max() > 0
    assert grads[1] is None
