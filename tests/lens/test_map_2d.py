"""The map: neighbourhoods survive the way to the plane, the seed decides it, and odd features do no harm."""

from __future__ import annotations

import time

import pytest
import torch
from sklearn.datasets import load_digits

from kontrast.lens.map_2d import embed_2d, joint_affinities, principal_components


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    scans = load_digits()
    return torch.tensor(scans.data[:400]), torch.tensor(scans.target[:400])


def share_of_own_class(places: torch.Tensor, labels: torch.Tensor) -> float:
    distances = torch.cdist(places, places).fill_diagonal_(torch.inf)
    return float((labels[distances.topk(5, largest=False).indices] == labels[:, None]).double().mean())


def test_neighbours_in_the_plane_are_neighbours_in_the_features(digits):
    features, labels = digits
    places = embed_2d(features, seed=0)
    assert places.shape == (400, 2)
    assert share_of_own_class(places, labels) > 0.9
    assert share_of_own_class(places, labels) > share_of_own_class(principal_components(features, 2), labels) + 0.2


def test_seed_decides_the_map(digits):
    first, again, other = (embed_2d(digits[0][:100], seed=seed, iterations=60) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_affinities_have_the_perplexity_asked_for(digits):
    points = principal_components(digits[0], 50)
    affinities = joint_affinities(points, 20.0).double()
    assert torch.allclose(affinities, affinities.T)
    assert float(affinities.sum()) == pytest.approx(1, abs=1e-4)
    rows = affinities / affinities.sum(1, keepdim=True)
    assert 20 < float(torch.special.entr(rows).sum(1).exp().median()) < 40  # made symmetric: a little wider than asked


def test_scale_and_offset_of_features_do_not_matter(digits):
    features = digits[0][:60]
    assert share_of_own_class(embed_2d(features * 1e30 + 1e30, seed=0), digits[1][:60]) > 0.4
    assert embed_2d(features * 1e-30, seed=0).isfinite().all()


@pytest.mark.parametrize("count", [0, 1, 2, 5, 7, 8, 12])
def test_few_points(count):
    features = torch.randn(count, 5, generator=torch.Generator().manual_seed(0))
    places = embed_2d(features, seed=0)
    assert places.shape == (count, 2)
    assert places.isfinite().all()
    assert count < 2 or len(places.unique(dim=0)) == count


@pytest.mark.parametrize("width", [1, 2, 3, 600])
def test_any_width(width):
    places = embed_2d(torch.randn(40, width, generator=torch.Generator().manual_seed(0)), seed=0, iterations=50)
    assert places.shape == (40, 2)
    assert places.isfinite().all()


def test_features_that_are_not_finite_or_all_equal(digits):
    features = digits[0][:50].clone()
    features[3] = torch.nan
    features[4, 5] = torch.inf
    assert embed_2d(features, seed=0, iterations=50).isfinite().all()
    assert not embed_2d(torch.full((50, 4), 7.0), seed=0).any()
    assert not embed_2d(torch.full((50, 4), torch.nan), seed=0).any()
    assert embed_2d(digits[0][:10].repeat(5, 1), seed=0, iterations=50).isfinite().all()


def test_too_many_points_are_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"at most 5,000 points, given 5,001: draw a sample"):
        embed_2d(torch.zeros(5001, 2))
    with pytest.raises(ValueError, match=r"\[N,F\]"):
        embed_2d(torch.zeros(5))


@pytest.mark.slow
def test_a_thousand_points_take_seconds():
    features = torch.tensor(load_digits().data[:1000])
    begin = time.monotonic()
    embed_2d(features, seed=0)
    assert time.monotonic() - begin < 15
