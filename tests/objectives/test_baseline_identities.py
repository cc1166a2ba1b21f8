"""Hard negatives, align-uniform, CMC, Barlow Twins, VICReg, and the metrics."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import normalize

from kontrast.objectives import (
    DCL,
    Alignment,
    AlignUniform,
    BarlowTwins,
    HardNegative,
    InfoNCE,
    MultiViewNCE,
    NTXent,
    VICReg,
    metrics,
)


def test_hard_negatives_without_beta_and_tau_plus_are_nt_xent(projections, keys, bank) -> None:
    torch.testing.assert_close(HardNegative(0.3, 0.0, 0.0)(projections), NTXent(0.3)(projections))
    q = projections[0]
    torch.testing.assert_close(
        HardNegative(0.3, 0.0, 0.0)(q, keys=keys[0], bank=bank), NTXent(0.3)(q, keys=keys[0], bank=bank)
    )


def test_hard_negatives_grow_with_beta(projections) -> None:
    rows = torch.stack([HardNegative(0.5, beta, 0.0).rows(projections) for beta in (0.0, 0.5, 1.0, 4.0)])
    assert bool((rows.diff(dim=0) >= 0).all())


def test_beta_has_no_effect_on_equal_negatives() -> None:
    simplex = torch.eye(6, dtype=torch.float64).expand(2, -1, -1)
    values = [HardNegative(0.5, beta, 0.1)(simplex) for beta in (0.0, 1.0, 5.0)]
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(values[0], values[2])


def test_large_tau_plus_is_clamped(projections) -> None:
    """N = n exp(-1/tau), so the row is log(1 + n exp(-1/tau - s+/tau))."""
    same = projections[:1].expand(2, -1, -1)
    rows = HardNegative(0.5, 0.0, 0.95).rows(same)
    torch.testing.assert_close(rows, torch.full_like(rows, math.log1p(12 * math.exp(-2 / 0.5))))


def test_uniformity_of_the_sphere() -> None:
    """On S^2: -2t + log(sinh(2t)/(2t)), which is -2.080 at t = 2."""
    z = normalize(torch.randn(4000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64), dim=-1)
    limit = -4 + math.log(math.sinh(4) / 4)
    assert limit == pytest.approx(-2.080, abs=1e-3)
    assert metrics.uniformity(z, t=2.0).item() == pytest.approx(limit, abs=5e-3)


def test_metrics_equal_parts_of_the_losses(projections, three_views) -> None:
    terms = AlignUniform(alpha=2.0, t=2.0).terms(projections)
    torch.testing.assert_close(metrics.alignment(projections), terms.attraction)
    torch.testing.assert_close(metrics.uniformity(projections), terms.repulsion)
    torch.testing.assert_close(metrics.alignment(three_views), Alignment()(three_views))
    q = metrics.coupling_multiplier(projections, 0.3)
    torch.testing.assert_close(q, torch.sigmoid(DCL(0.3).rows(projections)))
    torch.testing.assert_close(q, 1 - torch.exp(-NTXent(0.3).rows(projections)))
    torch.testing.assert_close(
        metrics.alignment(projections, alpha=1.0),
        (2 - 2 * (normalize(projections[0], dim=-1) * normalize(projections[1], dim=-1)).sum(-1)).sqrt().mean(),
    )


@pytest.mark.parametrize("call", [metrics.conditional_entropy, metrics.uniformity])
def test_metrics_of_one_view(projections, call) -> None:
    each = torch.stack([call(view) for view in projections])
    torch.testing.assert_close(call(projections), each.mean())
    torch.testing.assert_close(call(projections[:1]), each[0])


def test_metrics_refuse_bad_input(projections) -> None:
    with pytest.raises(ValueError, match="at least 2 views"):
        metrics.alignment(projections[:1])
    with pytest.raises(ValueError, match="at least 2 images"):
        metrics.uniformity(projections[:, :1])
    with pytest.raises(ValueError, match="t is 0"):
        metrics.uniformity(projections, t=0)


def test_cmc_is_twice_the_symmetric_info_nce_at_two_views(projections) -> None:
    torch.testing.assert_close(MultiViewNCE(0.2)(projections), 2 * InfoNCE(0.2, symmetric=True)(projections))


def test_barlow_twins_is_zero_for_white_equal_views() -> None:
    rows = torch.linalg.qr(torch.randn(32, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    white = torch.linalg.qr(rows - rows.mean(0)).Q * 32**0.5
    assert BarlowTwins(1.0)(white.expand(2, -1, -1)).item() < 1e-9
    assert BarlowTwins(1.0)(torch.stack([white, -white])).item() == pytest.approx(16, rel=1e-4)


def test_vicreg_is_zero_for_spread_uncorrelated_equal_views() -> None:
    rows = torch.linalg.qr(torch.randn(32, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    white = torch.linalg.qr(rows - rows.mean(0)).Q * 40
    assert VICReg()(white.expand(2, -1, -1)).item() < 1e-9
    collapsed = VICReg().terms(torch.ones(2, 8, 4, dtype=torch.float64))
    assert collapsed.repulsion.item() == pytest.approx(25 * 0.99)


def test_vicreg_equation_6_has_the_documented_weights() -> None:
    """25 s(Z, Z') + 25 [v(Z) + v(Z')] + c(Z) + c(Z'), s with the whole squared distance."""
    n, D = 9, 5
    views = torch.randn(2, n, D, dtype=torch.float64)
    invariance = (views[0] - views[1]).square().sum(-1).mean()
    deviation = (views.var(1) + 1e-4).sqrt()
    variance = (1 - deviation).clamp(min=0).mean(1).sum()
    covariances = [torch.cov(view.T) for view in views]
    covariance = sum((c - c.diag().diag()).square().sum() / D for c in covariances)
    written = 25 * invariance + 25 * variance + covariance
    torch.testing.assert_close(VICReg(25.0 * D, 50.0)(views), written)
    page = " ".join(VICReg.__doc__.split())
    assert "`invariance_weight` of 25 D" in page and "`variance_weight` of 50" in page


def test_multiplier_with_three_views() -> None:
    """NT-Xent's gradient to the negatives over DCL's, for one anchor of three views."""
    z = torch.nn.functional.normalize(torch.randn(3, 6, 5, dtype=torch.float64), dim=-1)
    s = (z[0, 0] @ z[:, 1:].reshape(-1, 5).T / 0.3).requires_grad_()
    own = z[1:, 0] @ z[0, 0] / 0.3
    (coupled,) = torch.autograd.grad(torch.logsumexp(torch.cat([s, own]), 0), s)
    (decoupled,) = torch.autograd.grad(torch.logsumexp(s, 0), s)
    expected = metrics.coupling_multiplier(z, 0.3)[0, 0]
    torch.testing.assert_close(coupled / decoupled, expected.expand(len(s)))


@pytest.mark.parametrize("negatives", ["bank", "keys"])
@pytest.mark.parametrize("within", [True, False])
def test_align_uniform_with_a_queue_counts_the_pairs_of_queries(negatives, within, projections, keys, bank) -> None:
    """The authors' code for MoCo: squared distances of queries to the queue and, once each, between queries."""
    z = projections[0].clone().requires_grad_()
    q, k = normalize(z, dim=-1), normalize(keys[0], dim=-1)
    others = bank[None].expand(7, -1, -1) if negatives == "bank" else k[None].expand(7, -1, -1)
    apart = (q[:, None] - others).square().sum(-1)
    if negatives == "keys":  # the key of the same image is a positive
        apart = apart[~torch.eye(7, dtype=torch.bool)]
    squared = [apart.flatten(), *([torch.pdist(q).square()] if within else [])]
    expected = (q - k).square().sum(-1).mean() + torch.cat(squared).mul(-2).exp().mean().log()
    given = {"bank": bank} if negatives == "bank" else {}
    ours = AlignUniform(pairs_within_batch=within)(z, keys=keys[0], **given)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(torch.autograd.grad(ours, z)[0], torch.autograd.grad(expected, z)[0])
