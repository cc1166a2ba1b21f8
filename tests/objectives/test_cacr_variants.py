"""CACR's triplet view and its released form on MoCo v3, as loops in float64, and MoCo v3's own loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from kontrast.errors import UsageError
from kontrast.objectives import CACR, InfoNCE

TAU = 0.4
RELEASED = {"variant": "mocov3", "t_plus": 1 / TAU, "t_minus": 1 / (2 * TAU), "detach_negative_weights": True}


def moco_v3(z: Tensor, keys: Tensor, tau: float) -> Tensor:
    """2 tau CE(q1, k2) + 2 tau CE(q2, k1)."""
    q, k = normalize(z, dim=-1), normalize(keys, dim=-1)
    return sum(2 * tau * cross_entropy(q[v] @ k[1 - v].T / tau, torch.arange(z.shape[1])) for v in (0, 1))


def released(z: Tensor, keys: Tensor, tau: float, cost: str) -> Tensor:
    """For each key view, the losses of the other views' queries, weighted by how far they are from the key."""
    q, k = normalize(z, dim=-1), normalize(keys, dim=-1)
    B, by_key = z.shape[1], []
    for w in range(len(k)):
        total = torch.zeros((), dtype=z.dtype)
        for i in range(B):
            queries = [q[v, i] for v in range(len(q)) if v != w]
            p = torch.softmax(torch.stack([(x - k[w, i]).square().sum() / tau for x in queries]), 0).detach()
            for weight, x in zip(p, queries):
                others = torch.stack([x @ k[w, j] for j in range(B) if j != i])
                if cost == "rbf":
                    logits = torch.cat([(x @ k[w, i])[None], others]) / tau
                    row = 2 * tau * (torch.logsumexp(logits, 0) - logits[0])
                else:
                    share = torch.softmax(-(1 - others) / tau, 0).detach()
                    row = (1 - x @ k[w, i]) - (share * (1 - others)).sum()
                total = total + weight * row
        by_key.append(total / B if cost == "rbf" else total)  # the euclidean form is summed over images
    return torch.stack(by_key).mean()


def equal_with_gradients(ours: Tensor, expected: Tensor, z: Tensor) -> None:
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(*[torch.autograd.grad(x, z, retain_graph=True)[0] for x in (ours, expected)])


def test_info_nce_with_its_scale_is_moco_v3(projections, keys) -> None:
    z = projections.clone().requires_grad_()
    loss = InfoNCE(TAU, loss_scale="2tau", reduction="simclr_tf")
    equal_with_gradients(loss(z, keys=keys[:2]), moco_v3(z, keys[:2], TAU), z)
    mean = InfoNCE(TAU)(z, keys=keys[:2])
    torch.testing.assert_close(InfoNCE(TAU, loss_scale=3.0)(z, keys=keys[:2]), 3 * mean)
    terms = loss.terms(z, keys=keys[:2])
    torch.testing.assert_close(terms.total, 4 * TAU * mean)
    with pytest.raises(UsageError, match="loss_scale is '2 tau'"):
        InfoNCE(loss_scale="2 tau")


