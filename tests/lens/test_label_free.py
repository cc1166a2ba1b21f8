"""RankMe, alpha-ReQ and LiDAR: the papers' definitions in float64, and the traps of each."""

from __future__ import annotations

import math

import pytest
import torch

from kontrast.errors import DataError
from kontrast.lens import alpha_req, effective_rank, lidar, rankme


def rows_with(sigma: torch.Tensor, count: int = 400, seed: int = 0) -> torch.Tensor:
    """Centered rows [N,D] whose singular values are sigma, in random directions."""
    generator = torch.Generator().manual_seed(seed)
    width = len(sigma)
    x = torch.randn(count, width, generator=generator, dtype=torch.float64)
    u = torch.linalg.qr(x - x.mean(0)).Q
    v = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64)).Q
    return u * sigma @ v.T


def exp_entropy(values) -> float:
    shares = [value / sum(values) for value in values]
    return math.exp(-sum(p * math.log(p) for p in shares))


HARMONIC = 1 / torch.arange(1, 33, dtype=torch.float64)


def test_rankme_is_the_entropy_of_singular_values_not_of_their_squares():
    """For the spectrum 1/k in 32 directions it is 17.7; the effective rank, of variances, is 4.3."""
    rows = rows_with(HARMONIC)
    assert rankme(rows) == pytest.approx(exp_entropy(HARMONIC.tolist()), rel=1e-4) == pytest.approx(17.742, rel=1e-4)
    assert (
        effective_rank(rows)
        == pytest.approx(exp_entropy((HARMONIC**2).tolist()), rel=1e-6)
        == pytest.approx(4.348, 1e-3)
    )


def test_a_common_offset_hides_rank_unless_it_is_removed():
    rows = rows_with(HARMONIC)
    assert rankme(rows, centered=False) == pytest.approx(rankme(rows), rel=1e-6)
    assert rankme(rows + 0.5) == pytest.approx(rankme(rows), rel=1e-6)
    assert rankme(rows + 0.5, centered=False) < 2.0
    x = rows + 0.5
    assert rankme(x, centered=False) == pytest.approx(exp_entropy(torch.linalg.svdvals(x).tolist()), rel=1e-4)


@pytest.mark.parametrize("epsilon", [1e-7, 1e-5])
def test_epsilon_is_added_to_every_share(epsilon):
    """With 1e-5 one direction among 2,048 would count as 1.27."""
    rows = torch.zeros(300, 256, dtype=torch.float64)
    rows[:, 0] = torch.randn(300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert rankme(rows, epsilon=epsilon) == pytest.approx(math.exp(-255 * epsilon * math.log(epsilon)), abs=2e-5)
    assert math.exp(-2047 * 1e-5 * math.log(1e-5)) == pytest.approx(1.27, abs=0.01)


def test_rows_that_are_all_the_same_have_rank_one():
    assert rankme(torch.full((10, 4), 0.1)) == 1.0
    with pytest.raises(DataError, match="at least 2 images"):
        rankme(torch.ones(1, 4))


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.3])
def test_alpha_req_is_the_exponent_of_a_power_law(alpha):
    i = torch.arange(1, 65, dtype=torch.float64)
    assert alpha_req(rows_with(i ** (-alpha / 2))) == pytest.approx(alpha, abs=1e-6)


def test_alpha_req_weighs_eigenvalue_i_by_1_over_i_and_takes_12_to_50():
    i = torch.arange(1, 65, dtype=torch.float64)
    lam = i**-1.0 * torch.exp(0.3 * torch.sin(i))
    lam = lam.sort(descending=True).values
    x, y, w = -i[11:50].log(), lam[11:50].log(), 1 / i[11:50]
    a = torch.stack([x, torch.ones_like(x)], 1) * w.sqrt()[:, None]
    slope = torch.linalg.lstsq(a, (y * w.sqrt())[:, None]).solution[0].item()
    assert alpha_req(rows_with(lam.sqrt())) == pytest.approx(slope, abs=1e-6)
    changed = lam.clone()
    changed[:11] = 50.0  # the first eleven don't count
    assert alpha_req(rows_with(changed.sqrt())) == pytest.approx(slope, abs=1e-6)
    assert math.isnan(alpha_req(torch.randn(100, 8)))


def noise(views: int = 10, images: int = 1500, width: int = 16) -> torch.Tensor:
    return torch.randn(views, images, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def with_signal(directions: int, size: float) -> torch.Tensor:
    signal = torch.zeros(1, 1500, 16, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    signal[..., :directions] = size * torch.randn(1, 1500, directions, generator=generator, dtype=torch.float64)
    return noise() + signal


def test_lidar_is_maximal_for_pure_noise_and_its_eigenvalues_are_one_over_q():
    found = lidar(noise())
    assert found.value > 15.8 and found.signal == pytest.approx(1, abs=0.02)
    assert found.above_noise < 8  # what is left is chance


def test_lidar_counts_true_directions():
    found = lidar(with_signal(4, 3.0))
    assert 4.2 < found.value < 5.5 and found.above_noise == pytest.approx(4, abs=0.2)
    assert found.signal == pytest.approx((4 * (9 + 0.1) + 12 * 0.1) / 1.6, rel=0.05)


def test_lidar_is_its_definition():
    z, q, n = with_signal(4, 1.0)[:, :200], 10, 200
    means = z.mean(0)
    s_b = torch.cov(means.T)
    s_w = sum((z[v] - means).T @ (z[v] - means) for v in range(q)) / (n * (q - 1)) + 1e-4 * torch.eye(16)
    eigenvalues = torch.linalg.eigvals(torch.linalg.solve(s_w, s_b)).real
    found = lidar(z)
    assert found.value == pytest.approx(exp_entropy(eigenvalues.tolist()), rel=1e-8)
    assert found.signal == pytest.approx(q * eigenvalues.mean().item(), rel=1e-8)
    above = (eigenvalues - 1 / q).clamp_min(0)
    assert found.above_noise == pytest.approx(exp_entropy(above[above > 0].tolist()), rel=1e-8)


def test_lidar_does_not_change_under_linear_maps_without_delta():
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(16, 16, generator=generator, dtype=torch.float64)
    z = with_signal(4, 1.0)
    assert lidar(z @ a + 5, delta=0.0) == pytest.approx(lidar(z, delta=0.0), rel=1e-6)


def test_lidar_of_collapsed_or_missing_views():
    assert lidar(torch.ones(4, 10, 3)).value == 1.0
    with pytest.raises(DataError, match="at least 2 views of 2 images"):
        lidar(torch.ones(1, 10, 3))
