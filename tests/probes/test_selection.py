"""Which rows are chosen as representatives, and the parts of cross-validation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kontrast.errors import UsageError
from kontrast.probes import linear_layer
from kontrast.probes.fine_tuning import folds
from kontrast.probes.intervals import wilson
from kontrast.probes.logistic import fit_logistic, standardize
from kontrast.probes.selection import select_diverse

from support.doctests import run_examples


def clusters(each: int, centers: int = 6, far: float = 20.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (far * torch.eye(centers).repeat_interleave(each, 0)) + torch.randn(
        centers * each, centers, generator=generator
    )


def test_the_examples():
    for thing in (select_diverse, folds, wilson):
        run_examples(thing)


@pytest.mark.parametrize("method", ["k-means", "k-center"])
def test_every_cluster_is_represented(method):
    for seed in range(5):
        chosen = select_diverse(clusters(30), 6, method=method, seed=seed)
        assert sorted((chosen // 30).tolist()) == list(range(6))


@pytest.mark.parametrize("method", ["k-means", "k-center"])
def test_clusters_with_a_chosen_row_are_left_to_others(method):
    rows = clusters(30)
    chosen = select_diverse(rows, 4, method=method, chosen=rows[[0, 30]])
    assert sorted((chosen // 30).tolist()) == [2, 3, 4, 5]


@pytest.mark.parametrize("method", ["k-means", "k-center"])
def test_rows_of_weight_zero_are_not_chosen_while_others_are_left(method):
    rows = clusters(30)
    weights = torch.ones(len(rows))
    weights[60:] = 0.0
    assert int(select_diverse(rows, 2, method=method, weights=weights).max()) < 60


def test_k_means_takes_typical_rows_and_k_center_an_outlier():
    rows = torch.cat([clusters(30), torch.full((1, 6), 100.0)])
    assert 180 in select_diverse(rows, 3, method="k-center").tolist()
    distance = (rows[:30] - rows[:30].mean(0)).norm(dim=1)
    (first,) = select_diverse(rows[:30], 1).tolist()
    assert distance[first] == distance.min()


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 12), st.integers(0, 3), st.sampled_from(["k-means", "k-center"]), st.booleans())
def test_the_choice_has_the_size_and_no_row_twice(count, known, method, equal):
    rows = torch.zeros(12, 3) if equal else torch.randn(12, 3, generator=torch.Generator().manual_seed(count))
    chosen = select_diverse(rows, count, method=method, chosen=rows[:known])
    assert len(set(chosen.tolist())) == count == len(chosen)


def test_impossible_counts_and_methods_are_refused():
    with pytest.raises(UsageError, match="from 1 to 4"):
        select_diverse(torch.eye(4), 5)
    with pytest.raises(UsageError, match="k-means or k-center"):
        select_diverse(torch.eye(4), 2, method="random")


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=40), st.integers(2, 6))
def test_folds_hold_every_image_of_a_class_of_two_or_more_once(labels, count):
    y = torch.tensor(labels)
    parts = folds(y, count)
    together = torch.cat(parts).tolist() if parts else []
    assert sorted(together) == [i for i, label in enumerate(labels) if labels.count(label) > 1]
    for rows in parts:  # what is left can be fitted: it has every class
        left = y[~torch.isin(torch.arange(len(y)), rows)]
        assert set(left.tolist()) == set(labels)


def test_the_linear_layer_is_the_logistic_fit_of_standardized_features():
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 3
    for width in (8, 400):  # the second is wider than the span of the rows
        x = 50 + 7 * torch.randn(60, width, generator=generator) + y[:, None]
        layer, protocol = linear_layer(x, y, grid=(0.1,))
        (z,) = standardize(x.double())
        expected = fit_logistic(z, y, 3, 0.1, tolerance=1e-12)
        assert protocol["C"] == 0.1
        given = (layer(x) - layer(x).mean(1, keepdim=True)).double()
        wanted = expected.scores(z)
        assert torch.allclose(given, wanted - wanted.mean(1, keepdim=True), atol=2e-3)


def test_wilsons_interval_is_the_range_of_shares_that_the_count_does_not_contradict():
    """At its ends the standardized distance is the normal quantile."""
    for hits, n in ((3, 10), (40, 50), (999, 1000)):
        for end in wilson(hits, n):
            assert abs(abs(hits - n * end) / (n * end * (1 - end)) ** 0.5 - 1.959964) < 1e-5
    assert wilson(0, 8)[0] == 0.0 < wilson(0, 8)[1] < 0.35