def test_a_learned_temperature_scales_the_loss_too(projections, keys) -> None:
    loss = InfoNCE("learned", loss_scale="2tau", initial_temperature=TAU).double()
    theta, step = loss.temperature.log_scale, 1e-6
    slope = torch.autograd.grad(loss(projections, keys=keys[:2]), theta)[0]
    values = []
    for change in (step, -2 * step):
        with torch.no_grad():
            theta += change
        values.append(loss(projections, keys=keys[:2]).detach())
    torch.testing.assert_close(slope, (values[0] - values[1]) / (2 * step), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("views", [2, 3, 4])
@pytest.mark.parametrize("cost", ["rbf", "euclidean"])
def test_the_released_form_on_moco_v3(cost, views, keys) -> None:
    """Two keys; the queries are those of the same crops and, from the third view on, of local crops."""
    z, k = keys.flip(1)[:views].clone().requires_grad_(), keys[:2]
    factor = 1.0 if cost == "rbf" else 7 / 2
    equal_with_gradients(factor * CACR(**RELEASED, cost=cost)(z, keys=k), released(z, k, TAU, cost), z)


@pytest.mark.parametrize("t_plus", [0.0, 1.0, 30.0])
def test_with_two_views_the_released_form_is_half_of_moco_v3(projections, keys, t_plus) -> None:
    """Then each key has one query, whose weight is 1: the released commands without local crops train MoCo v3."""
    z = projections.clone().requires_grad_()
    ours = CACR(**RELEASED | {"t_plus": t_plus}, cost="rbf")(z, keys=keys[:2])
    equal_with_gradients(ours, moco_v3(z, keys[:2], TAU) / 2, z)
    with_local_crops = CACR(**RELEASED, cost="rbf")(keys, keys=keys[:2])
    assert (InfoNCE(TAU, loss_scale="2tau")(keys, keys=keys[:2]) - with_local_crops).abs() > 1e-3


def test_with_two_views_the_euclidean_form_is_the_papers_with_constant_weights(projections, keys) -> None:
    """c+ - sum_j w- c_j at t- = 1/(2 tau), against the keys of other images alone."""
    z = projections.clone().requires_grad_()
    q, k = normalize(z, dim=-1), normalize(keys[:2], dim=-1)
    rows = []
    for v in (0, 1):
        c = (q[v][:, None] - k[1 - v]).square().sum(-1)
        w = torch.softmax((-c / (2 * TAU)).masked_fill(torch.eye(7, dtype=torch.bool), -torch.inf), 1).detach()
        rows.append(c.diagonal() - (w * c).sum(1))
    equal_with_gradients(CACR(**RELEASED)(z, keys=keys[:2]), torch.stack(rows).mean(), z)


def test_far_queries_of_a_key_count_more_and_their_weights_are_constant(keys) -> None:
    z = keys.flip(1)
    far = CACR(**RELEASED | {"t_plus": 1e4}, cost="rbf").terms(z, keys=keys[:2]).attraction
    even = CACR(**RELEASED, attraction="uniform", cost="rbf").terms(z, keys=keys[:2]).attraction
    s = torch.einsum("vid,wid->vwi", normalize(z, dim=-1), normalize(keys[:2], dim=-1))
    of_key = [s[[v for v in range(4) if v != w], w] for w in (0, 1)]
    torch.testing.assert_close(far, torch.stack([-2 * x.amin(0).mean() for x in of_key]).mean())
    torch.testing.assert_close(even, torch.stack([-2 * x.mean() for x in of_key]).mean())


def triplet(z: Tensor, t_plus: float, t_minus: float, margin: float, same_view: bool) -> Tensor:
    """[E_{pi+} c(x, x+) - E_{pi-} c(x, x-) + m]_+ of every anchor; the mean over the other views of cross-view ones."""
    x = normalize(z, dim=-1)
    V, B, _ = z.shape
    losses = []
    for v in range(V):
        for i in range(B):
            positives = torch.stack([(x[v, i] - x[w, i]).square().sum() for w in range(V) if w != v])
            pull = (torch.softmax(t_plus * positives, 0) * positives).sum()
            pushes = []
            for w in [v] if same_view else [w for w in range(V) if w != v]:
                c = torch.stack([(x[v, i] - x[w, j]).square().sum() for j in range(B) if j != i])
                pushes.append((torch.softmax(-t_minus * c, 0) * c).sum())
            losses.append(torch.relu(pull - torch.stack(pushes).mean() + margin))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("negatives", ["same-view", "cross-view"])
@pytest.mark.parametrize("margin", [0.0, 0.3, 1.0])
def test_the_triplet_view(three_views, negatives, margin) -> None:
    """Some anchors are within the margin, and some beyond it have neither loss nor gradient."""
    near = (three_views[:1] + 0.6 * three_views).requires_grad_()
    loss = CACR(1.0, 2.0, negatives, margin=margin)
    expected = triplet(near, 1.0, 2.0, margin, negatives == "same-view")
    equal_with_gradients(loss(near), expected, near)
    rows = loss.rows(near)
    assert rows.shape == (3, 6) and bool((rows >= 0).all())
    assert margin == 1.0 or bool((rows == 0).any() and (rows > 0).any())


def test_sharp_weights_are_the_hardest_triplet_and_flat_ones_the_plain(three_views) -> None:
    """[max c+ - min c- + m]_+ for large t, and a triplet loss with mean costs for t = 0."""
    x, m = normalize(three_views, dim=-1), 2.0
    c = torch.stack([torch.stack([(x[v] - x[w]).square().sum(-1) for w in range(3) if w != v]) for v in range(3)])
    apart = torch.stack([torch.cdist(view, view).square() + 1e9 * torch.eye(6) for view in x])
    hard = torch.relu(c.amax(1) - apart.amin(2) + m).mean()
    torch.testing.assert_close(CACR(1e4, 1e4, "same-view", margin=m)(three_views), hard)
    plain = torch.relu(c.mean(1) - torch.where(apart < 1e8, apart, 0.0).sum(2) / 5 + m).mean()
    torch.testing.assert_close(CACR(0.0, 0.0, "same-view", margin=m)(three_views), plain)
    uniform = CACR(attraction="uniform", repulsion="uniform", negatives="same-view", margin=m)
    torch.testing.assert_close(uniform(three_views), plain)


def test_a_large_margin_is_cacr_plus_the_margin(projections, keys, bank) -> None:
    """Costs are at most 4, so that no anchor is beyond a margin of 4."""
    for given in ({}, {"keys": keys[:2]}, {"keys": keys[:2], "bank": bank}):
        plain = CACR(symmetric=True).terms(projections, **given)
        hinged = CACR(margin=4.0).terms(projections, **given)
        torch.testing.assert_close(hinged.attraction, plain.attraction)
        torch.testing.assert_close(hinged.repulsion, plain.repulsion + 4.0)


def test_what_is_refused() -> None:
    for further in ({"cost": "rbf"}, {"variant": "mocov3"}):
        with pytest.raises(UsageError, match=r"margin is 0\.5: only cost 'euclidean' of variant 'paper'"):
            CACR(margin=0.5, **further)
    for further in ({"repulsion": "uniform"}, {"repulsion": "reversed"}, {"t_minus": 0.0}):
        with pytest.raises(UsageError, match="variant is 'mocov3': with cost 'rbf' it needs contrastive repulsion"):
            CACR(variant="mocov3", cost="rbf", **further)
