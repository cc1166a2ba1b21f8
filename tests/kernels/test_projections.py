"""Sliced Wasserstein distance, random directions, priors, and their random numbers."""

from __future__ import annotations

import math

import pytest
import torch

from kontrast.kernels.projections import (
    PRIORS,
    gaussian,
    orthogonal_directions,
    prior_rows,
    sliced_wasserstein,
    uniform,
)


def step(number: int = 0):
    return torch.tensor(number)


def directions(d: int = 5):
    return orthogonal_directions(d, 0, step())


@pytest.mark.parametrize("d", [1, 2, 5, 128, 300])
def test_directions_are_orthogonal(d) -> None:
    W = directions(d)
    torch.testing.assert_close(W.T @ W, torch.eye(d, dtype=torch.float64), rtol=0, atol=1e-12)


def test_directions_survive_a_nearly_singular_draw(monkeypatch) -> None:
    """If the columns of a draw nearly agree, Cholesky without the shift would divide by rounding noise."""
    generator = torch.Generator().manual_seed(0)
    draw = torch.ones(6, 6, dtype=torch.float64) + 1e-11 * torch.randn(6, 6, generator=generator, dtype=torch.float64)
    monkeypatch.setattr("kontrast.kernels.projections.gaussian", lambda *a, **k: draw)
    W = directions(6)
    torch.testing.assert_close(W.T @ W, torch.eye(6, dtype=torch.float64), rtol=0, atol=1e-12)


def test_directions_are_the_q_of_the_gaussian() -> None:
    G = gaussian(5, 5, 0, step(), stream=0)
    Q, R = torch.linalg.qr(G)
    torch.testing.assert_close(directions(), Q * R.diagonal().sign())


def test_directions_are_uniform() -> None:
    """Uniform over rotations: each entry of W has mean 0 and variance 1/d."""
    W = torch.stack([orthogonal_directions(4, 0, step(n)) for n in range(800)])
    assert W.mean(0).abs().max() < 5 * 0.5 / math.sqrt(800)
    assert (W.square().mean(0) - 0.25).abs().max() < 0.05


def test_draws_are_pure_functions_of_their_counter() -> None:
    first = uniform(1000, 3, step(7), stream=1)
    torch.testing.assert_close(uniform(1000, 3, step(7), stream=1), first, rtol=0, atol=0)
    for other in (uniform(1000, 4, step(7), 1), uniform(1000, 3, step(8), 1), uniform(1000, 3, step(7), 0)):
        assert (other == first).sum() == 0
        assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1]) < 0.12


def test_draws_are_uniform_and_normal() -> None:
    u = uniform(100_000, 0, step(), stream=0)
    assert u.min() >= 0
    assert u.max() < 1
    counts = torch.histc(u, bins=50, min=0, max=1)
    assert ((counts - 2000).square() / 2000).sum() < 100  # chi-squared with 49 degrees: 85.4 at 0.1%
    g = gaussian(300, 300, 0, step(), stream=0)
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert g.pow(power).mean().item() == pytest.approx(moment, abs=0.1)


def test_priors() -> None:
    draws = {prior: prior_rows(prior, 2000, 6, 0, step()) for prior in PRIORS}
    torch.testing.assert_close(draws["hypersphere"].norm(dim=1), torch.ones(2000, dtype=torch.float64))
    assert draws["hypercube"].abs().max() <= 1
    variance = {"hypersphere": 1 / 6, "hypercube": 1 / 3, "normal": 1.0}
    for prior, rows in draws.items():
        assert rows.mean(0).abs().max() < 0.1
        assert rows.var().item() == pytest.approx(variance[prior], rel=0.05)


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
