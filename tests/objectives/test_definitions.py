"""Each objective against its paper's definition, written as loops over anchors in float64, in value and gradient."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from kontrast.objectives import OBJECTIVES, objective


def mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).mean()


def lse(values: list[Tensor]) -> Tensor:
    return torch.logsumexp(torch.stack(values), 0)


def anchors(z: Tensor):
    """(view, image) of every anchor, its positives and its negatives as lists of rows."""
    V, B, _ = z.shape
    for v in range(V):
        for i in range(B):
            positives = [z[w, i] for w in range(V) if w != v]
            negatives = [z[w, j] for w in range(V) for j in range(B) if j != i]
            yield z[v, i], positives, negatives


def nt_xent(z: Tensor, tau: float) -> Tensor:
    z = normalize(z, dim=-1)
    return mean([-mean([a @ p / tau for p in ps]) + lse([a @ n / tau for n in ps + ns]) for a, ps, ns in anchors(z)])


def dcl(z: Tensor, tau: float) -> Tensor:
    z = normalize(z, dim=-1)
    return mean([-mean([a @ p / tau for p in ps]) + lse([a @ n / tau for n in ns]) for a, ps, ns in anchors(z)])


def dclw(z: Tensor, tau: float, sigma: float) -> Tensor:
    z = normalize(z, dim=-1)
    s = (z[0] * z[1]).sum(-1)
    w = 2 - len(s) * torch.softmax(s.detach() / sigma, 0)
    repulsion = mean([lse([a @ n / tau for n in ns]) for a, _, ns in anchors(z)])
    return -(w * s).mean() / tau + repulsion


def decoupled(z: Tensor, tau: float, weight: float) -> Tensor:
    z = normalize(z, dim=-1)
    return mean([-mean([a @ p for p in ps]) + weight * lse([a @ n / tau for n in ps + ns]) for a, ps, ns in anchors(z)])


def info_nce(z: Tensor, tau: float) -> Tensor:
    z = normalize(z, dim=-1)
    V, B, _ = z.shape
    return mean(
        [cross_entropy(z[a] @ z[b].T / tau, torch.arange(B)) for a in range(V) for b in range(V) if a < b],
    )


def multi_view(z: Tensor, tau: float) -> Tensor:
    z = normalize(z, dim=-1)
    V, B, _ = z.shape
    label = torch.arange(B)
    links = [(a, b) for a in range(V) for b in range(V) if a < b]
    return mean(
        [cross_entropy(z[a] @ z[b].T / tau, label) + cross_entropy(z[b] @ z[a].T / tau, label) for a, b in links]
    )


def align_uniform(z: Tensor, alpha: float, t: float) -> Tensor:
    z = normalize(z, dim=-1)
    align = mean([(a - p).norm() ** alpha for a, ps, _ in anchors(z) for p in ps])
    uniform = [torch.pdist(view).square().mul(-t).exp().mean().log() for view in z]
    return align + mean(uniform)


def hard_negative(z: Tensor, tau: float, beta: float, tau_plus: float) -> Tensor:
    z = normalize(z, dim=-1)
    losses = []
    for a, ps, ns in anchors(z):
        s = torch.stack([a @ n for n in ns]) / tau
        n = len(s)
        importance = (beta * s).exp()
        R = (importance * s.exp()).sum() / importance.mean()
        for p in ps:
            pos = (a @ p / tau).exp()
            N = ((R - tau_plus * n * pos) / (1 - tau_plus)).clamp(min=n * math.exp(-1 / tau))
            losses.append(-(pos / (pos + N)).log())
    return mean(losses)


def cacr(z: Tensor, t_plus: float, t_minus: float, same_view: bool, rbf: bool, signs: tuple[int, int]) -> Tensor:
    z = normalize(z, dim=-1)
    V, B, _ = z.shape
    attraction = []
    for a, ps, _ in anchors(z):
        c = torch.stack([(a - p).square().sum() for p in ps])
        attraction.append((torch.softmax(signs[0] * t_plus * c, 0) * c).sum())
    groups = []
    across = [(x, y) for x in range(V) for y in range(x + 1, V)]
    for x, y in [(v, v) for v in range(V)] if same_view else across:
        group = []
        for i in range(B):
            c = torch.stack([(z[x, i] - z[y, j]).square().sum() for j in range(B) if j != i])
            w = torch.softmax(-signs[1] * t_minus * c, 0)
            group.append((w * (-2 * c).exp()).sum() if rbf else -(w * c).sum())
        groups.append(mean(group).log() if rbf else mean(group))
    return mean(attraction) + mean(groups)


def jcl(q: Tensor, keys: Tensor, negatives: Callable[[int], Tensor], tau: float, weight: float) -> Tensor:
    """Equation 8 with the D x D covariance. q [B,D], keys [M',B,D]."""
    losses = []
    for i in range(len(q)):
        k = keys[:, i]
        mu = k.mean(0)
        sigma = (k - mu).T @ (k - mu) / len(k)
        lifted = q[i] @ mu / tau + weight / (2 * tau**2) * q[i] @ sigma @ q[i]
        losses.append(lse([lifted, *(negatives(i) @ q[i] / tau)]) - q[i] @ mu / tau)
    return mean(losses)


def affinity(z: Tensor, tau: float, gamma: float) -> Tensor:
    A = z[0] @ z[1].T / tau
    return cross_entropy(A, torch.arange(len(A))) + gamma * torch.linalg.norm(A - A.T)


def pooled(z: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    rows = z.reshape(-1, z.shape[-1])
    sigma = torch.cov(rows.T)
    identity = torch.eye(len(sigma), dtype=z.dtype)
    return z - rows.mean(0), (1 - ridge) * sigma + (ridge * sigma.trace() / len(sigma) + 1e-8) * identity


def sim_whitening(z: Tensor, tau: float, gamma: float, ridge: float) -> Tensor:
    centred, sigma = pooled(z, ridge)
    values, vectors = torch.linalg.eigh(sigma)
    root = vectors @ torch.diag(values.rsqrt()) @ vectors.T
    return affinity(normalize(centred @ root, dim=-1), tau, gamma)


def sim_trace(z: Tensor, ridge: float) -> Tensor:
    centred, sigma = pooled(z, ridge)
    return -torch.trace(centred[0] @ torch.linalg.inv(sigma) @ centred[1].T) / z.shape[1]


def barlow(z: Tensor, weight: float) -> Tensor:
    n = [(x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt() for x in z]
    C = n[0].T @ n[1] / z.shape[1]
    on = (torch.diagonal(C) - 1).square().sum()
    return on + weight * (C.square().sum() - torch.diagonal(C).square().sum())


def vicreg(z: Tensor, a: float, b: float, c: float) -> Tensor:
    invariance = torch.nn.functional.mse_loss(z[0], z[1])
    variance = mean([torch.relu(1 - (x.var(0) + 1e-4).sqrt()).mean() for x in z])
    covariance = torch.zeros(())
    for x in z:
        C = torch.cov(x.T)
        covariance = covariance + (C.square().sum() - torch.diagonal(C).square().sum()) / x.shape[1]
    return a * invariance + b * variance + c * covariance


def w_mse(z: Tensor, ridge: float) -> Tensor:
    white = []
    for x in z:
        centred, sigma = pooled(x[None], ridge)
        white.append(normalize(torch.linalg.inv(torch.linalg.cholesky(sigma)) @ centred[0].T, dim=0).T)
    return (white[0] - white[1]).square().sum(-1).mean()


CASES: list[tuple[str, dict, Callable[[Tensor], Tensor], tuple[int, ...]]] = [
    ("nt-xent", {"temperature": 0.3}, lambda z: nt_xent(z, 0.3), (2, 3)),
    ("info-nce", {"temperature": 0.3}, lambda z: info_nce(z, 0.3), (2, 3)),
    ("dcl", {"temperature": 0.3}, lambda z: dcl(z, 0.3), (2, 3)),
    ("dclw", {"temperature": 0.3, "sigma": 0.4}, lambda z: dclw(z, 0.3, 0.4), (2,)),
    (
        "decoupled-nt-xent",
        {"temperature": 0.7, "distribution_weight": 0.4},
        lambda z: decoupled(z, 0.7, 0.4),
        (2, 3),
    ),
    ("multi-view-nce", {"temperature": 0.3}, lambda z: multi_view(z, 0.3), (2, 3)),
    ("align-uniform", {"alpha": 2.0, "t": 1.5}, lambda z: align_uniform(z, 2.0, 1.5), (2, 3)),
    ("align-uniform", {"alpha": 1.0, "t": 3.0}, lambda z: align_uniform(z, 1.0, 3.0), (2,)),
    ("hard-negative", {"temperature": 0.5}, lambda z: hard_negative(z, 0.5, 1.0, 0.1), (2, 3)),
    (
        "hard-negative",
        {"temperature": 0.4, "beta": 0.5, "tau_plus": 0.6},
        lambda z: hard_negative(z, 0.4, 0.5, 0.6),
        (2,),
    ),
    ("cacr", {"t_minus": 0.9}, lambda z: cacr(z, 1.0, 0.9, False, False, (1, 1)), (2, 3)),
    ("cacr", {"negatives": "same-view"}, lambda z: cacr(z, 1.0, 2.0, True, False, (1, 1)), (2, 3)),
    ("cacr", {"cost": "rbf"}, lambda z: cacr(z, 1.0, 2.0, False, True, (1, 1)), (2, 3)),
    (
        "cacr",
        {"cost": "rbf", "repulsion": "reversed", "negatives": "same-view"},
        lambda z: cacr(z, 1.0, 2.0, True, True, (1, -1)),
        (2,),
    ),
    ("cacr", {"attraction": "uniform"}, lambda z: cacr(z, 1.0, 2.0, False, False, (0, 1)), (3,)),
    (
        "cacr",
        {"attraction": "reversed", "repulsion": "reversed"},
        lambda z: cacr(z, 1.0, 2.0, False, False, (-1, -1)),
        (3,),
    ),
    ("sim-affinity", {"temperature": 0.4}, lambda z: affinity(normalize(z, dim=-1), 0.4, 0.01), (2,)),
    ("sim-whitening", {"temperature": 0.4, "ridge": 0.05}, lambda z: sim_whitening(z, 0.4, 0.01, 0.05), (2,)),
    ("sim-trace", {"ridge": 0.02}, lambda z: sim_trace(z, 0.02), (2,)),
    (
        "alignment",
        {},
        lambda z: (normalize(z[0], dim=-1) - normalize(z[1], dim=-1)).square().sum(-1).mean(),
        (2,),
    ),
    ("barlow-twins", {"off_diagonal_weight": 0.02}, lambda z: barlow(z, 0.02), (2,)),
    ("vicreg", {}, lambda z: vicreg(z, 25.0, 25.0, 1.0), (2,)),
    ("w-mse", {"ridge": 0.02}, lambda z: w_mse(z, 0.02), (2,)),
]


@pytest.mark.parametrize(("name", "arguments", "definition", "views"), CASES)
def test_objective_is_its_definition(name, arguments, definition, views, projections, three_views) -> None:
    for z in [{2: projections, 3: three_views}[V] for V in views]:
        z = z.clone().requires_grad_()
        ours, book = objective(name, **arguments)(z), definition(z)
        torch.testing.assert_close(ours, book, rtol=1e-9, atol=1e-9)
        slopes = [torch.autograd.grad(loss, z)[0] for loss in (ours, book)]
        torch.testing.assert_close(*slopes, rtol=1e-7, atol=1e-9)


def test_every_objective_has_a_definition() -> None:
    elsewhere = {"jcl", "swd"}  # with keys below; with its draws in test_generalised.py
    assert {name for name, *_ in CASES} | elsewhere == set(OBJECTIVES)


def test_jcl_is_equation_8(projections, keys, bank) -> None:
    q = projections[0].clone().requires_grad_()
    unit_q, unit_keys = normalize(q, dim=-1), normalize(keys, dim=-1)
    for weight in (0.0, 1.0, 4.0):
        loss = objective("jcl", temperature=0.3, covariance_weight=weight)
        book = jcl(unit_q, unit_keys, lambda i: bank, 0.3, weight)
        torch.testing.assert_close(loss(q, keys=keys, bank=bank), book)
        slopes = [torch.autograd.grad(x, q, retain_graph=True)[0] for x in (loss(q, keys=keys, bank=bank), book)]
        torch.testing.assert_close(*slopes)
        others = [unit_keys.mean(0)[[j for j in range(7) if j != i]] for i in range(7)]
        torch.testing.assert_close(loss(q, keys=keys), jcl(unit_q, unit_keys, lambda i: others[i], 0.3, weight))  # noqa: B023
        torch.testing.assert_close(loss(torch.cat([q[None], keys])), loss(q, keys=keys))


def momentum_cacr(q: Tensor, k: Tensor, bank: Tensor, t_plus: float, t_minus: float) -> Tensor:
    """CACR algorithm 3: queries and keys of the same pictures, negatives from the queue and the same view's queries."""
    losses = []
    for v in range(len(q)):
        for i in range(q.shape[1]):
            c = torch.stack([(q[v, i] - k[w, i]).square().sum() for w in range(len(k)) if w != v])
            weights = torch.softmax(t_plus * c.detach(), 0)
            queue = (q[v, i] - bank).square().sum(-1)
            batch = torch.stack([(q[v, i] - q[v, j]).square().sum() for j in range(q.shape[1]) if j != i])
            apart = torch.cat([queue, batch])
            losses.append((weights * c).sum() - (torch.softmax(-t_minus * apart, 0) * apart).sum())
    return mean(losses)


def test_cacr_with_keys_and_bank_is_algorithm_3(bank) -> None:
    generator = torch.Generator().manual_seed(5)
    z = torch.randn(3, 6, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    k = torch.randn(3, 6, 5, generator=generator, dtype=torch.float64)
    ours = objective("cacr", t_plus=1.0, t_minus=2.0)(z, keys=k, bank=bank)
    book = momentum_cacr(normalize(z, dim=-1), normalize(k, dim=-1), bank, 1.0, 2.0)
    torch.testing.assert_close(ours, book)
    torch.testing.assert_close(torch.autograd.grad(ours, z)[0], torch.autograd.grad(book, z)[0])


@pytest.mark.parametrize("name", ["info-nce", "nt-xent", "dcl", "jcl"])
def test_moco(name, projections, bank) -> None:
    """One query, one key, a bank: positive first, then the queue; DCL leaves the positive out of the sum."""
    q, k = normalize(projections, dim=-1)
    logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ bank.T], dim=1) / 0.3
    book = cross_entropy(logits, torch.zeros(7, dtype=torch.int64))
    if name == "dcl":
        book = (torch.logsumexp(logits[:, 1:], 1) - logits[:, 0]).mean()
    loss = objective(name, temperature=0.3)(projections[0], keys=projections[1], bank=bank)
    torch.testing.assert_close(loss, book)


def test_info_nce_with_keys_alone_is_moco_v3(projections, keys) -> None:
    """(CE(q1, k2) + CE(q2, k1)) / 2; MoCo v3 itself has 2 tau times their sum."""
    q, k = normalize(projections, dim=-1), normalize(keys[:2], dim=-1)
    book = [cross_entropy(q[v] @ k[1 - v].T / 0.3, torch.arange(7)) for v in (0, 1)]
    torch.testing.assert_close(objective("info-nce", temperature=0.3)(projections, keys=keys[:2]), mean(book))


def test_local_crops_have_all_keys_as_positives(keys) -> None:
    """Four query views, two key views: queries 0 and 1 are the keys' own pictures, 2 and 3 are local crops."""
    z = keys.flip(0)
    q, k = normalize(z, dim=-1), normalize(keys[:2], dim=-1)
    links = [(0, 1), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1)]
    similarity = {(v, w): (q[v] * k[w]).sum(-1) for v, w in links}
    per_view = [torch.stack([similarity[link] for link in links if link[0] == v]).mean(0) for v in range(4)]
    loss = objective("alignment", form="negative-cosine")(z, keys=keys[:2])
    torch.testing.assert_close(loss, -torch.stack(per_view).mean())


def test_vanilla_baseline_is_the_mean_over_keys(projections, keys, bank) -> None:
    """JCL equation 3: an InfoNCE for each key, over the same negatives."""
    q = projections[:1]
    each = [objective("info-nce", temperature=0.2)(q, keys=k, bank=bank) for k in keys]
    torch.testing.assert_close(objective("multi-view-nce", temperature=0.2)(q, keys=keys, bank=bank), mean(each))


def test_supcon_outer_form(three_views) -> None:
    """Khosla et al., equation 2: the mean over positives outside the logarithm, every other row below."""
    ids = torch.tensor([3, 9, 3, 1, 9, 3])
    z = three_views.clone().requires_grad_()
    rows, labels = normalize(z, dim=-1).reshape(-1, 4), ids.repeat(3)
    losses = []
    for i in range(len(rows)):
        others = [j for j in range(len(rows)) if j != i]
        below = torch.logsumexp(rows[others] @ rows[i] / 0.2, 0)
        positives = [j for j in others if labels[j] == labels[i]]
        losses.append(-torch.stack([rows[i] @ rows[p] / 0.2 - below for p in positives]).mean())
    ours = objective("nt-xent", temperature=0.2)(z, ids=ids)
    torch.testing.assert_close(ours, mean(losses))
    torch.testing.assert_close(torch.autograd.grad(ours, z)[0], torch.autograd.grad(mean(losses), z)[0])


@pytest.mark.parametrize("name", ["nt-xent", "dcl", "decoupled-nt-xent"])
def test_distinct_ids_change_nothing(name, three_views) -> None:
    loss = objective(name)
    torch.testing.assert_close(loss(three_views, ids=torch.tensor([5, 2, 8, 0, 7, 3])), loss(three_views))
