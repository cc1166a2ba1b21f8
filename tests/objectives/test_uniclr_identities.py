"""SimAffinity, SimWhitening, SimTrace, W-MSE: the identities of the UniCLR paper."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from kontrast.objectives import WMSE, InfoNCE, Pairs, SimAffinity, SimTrace, SimWhitening
from kontrast.objectives.inputs import Inputs
from kontrast.objectives.whitening import whiten_pairs

from support import objective_definitions as definitions

LABEL = torch.arange(7)


def test_without_penalty_it_is_info_nce_with_the_batch_as_keys(projections) -> None:
    q, k = normalize(projections, dim=-1)
    clip = cross_entropy(q @ k.T / 0.5, LABEL)
    torch.testing.assert_close(SimAffinity(0.5, 0.0)(projections), clip)
    torch.testing.assert_close(InfoNCE(0.5)(projections), clip)
    torch.testing.assert_close(InfoNCE(0.5)(projections[0], keys=projections[1]), clip)


def test_a_symmetric_matrix_has_no_penalty_and_two_equal_directions(projections) -> None:
    same = projections[:1].expand(2, -1, -1)
    terms = SimAffinity(0.5, 1.0).terms(same)
    assert terms.symmetry.item() == 0
    torch.testing.assert_close(terms.total, SimAffinity(0.5, 1.0, symmetric=True)(same))
    z = projections.clone().requires_grad_()
    assert bool(torch.isfinite(torch.autograd.grad(SimAffinity(0.5, 1.0)(z[:1].expand(2, -1, -1)), z)[0]).all())


def test_penalty_on_the_scaled_matrix_is_the_raw_one_over_the_temperature(projections) -> None:
    scaled = SimAffinity(0.25, 1.0).terms(projections).symmetry
    raw = SimAffinity(0.25, 1.0, symmetry_on_scaled=False).terms(projections).symmetry
    by_n = SimAffinity(0.25, 1.0, normalize_by_n=True).terms(projections).symmetry
    torch.testing.assert_close(scaled, raw / 0.25)
    torch.testing.assert_close(by_n, scaled / 7)


def test_penalty_by_traces(projections) -> None:
    """||A - A^T||^2 = 2 tr(Z Z^T Z' Z'^T) - 2 tr((Z' Z^T)^2), with columns as samples."""
    z, y = (normalize(x, dim=-1).T for x in projections)
    expected = 2 * torch.trace(z @ z.T @ y @ y.T) - 2 * torch.trace(torch.linalg.matrix_power(y @ z.T, 2))
    raw = SimAffinity(0.5, 1.0, symmetry_on_scaled=False).terms(projections).symmetry
    torch.testing.assert_close(raw.square(), expected)


def test_symmetric_is_the_mean_of_both_directions(projections) -> None:
    one_way = [SimAffinity(0.5)(z) for z in (projections, projections.flip(0))]
    torch.testing.assert_close(SimAffinity(0.5, symmetric=True)(projections), torch.stack(one_way).mean())


def test_keys_have_both_directions(projections, keys) -> None:
    """The EMA form: loss(q1, k2) and loss(q2, k1), their mean."""
    loss, k = SimAffinity(0.5), keys[:2]
    both = [loss(projections[0], keys=k[1]), loss(projections[1], keys=k[0])]
    torch.testing.assert_close(loss(projections, keys=k), torch.stack(both).mean())


def batch(rank: int | None = None):
    z = torch.randn(2, 16, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return z if rank is None else z @ torch.diag(torch.tensor([1.0] * rank + [0.0] * (5 - rank), dtype=torch.float64))


def test_sim_trace_is_half_the_whitened_error() -> None:
    """SimTrace = -D/2 + 1/2 W-MSE, each in the sum's convention; and the same with means."""
    z = batch()
    N, D = 16, 5
    rows = z.reshape(-1, D)
    sigma = (rows - rows.mean(0)).T @ (rows - rows.mean(0))
    apart = z[0] - z[1]
    error = torch.trace(apart @ torch.linalg.inv(sigma) @ apart.T)
    torch.testing.assert_close(SimTrace(0.0, scaling="sum")(z), -D / 2 + error / 2)
    w_mse = WMSE(0.0, normalize=False, pooled=True)(z)
    torch.testing.assert_close(SimTrace(0.0)(z), -D / 2 * (2 * N - 1) / N + w_mse / 2)


def test_aligned_views_reach_the_bound_and_low_rank_does_not() -> None:
    aligned = batch()[:1].expand(2, -1, -1)
    assert SimTrace(0.0, scaling="sum")(aligned).item() == pytest.approx(-5 / 2)
    for rank in (1, 3):
        low = batch(rank)[:1].expand(2, -1, -1)
        assert SimTrace(1e-6, scaling="sum")(low).item() == pytest.approx(-rank / 2, abs=1e-4)
    constant = torch.ones(2, 16, 5, dtype=torch.float64)
    assert SimTrace()(constant).item() == 0


def test_affine_invariance() -> None:
    z = batch()
    matrix = torch.randn(5, 5, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    moved = z @ matrix + 3.0
    torch.testing.assert_close(SimTrace(0.0)(moved), SimTrace(0.0)(z), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(
        SimWhitening(0.5, ridge=0.0)(moved), SimWhitening(0.5, ridge=0.0)(z), rtol=1e-6, atol=1e-8
    )


def test_relative_ridge_is_invariant_to_scale() -> None:
    z = batch()
    for loss in (SimTrace(), SimWhitening(), WMSE()):
        torch.testing.assert_close(loss(100 * z), loss(z), rtol=1e-5, atol=1e-6)


def test_length_of_the_gradient_along_z() -> None:
    """Attached: <grad, z> = 0, no pull on the scale; detached: 2 loss, so the scale grows."""
    z = batch().requires_grad_()
    for detach in (False, True):
        pairs = whiten_pairs(Pairs(Inputs(z), normalize=False), 0.0, detach=detach)
        value = -pairs.similarity([(0, 1)]).mean()
        along = (torch.autograd.grad(value, z)[0] * (z - z.mean((0, 1)))).sum()
        torch.testing.assert_close(value, SimTrace(0.0)(z))
        torch.testing.assert_close(along, 2 * value if detach else torch.zeros_like(value), rtol=1e-7, atol=1e-9)


def test_any_whitening_matrix_gives_the_same_affinity() -> None:
    """Cholesky's, ZCA's and PCA's differ by a rotation, which does not change unit rows."""
    z = batch()
    centered = z - z.reshape(-1, 5).mean(0)
    values, vectors = torch.linalg.eigh(torch.cov(z.reshape(-1, 5).T))
    pca = torch.diag(values.rsqrt()) @ vectors.T
    zca = vectors @ pca
    ours = SimWhitening(0.5, 0.0, ridge=0.0)(z)
    for matrix in (pca, zca):
        q, k = normalize(centered @ matrix.T, dim=-1)
        torch.testing.assert_close(ours, cross_entropy(q @ k.T / 0.5, torch.arange(16)))


def test_white_features_give_the_plain_affinity() -> None:
    """If Sigma is I and the mean 0, whitening does nothing."""
    rows = torch.linalg.qr(batch().reshape(32, 5) - batch().reshape(32, 5).mean(0)).Q * 31**0.5
    rows = rows - rows.mean(0)
    z = rows.view(2, 16, 5)
    torch.testing.assert_close(torch.cov(rows.T), torch.eye(5, dtype=torch.float64))
    torch.testing.assert_close(SimWhitening(0.5, ridge=0.0)(z), SimAffinity(0.5)(z))


def test_the_released_code_variants() -> None:
    """mocov3: unit rows first, cov + ridge I, the affinity over N; SimTrace's covariance constant."""
    z = batch()
    x = normalize(z, dim=-1)
    rows = x.reshape(-1, 5)
    inverse = torch.linalg.inv(torch.cov(rows.T) + 0.01 * torch.eye(5, dtype=torch.float64))
    A = (x[0] - rows.mean(0)) @ inverse @ (x[1] - rows.mean(0)).T / 16
    whitening = SimWhitening(0.5, 0.01, variant="mocov3")(z)
    expected = cross_entropy(A / 0.5, torch.arange(16)) + 0.01 * torch.linalg.norm((A - A.T) / 0.5)
    torch.testing.assert_close(whitening, expected)
    torch.testing.assert_close(SimTrace(variant="mocov3")(z), -torch.trace(A))
    with_keys = SimTrace()(z[0], keys=z[1])
    torch.testing.assert_close(with_keys, -torch.trace(A))


PAIRED = (
    SimTrace(),
    SimTrace(scaling="sum"),
    SimTrace(variant="paper"),
    SimWhitening(0.5, 0.01),
    SimWhitening(0.5, 0.01, variant="mocov3"),
)


def draw_views(*counts: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 16, 5, generator=generator, dtype=torch.float64) for n in counts]


def assert_same_value_and_gradient(ours: torch.Tensor, expected: torch.Tensor, z: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(torch.autograd.grad(ours, z)[0], torch.autograd.grad(expected, z)[0])


@pytest.mark.parametrize("queries, keys", [(2, 2), (1, 3), (4, 2)])
def test_each_query_is_whitened_with_one_key(queries, keys) -> None:
    """Equation 2: loss(q1, k2) and loss(q2, k1), each by the mean and covariance of its own two views."""
    z, k = draw_views(queries, keys)
    z.requires_grad_()
    links = [(v, w) for v in range(queries) for w in range(keys) if queries == 1 or w != v]
    for loss in PAIRED:
        alone = [loss(z[v : v + 1], keys=k[w : w + 1]) for v, w in links]
        assert_same_value_and_gradient(loss(z, keys=k), torch.stack(alone).mean(), z)


@pytest.mark.parametrize("teacher", [False, True])
def test_one_query_and_one_key_are_the_papers_definition(teacher) -> None:
    """With a teacher the mean and covariance are still those of both views, and their gradient reaches the query."""
    z = draw_views(2)[0].requires_grad_()
    pair = torch.stack([z[0], z[1].detach()]) if teacher else z
    given = {"z": z[0], "keys": z[1]} if teacher else {"z": z}
    assert_same_value_and_gradient(SimTrace(0.02, variant="paper")(**given), definitions.sim_trace(pair, 0.02), z)
    expected = definitions.sim_whitening(pair, 0.5, 0.01, 0.02)
    assert_same_value_and_gradient(SimWhitening(0.5, 0.01, 0.02)(**given), expected, z)


def test_three_views_are_whitened_in_pairs() -> None:
    """Each pair of views has a mean and covariance of its own, also if both directions count."""
    z = draw_views(3)[0].requires_grad_()
    for loss in (*PAIRED, SimWhitening(0.5, 0.01, symmetric=True)):
        alone = [loss(z[v], z[w]) for v, w in [(0, 1), (0, 2), (1, 2)]]
        assert_same_value_and_gradient(loss(z), torch.stack(alone).mean(), z)


@pytest.mark.parametrize("queries, keys", [(2, 2), (3, 0)])
def test_pooled_statistics_are_those_of_all_views_and_keys(queries, keys) -> None:
    z, k = draw_views(queries, keys)
    given = {"keys": k} if keys else {}
    centered, sigma = definitions.pooled(torch.cat([z, k]), 1e-3)
    inverse = torch.linalg.inv(sigma)
    others = centered[queries:] if keys else centered
    links = [(0, 1), (1, 0)] if keys else [(0, 1), (0, 2), (1, 2)]
    traces = [-torch.trace(centered[v] @ inverse @ others[w].T) / 16 for v, w in links]
    loss = SimTrace(variant="paper", pooled=True)(z, **given)
    torch.testing.assert_close(loss, torch.stack(traces).mean())
    whitened = normalize(centered @ torch.linalg.cholesky(inverse), dim=-1)
    given = {"keys": whitened[queries:]} if keys else {}
    expected = SimAffinity(0.5, 0.01)(whitened[:queries], **given)
    given = {"keys": k} if keys else {}
    torch.testing.assert_close(SimWhitening(0.5, 0.01, pooled=True)(z, **given), expected)


def test_the_released_code_detaches_the_covariance() -> None:
    z = batch().requires_grad_()
    x = normalize(z, dim=-1)
    rows = x.detach().reshape(-1, 5)
    inverse = torch.linalg.inv(torch.cov(rows.T) + 0.01 * torch.eye(5, dtype=torch.float64))
    expected = -torch.trace((x[0] - rows.mean(0)) @ inverse @ (x[1] - rows.mean(0)).T) / 16
    ours = SimTrace(variant="mocov3")(z)
    torch.testing.assert_close(torch.autograd.grad(ours, z)[0], torch.autograd.grad(expected, z)[0])
