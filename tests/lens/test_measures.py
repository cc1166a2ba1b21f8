"""Numbers of representations, compared with closed forms, brute force and other libraries."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from kontrast import lens
from kontrast.errors import DataError
from kontrast.lens import plots
from kontrast.lens.measures import conditional_entropy, coupling, directions, mini_batches
from kontrast.lens.pair_weights import extremes, negative_weights, positive_weights
from kontrast.lens.positive_spread import positive_statistics
from kontrast.lens.summaries import Summary, dimensions
from kontrast.objectives import metrics

from support.doctests import run_examples


@pytest.fixture
def rows():
    return torch.randn(300, 24, generator=torch.Generator().manual_seed(1)) @ torch.diag(torch.linspace(1, 3, 24))


def test_effective_rank_counts_equal_directions():
    corners = torch.cat([torch.eye(6), -torch.eye(6)])
    assert lens.effective_rank(corners) == pytest.approx(6, abs=1e-6)
    assert lens.effective_rank(corners @ torch.diag(torch.tensor([1.0, 1, 1, 0, 0, 0]))) == pytest.approx(3, abs=1e-6)
    assert lens.effective_rank(torch.ones(5, 4)) == 1.0 == lens.effective_rank(torch.full((5, 4), 0.1))
    assert lens.effective_rank(1e-8 * corners) == pytest.approx(6, abs=1e-6)  # at any scale


def dead_dimensions(features):
    summary = Summary()
    dimensions(summary, features)
    return {n["name"]: n["value"] for n in summary.numbers}["dimensions without variance"]


def test_rank_and_dead_dimensions_do_not_depend_on_the_scale(rows):
    wanted = lens.effective_rank(rows)
    half_dead = rows * (torch.arange(24) < 12)
    for scale in (3e37, 1e-25):
        assert lens.effective_rank(rows * scale) == pytest.approx(wanted, rel=1e-5)
        assert dead_dimensions(half_dead * scale) == 12
    assert dead_dimensions(torch.ones(5, 4)) == 4


def test_spectrum_and_dimension_variance_carry_the_same_total(rows):
    total = rows.double().var(0).sum()
    assert lens.spectrum(rows).sum().item() == pytest.approx(total.item(), rel=1e-5)
    torch.testing.assert_close(lens.dimension_variance(rows), rows.double().var(0, correction=0))


def test_entropy_is_at_its_maximum_for_equal_distances():
    value, maximum = conditional_entropy(torch.eye(10))
    assert maximum == pytest.approx(math.log(9))
    assert value == pytest.approx(maximum, abs=1e-5)


def test_entropy_is_the_mean_over_whole_mini_batches_spread_over_the_set(rows):
    value, maximum = conditional_entropy(rows, t_minus=1.5, batch=100)
    parts = [metrics.conditional_entropy(rows[None, i::3], 1.5).item() for i in (0, 1, 2)]
    assert value == pytest.approx(sum(parts) / 3, rel=1e-5)
    assert maximum == pytest.approx(math.log(99))
    short = [metrics.conditional_entropy(rows[None, i:200:2], 1.5).item() for i in (0, 1)]
    assert conditional_entropy(rows[:201], t_minus=1.5, batch=100)[0] == pytest.approx(sum(short) / 2, rel=1e-5)


def test_entropy_of_several_views_equals_the_metric_of_the_objectives(rows):
    """Training, the lens and the objectives share one definition."""
    z = torch.stack([rows, rows + 0.5])
    assert conditional_entropy(z, batch=300)[0] == pytest.approx(metrics.conditional_entropy(z, 2.0).item(), rel=1e-5)


def test_mini_batches_of_a_sorted_set_contain_all_classes():
    labels = torch.arange(1000)[None, :, None] // 100
    assert all(len(part.unique()) == 10 for part in mini_batches(labels, 256))


def test_entropy_equals_its_definition(rows):
    unit = normalize(rows[:50].double(), dim=1)
    cost = torch.cdist(unit, unit).square().fill_diagonal_(math.inf)
    w = torch.softmax(-2.0 * cost, 1)
    assert conditional_entropy(rows[:50])[0] == pytest.approx(-torch.xlogy(w, w).sum(1).mean().item(), abs=1e-5)


def test_coupling_uses_the_batch_size_of_training(rows):
    z = torch.stack([rows, rows + 0.1])
    q = coupling(z, 0.2, 64)
    assert q.shape == (2, 256)
    second = (torch.arange(256) * 300 // 256)[1::4]
    torch.testing.assert_close(q[:, 64:128], metrics.coupling_multiplier(z[:, second], 0.2))
    assert coupling(z, 0.2, 4096).shape == (2, 300)


def test_one_image_is_an_error():
    with pytest.raises(DataError, match="at least 2 images"):
        conditional_entropy(torch.ones(1, 4))


def test_class_cosines_equal_brute_force(rows):
    labels = torch.arange(300) % 7
    s = normalize(rows.double(), dim=1) @ normalize(rows.double(), dim=1).T
    same = labels[:, None] == labels
    other = ~torch.eye(300, dtype=torch.bool)
    wanted = (s[same & other].mean().item(), s[~same].mean().item())
    assert lens.class_cosines(rows, labels) == pytest.approx(wanted)
    assert math.isnan(lens.class_cosines(rows, torch.zeros(300, dtype=torch.int64))[1])
    for seed in range(20):  # one class per image: no pair within a class, whatever rounding leaves of the sums
        order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
        assert math.isnan(lens.class_cosines(rows[order], order)[0])


def test_cosine_and_variance_of_views_agree(rows):
    """JCL figure 3's two panels: mean cosine over all n x n pairs = 1 - D x mean diagonal of the covariance."""
    features = rows.reshape(5, 60, 24)
    found = positive_statistics(features)
    torch.testing.assert_close(found.cosine, 1 - 24 * found.variance)
    unit = normalize(features.double(), dim=-1)
    torch.testing.assert_close(found.cosine, unit.mean(0).square().sum(-1))
    torch.testing.assert_close(found.other_views, (25 * found.cosine - 5) / 20)


