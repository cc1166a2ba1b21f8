"""CACR: the identities of the CACR paper. c = 2 - 2 s between unit rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import normalize

from kontrast.objectives import CACR, Alignment, AlignUniform
from kontrast.objectives.conditional import conditional_mean
from kontrast.objectives.metrics import conditional_entropy


def costs(z):
    """Return the costs of same-view negatives of one view: [B, B-1]."""
    x = normalize(z, dim=-1)
    B = len(x)
    return torch.stack([(x[i] - x[[j for j in range(B) if j != i]]).square().sum(-1) for i in range(B)])


def test_zero_t_is_uniform_attraction_and_repulsion(three_views) -> None:
    """UAUR, equation 11."""
    uaur = CACR(attraction="uniform", repulsion="uniform")(three_views)
    torch.testing.assert_close(CACR(0.0, 0.0)(three_views), uaur)
    x = normalize(three_views, dim=-1)
    pull = torch.stack([(x[a] - x[b]).square().sum(-1).mean() for a in range(3) for b in range(3) if a != b]).mean()
    others = ~torch.eye(6, dtype=torch.bool)
    apart = [torch.cdist(x[a], x[b]).square()[others].mean() for a, b in ((0, 1), (0, 2), (1, 2))]
    torch.testing.assert_close(uaur, pull - torch.stack(apart).mean())


def test_t_plus_has_no_effect_on_one_positive(projections) -> None:
    """K = 1: attraction is the mean squared distance, the alignment loss."""
    pulls = [CACR(t_plus=t).terms(projections).attraction for t in (0.0, 1.0, 50.0)]
    for pull in pulls:
        torch.testing.assert_close(pull, Alignment()(projections))
        torch.testing.assert_close(pull, AlignUniform().terms(projections).attraction)


def test_attraction_grows_from_mean_to_max(three_views) -> None:
    x = normalize(three_views, dim=-1)
    c = torch.stack([torch.stack([(x[v] - x[w]).square().sum(-1) for w in range(3) if w != v]) for v in range(3)])
    pulls = torch.stack([CACR(t_plus=t).terms(three_views).attraction for t in (0.0, 0.5, 1.0, 4.0, 1e4)])
    assert bool((pulls.diff() >= 0).all())
    torch.testing.assert_close(pulls[0], c.mean())
    torch.testing.assert_close(pulls[-1], c.amax(1).mean())


def test_repulsion_goes_from_mean_to_the_nearest_negative(projections) -> None:
    """At large t-: the hard triplet with margin 0."""
    one = projections[0].expand(2, -1, -1)
    c = costs(projections[0])
    pushes = torch.stack([-CACR(1.0, t).terms(one).repulsion for t in (0.0, 0.5, 2.0, 8.0, 1e4)])
    assert bool((pushes.diff() <= 0).all())
    torch.testing.assert_close(pushes[0], c.mean())
    torch.testing.assert_close(pushes[-1], c.amin(1).mean())


def test_reversed_weights_swap_the_extremes(three_views) -> None:
    one = three_views[0].expand(2, -1, -1)
    reversed_push = CACR(1.0, 1e4, repulsion="reversed").terms(one).repulsion
    torch.testing.assert_close(-reversed_push, costs(three_views[0]).amax(1).mean())
    x = normalize(three_views, dim=-1)
    c = torch.stack([torch.stack([(x[v] - x[w]).square().sum(-1) for w in range(3) if w != v]) for v in range(3)])
    reversed_pull = CACR(1e4, attraction="reversed").terms(three_views).attraction
    torch.testing.assert_close(reversed_pull, c.amin(1).mean())


@pytest.mark.parametrize("t", [0.3, 2.0])
def test_repulsion_from_partition_function_and_entropy(projections, t) -> None:
    """CR = (log Z - H)/t-, Z = sum_j exp(-t- c_j)."""
    one = projections[0].expand(2, -1, -1)
    c = costs(projections[0])
    w = torch.softmax(-t * c, 1)
    H = -(w * w.log()).sum(1).mean()
    torch.testing.assert_close(conditional_entropy(projections[0], t_minus=t), H)
    torch.testing.assert_close(CACR(1.0, t).terms(one).repulsion, (torch.logsumexp(-t * c, 1).mean() - H) / t)


def test_entropy_is_largest_for_equal_distances(projections) -> None:
    simplex = torch.eye(7, dtype=torch.float64)
    top = torch.tensor(math.log(6), dtype=torch.float64)
    torch.testing.assert_close(conditional_entropy(simplex, t_minus=3.0), top)
    torch.testing.assert_close(conditional_entropy(projections[0], t_minus=0.0), top)
    assert conditional_entropy(projections[0], t_minus=3.0) < top


def test_lemma_4_3_is_an_equality_at_half_the_inverse_temperature(projections) -> None:
    """mean log-mean exp(s/tau) + mean(log(M-1) - H) = mean sum w s/tau at t- = 1/(2 tau); other t- give less."""
    tau = 0.4
    s = (2 - costs(projections[0])) / 2
    uniform = (torch.logsumexp(s / tau, 1) - math.log(6)).mean()

    def right_less_left(t: float):
        weighted = (torch.softmax(2 * t * s, 1) * s / tau).sum(1).mean()
        return uniform + math.log(6) - conditional_entropy(projections[0], t_minus=t) - weighted

    assert abs(right_less_left(1 / (2 * tau)).item()) < 1e-12
    assert right_less_left(0.5) > 1e-4
    assert right_less_left(3.0) > 1e-4


def test_attraction_vanishes_only_at_equal_positives(three_views) -> None:
    assert abs(CACR().terms(three_views[:1].expand(3, -1, -1)).attraction.item()) < 1e-12
    assert CACR().terms(three_views).attraction > 0.1


@pytest.mark.parametrize("t", [0.7, 2.0])
def test_gradient_of_the_weighted_costs(t) -> None:
    """d(sum w+ c)/dc_k = w_k (1 + t (c_k - mean)) attached, w_k detached; for w- the sign of t is reversed."""
    c = torch.rand(3, 5, dtype=torch.float64, requires_grad=True)
    for sign in (1, -1):
        for detach in (False, True):
            mean = conditional_mean(c, sign * t, detach)
            grad = torch.autograd.grad(mean.sum(), c)[0]
            w = torch.softmax(sign * t * c, 1)
            torch.testing.assert_close(grad, w if detach else w * (1 + sign * t * (c - mean[:, None])))


@pytest.mark.parametrize("cost", ["euclidean", "rbf"])
def test_detached_weights_of_the_repulsion(projections, cost) -> None:
    z = projections.requires_grad_()
    value = CACR(1.0, 2.0, cost=cost, detach_negative_weights=True).terms(z).repulsion
    attached = CACR(1.0, 2.0, cost=cost).terms(z).repulsion
    torch.testing.assert_close(value, attached)
    x = normalize(z, dim=-1)
    c = (x[0][:, None] - x[1][None]).square().sum(-1)
    others = ~torch.eye(7, dtype=torch.bool)
    w = torch.softmax((-2.0 * c).masked_fill(~others, -torch.inf), 1).detach()
    expected = -(w * c).sum(1).mean() if cost == "euclidean" else (w * torch.exp(-2 * c)).sum(1).mean().log()
    torch.testing.assert_close(value, expected)
    slope = torch.autograd.grad(value, z)[0]
    torch.testing.assert_close(slope, torch.autograd.grad(expected, z)[0])
    assert (torch.autograd.grad(attached, z)[0] - slope).abs().max() > 1e-3


def test_weights_of_the_bank_alone_can_be_detached(projections, keys, bank) -> None:
    """The momentum code: the queue's costs are detached in the negative softmax, those of the batch are not."""
    z, t = projections.requires_grad_(), 2.0
    x = normalize(z, dim=-1)
    others = ~torch.eye(7, dtype=torch.bool)
    rows = []
    for v in range(2):
        far, near = (x[v][:, None] - bank).square().sum(-1), (x[v][:, None] - x[v]).square().sum(-1)
        near = near.masked_fill(~others, torch.inf)
        w = torch.softmax(-t * torch.cat([far.detach(), near], 1), 1)
        rows.append(-(w * torch.cat([far, near.masked_fill(~others, 0.0)], 1)).sum(1))
    value = CACR(t_minus=t, detach_negative_weights="bank").terms(z, keys=keys[:2], bank=bank).repulsion
    expected = torch.stack(rows).mean()
    torch.testing.assert_close(value, expected)
    slope = torch.autograd.grad(value, z)[0]
    torch.testing.assert_close(slope, torch.autograd.grad(expected, z)[0])
    for detach in (False, True):
        other = CACR(t_minus=t, detach_negative_weights=detach).terms(z, keys=keys[:2], bank=bank).repulsion
        assert (torch.autograd.grad(other, z)[0] - slope).abs().max() > 1e-3
    with pytest.raises(ValueError, match="give keys or a bank"):
        CACR(detach_negative_weights="bank")(z)
    with pytest.raises(ValueError, match="cost euclidean"):
        CACR(detach_negative_weights="bank", cost="rbf")(z, keys=keys[:2], bank=bank)
    with pytest.raises(ValueError, match="'all': give true or false or 'bank'"):
        CACR(detach_negative_weights="all")


def test_positive_weights_are_constant_with_keys_and_not_without(three_views) -> None:
    z = three_views.requires_grad_()
    keys = three_views.detach().flip(1)
    for given, default in ((keys, True), (None, False)):
        slopes = {}
        for detach in (None, True, False):
            pull = CACR(5.0, detach_positive_weights=detach).terms(z, keys=given).attraction
            slopes[detach] = torch.autograd.grad(pull, z)[0]
        torch.testing.assert_close(slopes[None], slopes[default])
        assert (slopes[True] - slopes[False]).abs().max() > 1e-3


def test_uniform_rbf_repulsion_is_the_uniformity_loss(projections) -> None:
    ours = CACR(cost="rbf", repulsion="uniform", negatives="same-view", rbf_t=2.0).terms(projections).repulsion
    torch.testing.assert_close(ours, AlignUniform(t=2.0).terms(projections).repulsion)
