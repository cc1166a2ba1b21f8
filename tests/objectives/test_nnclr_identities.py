"""NNCLR: its definition as loops in float64, what gets a gradient, and which rows are neighbors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from kontrast.networks import MemoryBank
from kontrast.objectives import NNCLR, InfoNCE, NTXent


def definition(z: Tensor, tau: float, keys: Tensor | None = None, bank: Tensor | None = None) -> Tensor:
    """Each key's nearest row of the bank, or of the keys of other images, finds its image's prediction among all."""
    p, k = normalize(z, dim=-1), normalize(z if keys is None else keys, dim=-1).detach()
    links = [(v, w) for v in range(len(p)) for w in range(len(k)) if len(p) == 1 or v != w]
    losses = []
    for v, w in links:
        for i in range(p.shape[1]):
            if bank is not None:
                candidates = list(bank)
            else:
                candidates = [k[u, j] for u in range(len(k)) for j in range(p.shape[1]) if j != i]
            neighbor = max(candidates, key=lambda row, w=w, i=i: float(row @ k[w, i]))
            logits = torch.stack([neighbor @ p[v, j] / tau for j in range(p.shape[1])])
            losses.append(torch.logsumexp(logits, 0) - logits[i])
    return torch.stack(losses).mean()


@pytest.mark.parametrize("with_bank", [True, False])
@pytest.mark.parametrize(("views", "key_views"), [(2, 0), (3, 0), (1, 2), (2, 2), (4, 2)])
def test_it_equals_its_definition(keys, bank, views, key_views, with_bank) -> None:
    """With and without keys and bank, one query view with several keys, and local crops as further queries."""
    z = keys.flip(1)[:views].clone().requires_grad_()
    given = {"keys": keys[:key_views] if key_views else None, "bank": bank if with_bank else None}
    ours, expected = NNCLR(temperature=0.3)(z, **given), definition(z, 0.3, **given)
    torch.testing.assert_close(ours, expected)
    slopes = [torch.autograd.grad(loss, z)[0] for loss in (ours, expected)]
    torch.testing.assert_close(*slopes)


def test_a_bank_that_holds_the_keys_returns_them(projections, keys) -> None:
    """So a bank must be searched before the batch is added, or every key would be its own neighbor."""
    k = normalize(keys[:2], dim=-1)
    bank = MemoryBank(20, 5).double()
    searched_before = NNCLR(temperature=0.3)(projections, keys=keys[:2], bank=bank())
    bank.enqueue(keys[:2].flatten(0, 1))
    own = NNCLR(temperature=0.3)(projections, keys=keys[:2], bank=bank())
    p = normalize(projections, dim=-1)
    expected = [cross_entropy(k[1 - v] @ p[v].T / 0.3, torch.arange(7)) for v in (0, 1)]
    torch.testing.assert_close(own, torch.stack(expected).mean(), rtol=1e-6, atol=1e-6)  # the bank was float32
    assert (searched_before - own).abs() > 0.01


def test_the_gradient_goes_to_the_predictions_alone(projections, bank) -> None:
    """dL/dp_vj = sum_i (softmax_ij - [i = j]) n_i / (tau V B), and nothing for the rows that are searched for."""
    z, tau = normalize(projections, dim=-1).requires_grad_(), 0.3
    slope = torch.autograd.grad(NNCLR(tau, normalize=False)(z, bank=bank), z)[0]
    n = bank[(z.detach() @ bank.T).argmax(-1)]
    for v in (0, 1):
        shares = torch.softmax(n[1 - v] @ z[v].T / tau, 1) - torch.eye(7, dtype=z.dtype)
        torch.testing.assert_close(slope[v], shares.T @ n[1 - v] / (tau * 14))


def test_terms_are_similarity_and_log_sum_exp(projections, bank) -> None:
    terms = NNCLR(temperature=0.3).terms(projections, bank=bank)
    p = normalize(projections, dim=-1)
    n = bank[(p @ bank.T).argmax(-1)].flip(0)
    s = torch.einsum("vid,vjd->vij", n, p) / 0.3
    torch.testing.assert_close(terms.attraction, -s.diagonal(dim1=1, dim2=2).mean())
    torch.testing.assert_close(terms.repulsion, torch.logsumexp(s, 2).mean())


def test_order_of_the_bank_does_not_matter(projections, keys, bank) -> None:
    loss = NNCLR()
    shuffled = bank[torch.randperm(11, generator=torch.Generator().manual_seed(0))]
    torch.testing.assert_close(
        loss(projections, keys=keys[:2], bank=shuffled), loss(projections, keys=keys[:2], bank=bank)
    )


def test_it_is_neither_nt_xent_nor_info_nce_of_neighbors_and_predictions(projections, bank) -> None:
    """A popular library contrasts neighbors with neighbors too; and with rows and columns exchanged it differs."""
    z, tau = projections, 0.3
    p = normalize(z, dim=-1)
    n = bank[(p @ bank.T).argmax(-1)]
    ours = NNCLR(tau)(z, bank=bank)
    assert (NTXent(tau)(n[0], p[1]) - ours).abs() > 0.01
    assert (InfoNCE(tau)(p, keys=n) - ours).abs() > 0.01


def test_rows_of_each_prediction_view(keys, bank) -> None:
    assert NNCLR().rows(keys, keys=keys[:2], bank=bank).shape == (4, 7)
    assert NNCLR().rows(keys[:1], keys=keys[1:3], bank=bank).shape == (1, 7)