def test_normality_equals_scipy(rows):
    stats = pytest.importorskip("scipy.stats", reason="scipy comes with scikit-learn")
    projected = lens.random_projections(rows, 5)
    found = lens.normality(projected)
    for column, distance, kurtosis in zip(projected.T.numpy(), found.distance, found.kurtosis):
        assert distance.item() == pytest.approx(stats.kstest(column, "norm").statistic)
        assert kurtosis.item() == pytest.approx(stats.kurtosis(column))


def test_directions_are_orthogonal_and_the_sphere_looks_normal():
    even = normalize(torch.randn(4000, 64, generator=torch.Generator().manual_seed(3)), dim=1)
    all_of_them = lens.random_projections(even, 64)
    torch.testing.assert_close(all_of_them.square().sum(1), torch.full((4000,), 64.0, dtype=torch.float64))
    assert lens.random_projections(even, 99).shape == (4000, 64)
    assert lens.normality(lens.random_projections(even)).distance.max() < 0.04
    cone = normalize(even + 0.5, dim=1)
    assert lens.normality(lens.random_projections(cone)).distance.mean() > 0.2


def test_weights_go_to_far_positives_and_near_negatives(rows):
    query, others = rows[0], rows[1:30]
    cost = (normalize(query.double(), dim=0) - normalize(others.double(), dim=1)).square().sum(1)
    torch.testing.assert_close(positive_weights(query, others, 1.5), torch.softmax(1.5 * cost, 0))
    torch.testing.assert_close(negative_weights(query, others, 2.5), torch.softmax(-2.5 * cost, 0))
    assert positive_weights(query, others, 0.0).tolist() == pytest.approx([1 / 29] * 29)
    hardest, easiest = extremes(negative_weights(query, others))
    assert hardest == cost.argsort()[:4].tolist() and easiest == cost.argsort(descending=True)[:4].tolist()
    assert extremes(torch.tensor([0.3, 0.2, 0.5])) == ([2], [1])
    assert extremes(torch.tensor([1.0])) == ([0], [])


def test_histograms_count_every_value():
    middles, shares = plots.histogram(torch.tensor([0.0, 0.1, 0.9, 1.0, 7.0]), bins=4, span=(0.0, 1.0))
    assert middles.tolist() == [0.125, 0.375, 0.625, 0.875]
    assert shares.tolist() == pytest.approx([0.4, 0, 0, 0.6])
    flat = plots.histogram(torch.full((9,), 0.5))
    assert flat[1].sum() == pytest.approx(1) and np.isfinite(flat[0].numpy()).all()


@pytest.mark.parametrize("scale", [1e25, 1e-25])
def test_lengths_beyond_float32_do_not_change_directions(scale):
    """Squares of such rows overflow or vanish; their directions do not."""
    rows = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(directions(scale * rows), directions(rows))
    assert conditional_entropy(scale * rows) == pytest.approx(conditional_entropy(rows))
    dead = directions(torch.tensor([[0.0, 0.0], [float("nan"), 1.0], [3.0, 4.0]]))
    torch.testing.assert_close(dead, torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.6, 0.8]]))


def test_numpy_arrays_work_like_tensors():
    rows = torch.randn(40, 6)
    assert lens.effective_rank(rows.numpy()) == lens.effective_rank(rows)
    assert conditional_entropy(rows.numpy()) == conditional_entropy(rows)


@pytest.mark.parametrize("name", sorted(set(lens.__all__) - {"alignment", "coupling_multiplier", "uniformity"}))
def test_examples_run(name):
    run_examples(getattr(lens, name))
