"""CO2: its consistency as loops over the bank in float64, the identities of its divergences, and its base."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from kontrast.kernels import mean_vectors, row_statistics
from kontrast.objectives import CO2, DCL, InfoNCE, SigLIP, objective


def divergences(q: Tensor, k: Tensor, bank: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """KL(P||Q) and KL(Q||P) of one query and one key, from the probabilities of each row of the bank."""
    exponentials = [[torch.exp(row @ x / tau) for row in bank] for x in (k, q)]
    P, Q = ([e / sum(each) for e in each] for each in exponentials)
    forward = sum(p * torch.log(p / other) for p, other in zip(P, Q))
    backward = sum(p * torch.log(p / other) for p, other in zip(Q, P))
    return forward, backward


def definition(q: Tensor, k: Tensor, bank: Tensor, tau: float) -> Tensor:
    """Half the sum of both divergences, for each query view with the keys of the other views."""
    q, k = normalize(q, dim=-1), normalize(k, dim=-1)
    links = [(v, w) for v in range(len(q)) for w in range(len(k)) if len(q) == 1 or v != w]
    found = [sum(divergences(q[v, i], k[w, i], bank, tau)) / 2 for v, w in links for i in range(q.shape[1])]
    return torch.stack(found).mean()


@pytest.mark.parametrize(("views", "key_views"), [(1, 1), (1, 3), (2, 2), (4, 2)])
def test_consistency_equals_its_definition(keys, bank, views, key_views) -> None:
    z, k = keys.flip(1)[:views].clone().requires_grad_(), keys[:key_views]
    loss = CO2(consistency_weight=2.5, consistency_temperature=0.3, temperature=0.4)
    terms, expected = loss.terms(z, keys=k, bank=bank), definition(z, k, bank, 0.3)
    torch.testing.assert_close(terms["consistency"], 2.5 * expected)
    slopes = [torch.autograd.grad(x, z)[0] for x in (terms["consistency"], 2.5 * expected)]
    torch.testing.assert_close(*slopes)
    assert slopes[0].abs().max() > 1e-3  # a library returns the consistency as a new tensor, without any gradient
    torch.testing.assert_close(loss(z, keys=k, bank=bank), InfoNCE(0.4)(z, keys=k, bank=bank) + 2.5 * expected)


def test_without_keys_both_views_get_a_gradient(projections, bank) -> None:
    z = projections.clone().requires_grad_()
    rows = normalize(z, dim=-1)
    expected = torch.stack([sum(divergences(rows[0, i], rows[1, i], bank, 0.3)) / 2 for i in range(7)]).mean()
    found = CO2(consistency_temperature=0.3, consistency_weight=1.0).terms(z, bank=bank)["consistency"]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*[torch.autograd.grad(x, z)[0] for x in (found, expected)])


def test_equal_query_and_key_are_consistent_and_others_are_not(projections, keys, bank) -> None:
    loss = CO2(consistency_temperature=0.1)
    assert loss.terms(projections[:1], keys=projections[:1], bank=bank)["consistency"] == 0
    half = keys.bfloat16()
    assert loss.terms(half[:1], keys=half[:1], bank=bank.bfloat16())["consistency"] == 0
    for k in keys:
        assert loss.terms(projections[:1], keys=k, bank=bank)["consistency"] > 0


def test_rounding_does_not_make_the_consistency_negative() -> None:
    """In bfloat16 each vector is rounded before both factors are computed, so that they have the same sign."""
    draw = torch.Generator().manual_seed(0)
    q, noise, bank = (torch.randn(*shape, generator=draw) for shape in ((1, 500, 16), (1, 500, 16), (300, 16)))
    given = {"keys": (q + 0.003 * noise).bfloat16(), "bank": normalize(bank, dim=-1).bfloat16()}
    rows = CO2().rows(q.bfloat16(), **given) - InfoNCE().rows(q.bfloat16(), **given)
    assert rows.max() > 1e-4 and rows.min() > -1e-6  # the difference of two losses is rounded


def test_one_divergence_needs_a_log_sum_exp_and_a_constant_mean_vector(projections, bank) -> None:
    """KL(P||Q) = lse_q - <q, m_P>/tau - H(P), and both divergences together are <k - q, m_P - m_Q>/tau."""
    q, k, tau = *normalize(projections, dim=-1), 0.2
    m_P, m_Q = (mean_vectors(x, bank, scale=1 / tau) for x in (k, q))
    P = torch.softmax(k @ bank.T / tau, 1)
    entropy = -(P * P.log()).sum(1)
    forward, both = zip(*[(d[0], d[0] + d[1]) for d in (divergences(q[i], k[i], bank, tau) for i in range(7))])
    one_sided = row_statistics(q, bank, scale=1 / tau).lse - (q * m_P).sum(1) / tau - entropy
    torch.testing.assert_close(one_sided, torch.stack(forward))
    torch.testing.assert_close(((k - q) * (m_P - m_Q)).sum(1) / tau, torch.stack(both))


def test_the_positive_is_in_neither_softmax(projections, keys, bank) -> None:
    """A library adds it to both: that is the definition on a bank with one more row."""
    q, k = projections[:1], keys[:1]
    ours = CO2(consistency_temperature=0.3, consistency_weight=1.0).terms(q, keys=k, bank=bank)["consistency"]
    other = torch.stack(
        [
            definition(q[:, i : i + 1], k[:, i : i + 1], torch.cat([normalize(k[0, i : i + 1]), bank]), 0.3)
            for i in range(7)
        ]
    )
    assert (other.mean() - ours).abs() > 1e-3


@pytest.mark.parametrize("name", ["info-nce", "nt-xent", "dcl", "jcl", "cacr", "multi-view-nce", "nnclr"])
def test_any_objective_with_a_bank_is_a_base(name, projections, keys, bank) -> None:
    given = {"keys": keys[:2], "bank": bank}
    base = objective(name)
    alone, terms = base.terms(projections, **given), CO2(name).terms(projections, **given)
    assert list(terms) == ["attraction", "repulsion", "consistency"]
    for term in ("attraction", "repulsion"):
        torch.testing.assert_close(terms[term], alone[term])
    torch.testing.assert_close(CO2(name, consistency_weight=0.0)(projections, **given), base(projections, **given))
    torch.testing.assert_close(CO2(base)(projections, **given), CO2(name)(projections, **given))


def test_arguments_and_parameters_of_the_base(projections, bank) -> None:
    loss = CO2("nt-xent", temperature="learned", reduction="sum")
    assert loss.reduction == loss.loss.reduction == "sum"
    assert [name for name, _ in loss.named_parameters()] == ["loss.temperature.log_scale"]
    assert loss.learned_numbers() == {"loss.temperature": pytest.approx(0.2)}
    loss(projections, bank=bank).backward()
    assert loss.loss.temperature.log_scale.grad is not None
    assert CO2(DCL(0.3)).loss.temperature == 0.3 and CO2("dcl", temperature=0.3).loss.temperature == 0.3


def test_what_is_refused(projections) -> None:
    with pytest.raises(ValueError, match=r"CO2 needs bank=: give earlier keys \[M,D\]"):
        CO2()(projections)
    for base in ("siglip", "co2", SigLIP()):
        with pytest.raises(ValueError, match=r"base is .*give an objective that takes a bank"):
            CO2(base)
    with pytest.raises(ValueError, match=r"base is .*allowed: "):
        CO2(DCL(), temperature=0.3)
    with pytest.raises(ValueError, match="objective 'dcl' has no argument 'symmetric'"):
        CO2("dcl", symmetric=True)


def test_no_matrix_of_images_and_bank_is_kept() -> None:
    B, M, sizes = 64, 3000, []

    def pack(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return x

    draw = torch.Generator().manual_seed(0)
    z, k = torch.randn(2, B, 8, generator=draw, requires_grad=True), torch.randn(2, B, 8, generator=draw)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        CO2()(z, keys=k, bank=torch.randn(M, 8, generator=draw)).backward()
    assert max(sizes) == M * 8
