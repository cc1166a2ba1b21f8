"""The papers' definitions of the objectives, written as loops over anchors in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from support.objective_inputs import extra_inputs


def mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).mean()


def lse(values: list[Tensor]) -> Tensor:
    return torch.logsumexp(torch.stack(values), 0)


def anchors(z: Tensor):
    """Yield every anchor, with its positives and its negatives as lists of rows."""
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


def mean_over_pairs(z: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """The loss of each pair of views {Z, Z'}, on average; each has a mean and covariance of its own."""
    return mean([loss(torch.stack([z[v], z[w]])) for v in range(len(z)) for w in range(v + 1, len(z))])


def sim_whitening(z: Tensor, tau: float, gamma: float, ridge: float) -> Tensor:
    """Equations 2 and 6, over the rows of the two views of z [2,N,D]."""
    centered, sigma = pooled(z, ridge)
    values, vectors = torch.linalg.eigh(sigma)
    root = vectors @ torch.diag(values.rsqrt()) @ vectors.T
    return affinity(normalize(centered @ root, dim=-1), tau, gamma)


def sim_trace(z: Tensor, ridge: float) -> Tensor:
    """Equation 3, over the rows of the two views of z [2,N,D]."""
    centered, sigma = pooled(z, ridge)
    return -torch.trace(centered[0] @ torch.linalg.inv(sigma) @ centered[1].T) / z.shape[1]


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
        centered, sigma = pooled(x[None], ridge)
        white.append(normalize(torch.linalg.inv(torch.linalg.cholesky(sigma)) @ centered[0].T, dim=0).T)
    return (white[0] - white[1]).square().sum(-1).mean()


def each_pair(x: Tensor, y: Tensor, labels: list[int] | None = None):
    """Yield each image's matching similarity, and those with the texts of the images that have another label."""
    labels = list(range(len(x))) if labels is None else labels
    for i in range(len(x)):
        yield x[i] @ y[i], [x[i] @ y[j] for j in range(len(y)) if labels[i] != labels[j]]


def clip(z: Tensor, tau: float, labels: list[int] | None = None) -> Tensor:
    x, y = normalize(z, dim=-1)
    pairs = [*each_pair(x, y, labels), *each_pair(y, x, labels)]
    return mean([-s / tau + lse([n / tau for n in [s, *others]]) for s, others in pairs])


def info_loob(z: Tensor, tau: float, labels: list[int] | None = None) -> Tensor:
    x, y = normalize(z, dim=-1)
    pairs = [*each_pair(x, y, labels), *each_pair(y, x, labels)]
    return mean([-s / tau + lse([n / tau for n in others]) for s, others in pairs])


def symmetric_cacr(z: Tensor, t_minus: float, labels: list[int] | None = None) -> Tensor:
    x, y = normalize(z, dim=-1)
    losses = []
    for (s, row), (_, column) in zip(each_pair(x, y, labels), each_pair(y, x, labels)):
        means = [(torch.softmax(2 * t_minus * torch.stack(n), 0) * torch.stack(n)).sum() for n in (row, column)]
        losses.append(-2 * s + means[0] + means[1])
    return mean(losses)


def siglip(z: Tensor, t: float | Tensor, b: float | Tensor, labels: list[int] | None = None) -> Tensor:
    x, y = normalize(z, dim=-1)
    total = [torch.log1p(torch.exp(-(t * s + b))) for s, _ in each_pair(x, y)]
    total += [torch.log1p(torch.exp(t * n + b)) for _, others in each_pair(x, y, labels) for n in others]
    return torch.stack(total).sum() / len(x)


def siglip_of_views(z: Tensor, t: float, b: float) -> Tensor:
    return mean_over_pairs(z, lambda pair: siglip(pair, t, b))


def sinkhorn(scores: Tensor, epsilon: float, iterations: int) -> Tensor:
    """SwAV's algorithm: each prototype gets the same share of the samples, then each sample of the prototypes."""
    N, K = scores.shape
    Q = torch.exp(scores.detach().double() / epsilon)
    Q = Q / Q.sum()
    for _ in range(iterations):
        for k in range(K):
            Q[:, k] /= Q[:, k].sum() * K
        for i in range(N):
            Q[i] /= Q[i].sum() * N
    return Q * N


def prediction(z: Tensor, C: Tensor, tau: float, targets: list[Tensor]) -> Tensor:
    """The mean cross-entropy of the targets [B,K] of each assigning view and the predictions of all other views."""
    losses = []
    for crop, target in enumerate(targets):
        for v in range(len(z)):
            if v == crop:
                continue
            for i in range(z.shape[1]):
                p = torch.exp(z[v, i] @ C.T / tau) / torch.exp(z[v, i] @ C.T / tau).sum()
                losses.append(-(target[i] * p.log()).sum())
    return mean(losses)


def swav(
    z: Tensor, C: Tensor, tau: float, epsilon: float, iterations: int = 3, keys: Tensor | None = None,
    key_C: Tensor | None = None, bank: Tensor | None = None, views: int | None = None,
) -> Tensor:  # fmt: skip
    """Each of the first views, or keys, is assigned together with its queue, whose own assignments are dropped."""
    z = normalize(z, dim=-1)
    k = (z if keys is None else normalize(keys, dim=-1))[:views]
    key_C = C if key_C is None else key_C
    queues = [[] if bank is None else list(bank[w]) for w in range(len(k))]
    rows = [torch.stack([*k[w], *queues[w]]) for w in range(len(k))]
    targets = [sinkhorn(x @ key_C.T, epsilon, iterations)[: z.shape[1]] for x in rows]
    return prediction(z, C, tau, targets)


def dino(
    z: Tensor, C: Tensor, tau: float, tau_t: float, center: Tensor | float = 0.0, keys: Tensor | None = None,
    key_C: Tensor | None = None, views: int | None = None,
) -> Tensor:  # fmt: skip
    """Each of the first views, or keys, has the softmax of its centered similarities to the teacher's prototypes."""
    z = normalize(z, dim=-1)
    k = (z if keys is None else normalize(keys, dim=-1))[:views].detach()
    key_C = (C if key_C is None else key_C).detach()
    targets = []
    for view in k:
        logits = [(t @ key_C.T - center) / tau_t for t in view]
        targets.append(torch.stack([torch.softmax(row, 0) for row in logits]))
    return prediction(z, C, tau, targets)


def prototypes(name: str, z: Tensor) -> Tensor:
    """The prototypes that registry-wide tests give to an objective."""
    return extra_inputs(name, z.detach())["prototypes"]


def koleo(z: Tensor) -> Tensor:
    """Find each row's nearest neighbor by its distance, which a unit row's largest similarity also gives."""
    losses = []
    for view in normalize(z, dim=-1):
        for i, row in enumerate(view):
            apart = [torch.sqrt((row - other).square().sum()) for j, other in enumerate(view) if j != i]
            losses.append(-torch.log(min(apart) + 1e-8))
    return mean(losses)


def zero_cl_half(z: Tensor, ridge: float) -> Tensor:
    """FCL of two views: each column standardized, whitened by the root of the correlations, which is constant."""
    whitened = []
    for view in z:
        columns = [(x - x.mean()) / torch.sqrt((x - x.mean()).square().mean() + 1e-5) for x in view.T]
        correlation = torch.tensor([[(x @ y).item() / len(view) for y in columns] for x in columns], dtype=z.dtype)
        values, vectors = torch.linalg.eigh(correlation)
        root = vectors @ torch.diag((values + ridge).rsqrt()) @ vectors.T
        whitened.append([sum(root[d, e] * columns[e] for e in range(len(columns))) for d in range(len(columns))])
    C = [x @ y / z.shape[1] for x, y in zip(*whitened)]
    return torch.stack([(1 - c) ** 2 for c in C]).sum()


def zero_cl(z: Tensor, ridge: float, halves: str) -> Tensor:
    total = torch.zeros((), dtype=z.dtype)
    pairs = [(v, w) for v in range(len(z)) for w in range(v + 1, len(z))]
    for v, w in pairs:
        two = torch.stack([z[v], z[w]])
        total = total + sum(zero_cl_half(two if half == "features" else two.mT, ridge) for half in halves.split())
    return total / len(pairs)


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
    (
        "sim-whitening",
        {"temperature": 0.4, "ridge": 0.05},
        lambda z: mean_over_pairs(z, lambda pair: sim_whitening(pair, 0.4, 0.01, 0.05)),
        (2, 3),
    ),
    ("sim-trace", {"ridge": 0.02}, lambda z: mean_over_pairs(z, lambda pair: sim_trace(pair, 0.02)), (2, 3)),
    (
        "alignment",
        {},
        lambda z: (normalize(z[0], dim=-1) - normalize(z[1], dim=-1)).square().sum(-1).mean(),
        (2,),
    ),
    ("barlow-twins", {"off_diagonal_weight": 0.02}, lambda z: barlow(z, 0.02), (2,)),
    ("vicreg", {}, lambda z: vicreg(z, 25.0, 25.0, 1.0), (2,)),
    ("w-mse", {"ridge": 0.02}, lambda z: w_mse(z, 0.02), (2,)),
    ("info-nce", {"temperature": 0.3, "symmetric": True}, lambda z: clip(z, 0.3), (2,)),
    ("dcl", {"temperature": 0.3, "negatives": "cross-view"}, lambda z: info_loob(z, 0.3), (2,)),
    ("cacr", {"t_minus": 1.5, "symmetric": True}, lambda z: symmetric_cacr(z, 1.5), (2,)),
    (
        "sogclr",
        {"temperature": 0.3, "gamma": 1.0},
        lambda z: 0.3 * (dcl(z, 0.3) - math.log(len(z) * (z.shape[1] - 1))),
        (2, 3),
    ),
    (
        "isogclr",
        {"temperature": 0.3, "gamma": 1.0, "radius": 0.7},
        lambda z: 0.3 * (dcl(z, 0.3) - math.log(len(z) * (z.shape[1] - 1)) + 0.7),
        (2, 3),
    ),
    ("siglip", {"temperature": 0.2, "bias": -1.5}, lambda z: siglip_of_views(z, 5.0, -1.5), (2, 3)),
    ("swav", {"temperature": 0.3}, lambda z: swav(z, prototypes("swav", z), 0.3, 0.05), (2, 3)),
    ("swav", {"epsilon": 0.2, "iterations": 1}, lambda z: swav(z, prototypes("swav", z), 0.1, 0.2, 1), (2,)),
    ("dino", {"teacher_temperature": 0.07}, lambda z: dino(z, prototypes("dino", z), 0.1, 0.07), (2, 3)),
    ("koleo", {}, koleo, (2, 3)),
    ("zero-cl", {}, lambda z: zero_cl(z, 0.01, "features instances"), (2, 3)),
    ("zero-cl", {"mode": "features", "ridge": 0.1}, lambda z: zero_cl(z, 0.1, "features"), (2, 3)),
    ("zero-cl", {"mode": "instances", "ridge": 0.1}, lambda z: zero_cl(z, 0.1, "instances"), (2,)),
]
