"""JCL: the identities of the JCL paper. q [B,D], keys [M',B,D], bank [M,D]."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from kontrast.objectives import JCL, InfoNCE, MultiViewNCE
from kontrast.objectives.scheduled_number import on_device


def test_without_covariance_it_is_info_nce_on_the_mean(projections, keys, bank) -> None:
    q = normalize(projections[0], dim=-1)
    mu = normalize(keys, dim=-1).mean(0)
    logits = torch.cat([(q * mu).sum(-1, keepdim=True), q @ bank.T], 1) / 0.2
    expected = cross_entropy(logits, torch.zeros(7, dtype=torch.int64))
    torch.testing.assert_close(JCL(0.2, covariance_weight=0.0)(projections[0], keys=keys, bank=bank), expected)


def test_one_key_is_moco(projections, bank) -> None:
    q, k = projections
    torch.testing.assert_close(JCL(0.2)(q, keys=k, bank=bank), InfoNCE(0.2)(q, keys=k, bank=bank))
    torch.testing.assert_close(JCL(0.2)(projections), InfoNCE(0.2)(projections))


def statistics(q, keys, bank, tau):
    logits = (normalize(q, dim=-1) * normalize(keys, dim=-1)).sum(-1) / tau
    mean, variance = logits.mean(0), logits.var(0, correction=0)
    negatives = torch.logsumexp(normalize(q, dim=-1) @ bank.T / tau, 1)
    return mean, variance, torch.sigmoid(mean - negatives)


@pytest.mark.parametrize("weight", [0.5, 1.0, 4.0])
def test_gap_over_info_nce_on_the_mean(projections, keys, bank, weight) -> None:
    """log(1 + p+ (exp(lambda Var/2) - 1)), with p+ the probability of the mean key."""
    q = projections[0]
    _, variance, p = statistics(q, keys, bank, 0.3)
    gap = JCL(0.3, weight).rows(q, keys=keys, bank=bank) - JCL(0.3, 0.0).rows(q, keys=keys, bank=bank)
    torch.testing.assert_close(gap[0], torch.log1p(p * torch.expm1(weight / 2 * variance)))


def test_grows_with_lambda_to_half_the_variance(projections, keys, bank) -> None:
    q = projections[0]
    values = torch.stack([JCL(0.3, w).rows(q, keys=keys, bank=bank)[0] for w in (0.0, 0.5, 1.0, 2.0, 8.0)])
    assert bool((values.diff(dim=0) >= 0).all())
    _, variance, _ = statistics(q, keys, bank, 0.3)
    large = 1e6
    torch.testing.assert_close(
        JCL(0.3, large).rows(q, keys=keys, bank=bank)[0] / large, variance / 2, rtol=1e-4, atol=1e-4
    )


def test_between_the_mean_key_and_its_bound_for_gaussian_keys() -> None:
    """InfoNCE(mu) <= E[InfoNCE(k)] <= JCL at lambda = 1, the expectation by Gauss-Hermite over the one logit."""
    negatives = 1.3
    nodes, weights = (torch.tensor(x) for x in __import__("numpy").polynomial.hermite_e.hermegauss(60))
    for mean, variance in ((0.5, 0.4), (2.0, 1.5), (-1.0, 0.1)):
        logits = mean + math.sqrt(variance) * nodes
        expected = (weights * (torch.logaddexp(logits, torch.tensor(negatives)) - logits)).sum() / weights.sum()
        info = math.log1p(math.exp(negatives - mean))
        jcl = math.log(math.exp(mean + variance / 2) + math.exp(negatives)) - mean
        assert info < expected.item() < jcl


def test_jensens_inequality_with_sample_means(projections, keys, bank) -> None:
    """InfoNCE on the mean key is never above the mean of InfoNCE over the keys: InfoNCE is convex in the logit."""
    q = projections[:1]
    vanilla = MultiViewNCE(0.3).rows(q, keys=keys, bank=bank)
    assert bool((JCL(0.3, 0.0).rows(q, keys=keys, bank=bank) <= vanilla + 1e-12).all())


def test_gradient_of_the_query(projections, keys, bank) -> None:
    """(1/tau)[(p~ - 1) mu + sum_j p_j n_j] + p~ lambda/tau^2 Sigma q, on a unit query."""
    tau, weight = 0.3, 2.0
    unit = normalize(keys, dim=-1)
    q = normalize(projections[0], dim=-1).requires_grad_()
    loss = JCL(tau, weight)
    row = loss.rows(q, keys=keys, bank=bank)[0, 3]
    grad = torch.autograd.grad(row, q)[0][3]
    k, x = unit[:, 3], q[3].detach()
    mu = k.mean(0)
    sigma = (k - mu).T @ (k - mu) / len(k)
    p = torch.softmax(torch.cat([(x @ mu / tau + weight / 2 / tau**2 * x @ sigma @ x)[None], bank @ x / tau]), 0)
    expected = ((p[0] - 1) * mu + p[1:] @ bank) / tau + p[0] * weight / tau**2 * sigma @ x
    tangent = expected - (expected @ x) * x
    torch.testing.assert_close(grad, tangent)


def test_cross_entropy_plus_quadratic_is_equation_8(projections, keys, bank) -> None:
    """The released code: cross entropy with the lifted positive, and the mean of the lift."""
    q, tau, weight = projections[0], 0.3, 2.0
    mean, variance, _ = statistics(q, keys, bank, tau)
    lifted = mean + weight / 2 * variance
    logits = torch.cat([lifted[:, None], normalize(q, dim=-1) @ bank.T / tau], 1)
    code = cross_entropy(logits, torch.zeros(7, dtype=torch.int64)) + (weight / 2 * variance).mean()
    torch.testing.assert_close(JCL(tau, weight)(q, keys=keys, bank=bank), code)


def test_order_and_copies_of_keys_do_not_matter(projections, keys, bank) -> None:
    q, loss = projections[0], JCL(0.2)
    value = loss(q, keys=keys, bank=bank)
    torch.testing.assert_close(loss(q, keys=keys.flip(0), bank=bank), value)
    torch.testing.assert_close(loss(q, keys=torch.cat([keys, keys]), bank=bank), value)


def test_weight_may_change_during_training(projections, keys, bank) -> None:
    """The ramp of the released script: the same module and the same tensor, a new lambda."""
    loss = JCL(0.2, 4.0)
    present = on_device(loss, "covariance_weight")
    loss.covariance_weight = 0.5
    assert present == 0.5
    assert loss.covariance_weight == 0.5
    torch.testing.assert_close(
        loss(projections[0], keys=keys, bank=bank), JCL(0.2, 0.5)(projections[0], keys=keys, bank=bank)
    )
    with pytest.raises(ValueError, match="covariance_weight is -1"):
        loss.covariance_weight = -1.0


def test_without_keys_only_the_first_view_gets_gradient(three_views) -> None:
    z = three_views.requires_grad_()
    grad = torch.autograd.grad(JCL(0.2)(z), z)[0]
    assert grad[0].abs().max() > 0
    assert grad[1:].abs().max() == 0
