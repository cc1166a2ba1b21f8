"""The map keeps neighborhoods, depends only on the seed, and survives odd features."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits

from kontrast.lens.map_2d import joint_affinities, map_to_plane, principal_components


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    scans = load_digits()
    return torch.tensor(scans.data[:400]), torch.tensor(scans.target[:400])


def share_of_own_class(positions: torch.Tensor, labels: torch.Tensor) -> float:
    distances = torch.cdist(positions, positions).fill_diagonal_(torch.inf)
    return float((labels[distances.topk(5, largest=False).indices] == labels[:, None]).double().mean())


def test_neighbors_in_the_plane_are_neighbors_in_the_features(digits):
    features, labels = digits
    positions = map_to_plane(features, seed=0)
    assert positions.shape == (400, 2)
    assert share_of_own_class(positions, labels) > 0.9
    assert share_of_own_class(positions, labels) > share_of_own_class(principal_components(features, 2), labels) + 0.2


def test_the_seed_determines_the_map(digits):
    first, again, other = (map_to_plane(digits[0][:100], seed=seed, iterations=60) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_affinities_have_the_given_perplexity(digits):
    points = principal_components(digits[0], 50)
    affinities = joint_affinities(points, 20.0).double()
    assert torch.allclose(affinities, affinities.T)
    assert float(affinities.sum()) == pytest.approx(1, abs=1e-4)
    rows = affinities / affinities.sum(1, keepdim=True)
    assert 20 < float(torch.special.entr(rows).sum(1).exp().median()) < 40  # being symmetric makes them a little wider


def test_scale_and_offset_of_features_do_not_matter(digits):
    features = digits[0][:60]
    assert share_of_own_class(map_to_plane(features * 1e30 + 1e30, seed=0), digits[1][:60]) > 0.4
    assert map_to_plane(features * 1e-30, seed=0).isfinite().all()


@pytest.mark.parametrize("count", [0, 1, 2, 5, 7, 8, 12])
def test_few_points(count):
    features = torch.randn(count, 5, generator=torch.Generator().manual_seed(0))
    positions = map_to_plane(features, seed=0)
    assert positions.shape == (count, 2)
    assert positions.isfinite().all()
    assert count < 2 or len(positions.unique(dim=0)) == count


@pytest.mark.parametrize("width", [1, 2, 3, 600])
def test_any_width(width):
    positions = map_to_plane(torch.randn(40, width, generator=torch.Generator().manual_seed(0)), seed=0, iterations=50)
    assert positions.shape == (40, 2)
    assert positions.isfinite().all()


def test_features_that_are_not_finite_or_all_equal(digits):
    features = digits[0][:50].clone()
    features[3] = torch.nan
    features[4, 5] = torch.inf
    assert map_to_plane(features, seed=0, iterations=50).isfinite().all()
    assert not map_to_plane(torch.full((50, 4), 7.0), seed=0).any()
    assert not map_to_plane(torch.full((50, 4), torch.nan), seed=0).any()
    assert map_to_plane(digits[0][:10].repeat(5, 1), seed=0, iterations=50).isfinite().all()
