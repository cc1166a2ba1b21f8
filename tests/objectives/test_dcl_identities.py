"""DCL, DCLW, NT-Xent: the identities of the DCL paper."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import normalize, softplus

from kontrast.kernels import row_statistics
from kontrast.objectives import DCL, DCLW, InfoNCE, NTXent


def test_nt_xent_is_softplus_of_dcl(projections) -> None:
    """DCL proposition 1: the coupling multiplier is sigmoid(DCL), so NT-Xent integrates to softplus(DCL)."""
    dcl, nt = DCL(0.3).rows(projections), NTXent(0.3).rows(projections)
    torch.testing.assert_close(nt, softplus(dcl))


def test_gradient_of_nt_xent_is_the_multiplier_times_that_of_dcl(projections) -> None:
    z = projections.requires_grad_()
    dcl, nt = DCL(0.3).rows(z), NTXent(0.3).rows(z)
    q = torch.sigmoid(dcl)
    assert bool(((q > 0) & (q < 1)).all())
    for v, i in ((0, 0), (1, 4)):
        of_nt, of_dcl = (torch.autograd.grad(rows[v, i], z, retain_graph=True)[0] for rows in (nt, dcl))
        torch.testing.assert_close(of_nt, q[v, i] * of_dcl)


def test_gradients_of_proposition_1(projections) -> None:
    """On unit rows: -dNT/dz = q/tau (p - sum pi n), -dNT/dp = q/tau z, -dNT/dn = -q/tau pi_n z."""
    tau = 0.4
    z = normalize(projections, dim=-1).requires_grad_()
    row = NTXent(tau, normalize=False).rows(z)[0, 2]
    grad = torch.autograd.grad(row, z)[0]
    q = 1 - torch.exp(-row)
    others = [j for j in range(7) if j != 2]
    negatives = z[:, others].reshape(-1, 5)
    pi = torch.softmax(negatives @ z[0, 2] / tau, 0)
    torch.testing.assert_close(-grad[0, 2], q / tau * (z[1, 2] - pi @ negatives))
    torch.testing.assert_close(-grad[1, 2], q / tau * z[0, 2])
    torch.testing.assert_close(-grad[:, others].reshape(-1, 5), -q / tau * pi[:, None] * z[0, 2])


def test_dcl_is_affine_in_the_positive_similarity(projections) -> None:
    """The pull is 1/tau however easy the positive is; NT-Xent's is q/tau."""
    q = normalize(projections[0], dim=-1)
    bank = normalize(projections[1], dim=-1)
    for mixed in (0.1, 0.9):
        k = (mixed * q + (1 - mixed) * bank.roll(1, 0)).detach()
        s = (q * k).sum(-1).requires_grad_()
        negatives = row_statistics(q, bank, scale=1 / 0.2).lse
        dcl = DCL(0.2, normalize=False).rows(q, keys=k, bank=bank)[0]
        torch.testing.assert_close(dcl, -s / 0.2 + negatives)
        slope = torch.autograd.grad(softplus(-s / 0.2 + negatives).sum(), s)[0]
        torch.testing.assert_close(slope, -torch.sigmoid(dcl) / 0.2)


@pytest.mark.parametrize("copies", [2, 5])
def test_duplicated_negatives_add_log_r(projections, bank, copies) -> None:
    q, k = projections
    once = DCL(0.2).rows(q, keys=k, bank=bank)
    torch.testing.assert_close(DCL(0.2).rows(q, keys=k, bank=bank.repeat(copies, 1)), once + math.log(copies))


def test_multiplier_approaches_one_with_many_negatives(projections, bank) -> None:
    q, k = projections
    shares = [torch.sigmoid(DCL(0.5).rows(q, keys=k, bank=bank.repeat(r, 1))).min() for r in (1, 100, 10000)]
    assert shares[0] < shares[1] < shares[2]
    assert shares[2] > 0.999


def test_reductions(projections) -> None:
    """The paper sums over 2N anchors; SimCLR's TensorFlow code adds the means of the two views."""
    for family in (DCL, NTXent):
        mean = family(0.2)(projections)
        torch.testing.assert_close(family(0.2, reduction="sum")(projections), 14 * mean)
        torch.testing.assert_close(family(0.2, reduction="simclr_tf")(projections), 2 * mean)


def test_dcl_bound_in_its_docstring() -> None:
    """-2/tau + log n: one positive at the anchor and all negatives opposite."""
    q = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    loss = DCL(0.5)(q, keys=q, bank=-q.repeat(3, 1))
    assert loss.item() == pytest.approx(-2 / 0.5 + math.log(6))


def weights(z, sigma: float):
    s = (normalize(z[0], dim=-1) * normalize(z[1], dim=-1)).sum(-1)
    return s, 2 - len(s) * torch.softmax(s / sigma, 0)


def test_dclw_weights_have_mean_one(projections) -> None:
    """From the loss: attraction is -mean(w s)/tau, and mean w is 1."""
    s, w = weights(projections, 0.5)
    torch.testing.assert_close(w.mean(), torch.ones_like(w.mean()))
    torch.testing.assert_close(DCLW(0.1, 0.5).terms(projections).attraction, -(w * s).mean() / 0.1)


def test_dclw_is_dcl_for_equal_similarities_or_large_sigma(projections) -> None:
    equal = torch.stack([projections[0], projections[0]])
    torch.testing.assert_close(DCLW(0.1)(equal), DCL(0.1)(equal))
    torch.testing.assert_close(DCLW(0.1, sigma=1e9)(projections), DCL(0.1)(projections))


def test_dclw_detach_and_clamp(projections) -> None:
    z = projections.requires_grad_()
    values = [DCLW(0.1, detach=detach)(z) for detach in (True, False)]
    torch.testing.assert_close(*values)
    slopes = [torch.autograd.grad(value, z)[0] for value in values]
    assert (slopes[0] - slopes[1]).abs().max() > 1e-3
    s, w = weights(z, 0.1)
    assert w.min() < 0
    clamped = DCLW(0.1, 0.1, clamp=0.0).terms(z).attraction
    torch.testing.assert_close(clamped, -(w.clamp(min=0) * s).mean() / 0.1)


def test_view_swap_and_rotation(projections) -> None:
    rotation = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q
    for loss in (DCL(0.2), DCLW(0.2), NTXent(0.2)):
        torch.testing.assert_close(loss(projections.flip(0)), loss(projections))
        torch.testing.assert_close(loss(projections @ rotation), loss(projections))


def test_limit_of_info_nce_on_the_sphere() -> None:
    """InfoNCE(M) - log M -> -E s+/tau + log(tau sinh(1/tau)) for uniform rows on S^2; the error shrinks with M."""
    tau, errors = 0.5, []
    generator = torch.Generator().manual_seed(0)
    for count in (10, 100, 1000):
        bank = normalize(torch.randn(200, count, 3, generator=generator, dtype=torch.float64), dim=-1).reshape(-1, 3)
        q = normalize(torch.randn(2, 3, generator=generator, dtype=torch.float64), dim=-1)
        values = [InfoNCE(tau)(q, keys=q, bank=part) - math.log(count) for part in bank.split(count)]
        limit = -1 / tau + math.log(tau * math.sinh(1 / tau))
        errors.append(abs(torch.stack(values).mean().item() - limit))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.02
