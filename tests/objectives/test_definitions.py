"""Each objective equals its paper's definition, written as loops over anchors in float64, in value and gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from kontrast.objectives import OBJECTIVES, objective

from support.objective_definitions import CASES, jcl, mean
from support.objective_inputs import extra_inputs, small_objective


@pytest.mark.parametrize(("name", "arguments", "definition", "views"), CASES)
def test_objective_equals_its_definition(name, arguments, definition, views, projections, three_views) -> None:
    for z in [{2: projections, 3: three_views}[V] for V in views]:
        z = z.clone().requires_grad_()
        ours, expected = small_objective(name, **arguments)(z, **extra_inputs(name, z.detach())), definition(z)
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
        slopes = [torch.autograd.grad(loss, z)[0] for loss in (ours, expected)]
        torch.testing.assert_close(*slopes, rtol=1e-7, atol=1e-9)


def test_every_objective_has_a_definition() -> None:
    # With keys below; with draws, neighbors, a bank and a classifier in their own files.
    elsewhere = {"jcl", "swd", "nnclr", "co2", "lejepa", "cross-entropy"}
    assert {name for name, *_ in CASES} | elsewhere == set(OBJECTIVES)


def test_jcl_is_equation_8(projections, keys, bank) -> None:
    q = projections[0].clone().requires_grad_()
    unit_q, unit_keys = normalize(q, dim=-1), normalize(keys, dim=-1)
    for weight in (0.0, 1.0, 4.0):
        loss = objective("jcl", temperature=0.3, covariance_weight=weight)
        expected = jcl(unit_q, unit_keys, lambda i: bank, 0.3, weight)
        torch.testing.assert_close(loss(q, keys=keys, bank=bank), expected)
        slopes = [torch.autograd.grad(x, q, retain_graph=True)[0] for x in (loss(q, keys=keys, bank=bank), expected)]
        torch.testing.assert_close(*slopes)
        others = [unit_keys.mean(0)[[j for j in range(7) if j != i]] for i in range(7)]
        torch.testing.assert_close(loss(q, keys=keys), jcl(unit_q, unit_keys, lambda i: others[i], 0.3, weight))  # noqa: B023
        torch.testing.assert_close(loss(torch.cat([q[None], keys])), loss(q, keys=keys))


def momentum_cacr(q: Tensor, k: Tensor, bank: Tensor, t_plus: float, t_minus: float) -> Tensor:
    """CACR algorithm 3: queries and keys of the same images, negatives from the queue and queries of the same view."""
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
    expected = momentum_cacr(normalize(z, dim=-1), normalize(k, dim=-1), bank, 1.0, 2.0)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(torch.autograd.grad(ours, z)[0], torch.autograd.grad(expected, z)[0])


@pytest.mark.parametrize("name", ["info-nce", "nt-xent", "dcl", "jcl"])
def test_moco(name, projections, bank) -> None:
    """One query, one key, a bank: positive first, then the queue; DCL leaves the positive out of the sum."""
    q, k = normalize(projections, dim=-1)
    logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ bank.T], dim=1) / 0.3
    expected = cross_entropy(logits, torch.zeros(7, dtype=torch.int64))
    if name == "dcl":
        expected = (torch.logsumexp(logits[:, 1:], 1) - logits[:, 0]).mean()
    loss = objective(name, temperature=0.3)(projections[0], keys=projections[1], bank=bank)
    torch.testing.assert_close(loss, expected)


def test_info_nce_with_keys_alone_is_moco_v3(projections, keys) -> None:
    """(CE(q1, k2) + CE(q2, k1)) / 2; MoCo v3 itself has 2 tau times their sum."""
    q, k = normalize(projections, dim=-1), normalize(keys[:2], dim=-1)
    expected = [cross_entropy(q[v] @ k[1 - v].T / 0.3, torch.arange(7)) for v in (0, 1)]
    torch.testing.assert_close(objective("info-nce", temperature=0.3)(projections, keys=keys[:2]), mean(expected))


def test_local_crops_have_all_keys_as_positives(keys) -> None:
    """Four query views, two key views: queries 0 and 1 show the same crops as the keys, 2 and 3 are local crops."""
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
    """Khosla et al., equation 2: the mean over positives outside the logarithm, every other row in the denominator."""
    labels = torch.tensor([3, 9, 3, 1, 9, 3])
    z = three_views.clone().requires_grad_()
    rows, row_labels = normalize(z, dim=-1).reshape(-1, 4), labels.repeat(3)
    losses = []
    for i in range(len(rows)):
        others = [j for j in range(len(rows)) if j != i]
        below = torch.logsumexp(rows[others] @ rows[i] / 0.2, 0)
        positives = [j for j in others if row_labels[j] == row_labels[i]]
        losses.append(-torch.stack([rows[i] @ rows[p] / 0.2 - below for p in positives]).mean())
    ours = objective("nt-xent", temperature=0.2)(z, labels=labels)
    torch.testing.assert_close(ours, mean(losses))
    torch.testing.assert_close(torch.autograd.grad(ours, z)[0], torch.autograd.grad(mean(losses), z)[0])


@pytest.mark.parametrize("name", ["nt-xent", "dcl", "decoupled-nt-xent"])
def test_distinct_labels_change_nothing(name, three_views) -> None:
    loss = objective(name)
    torch.testing.assert_close(loss(three_views, labels=torch.tensor([5, 2, 8, 0, 7, 3])), loss(three_views))
