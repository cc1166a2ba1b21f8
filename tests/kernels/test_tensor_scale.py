"""A scale that is a tensor: the values of a number, and its exact gradient, in every implementation.

M queries, K keys.  A scale is [], or [M] with one scale per query.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from kontrast.kernels import RowStatistics, links, merge, row_statistics, tiled
from kontrast.kernels.links import link_statistics

IMPLEMENTATIONS = ("dense", "tiled")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiled, "TILE", 4)
    torch.manual_seed(0)


def rows(*shape: int) -> torch.Tensor:
    return normalize(torch.randn(*shape, dtype=torch.float64), dim=-1).requires_grad_()


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def ids(K: int | None) -> dict:
    return {"query_ids": torch.arange(9) // 2, "key_ids": None if K is None else torch.arange(K)}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("K", [None, 7])
def test_the_values_of_a_number(implementation, K):
    """Also at the scale of one row, and for a sequence that mixes numbers and tensors."""
    q, k, given = rows(9, 4), None if K is None else rows(K, 4), {**ids(K), "implementation": implementation}
    expected = row_statistics(q, k, scale=[0.0, 3.0, 50.0], **given)
    found = row_statistics(q, k, scale=[0.0, number(3.0), number(50.0)], **given)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(row_statistics(q, k, scale=number(3.0), **given).mean, expected.mean[1])
    each = row_statistics(q, k, scale=torch.tensor([3.0, 50.0] * 4 + [3.0]), **given)
    torch.testing.assert_close(each.lse, torch.where(torch.arange(9) % 2 == 0, expected.lse[1], expected.lse[2]))
    alone = row_statistics(q, k, scale=[number(3.0), 2.0], with_mean=False, **given)
    assert alone.lse.shape == (2, 9) and alone.mean.shape == (2, 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("K", [None, 7])
@pytest.mark.parametrize("shape", [(), (9,)])
def test_gradients_and_second_derivatives(implementation, K, shape):
    a = (4 * torch.rand(shape, dtype=torch.float64) + 0.5).requires_grad_()

    def statistics(a, q, *k):
        return tuple(row_statistics(q, *k, scale=a, implementation=implementation, **ids(K)))

    given = (a, rows(9, 4)) if K is None else (a, rows(9, 4), rows(K, 4))
    assert torch.autograd.gradcheck(statistics, given)
    assert torch.autograd.gradgradcheck(statistics, given)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_slope_of_lse_is_the_mean_and_that_of_the_mean_the_variance(implementation):
    q, k, a = rows(9, 4), rows(7, 4), torch.full((9,), 3.0, dtype=torch.float64, requires_grad=True)
    found = row_statistics(q, k, scale=a, implementation=implementation)
    s = (q @ k.T).detach()
    w = torch.softmax(3 * s, dim=1)
    variance = (w * s.square()).sum(1) - (w * s).sum(1).square()
    torch.testing.assert_close(torch.autograd.grad(found.lse.sum(), a, retain_graph=True)[0], found.mean.detach())
    torch.testing.assert_close(torch.autograd.grad(found.mean.sum(), a)[0], variance)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_constant_weights_have_no_slope(implementation):
    a = number(3.0)
    mean = row_statistics(rows(9, 4), scale=a, detach_weights=True, implementation=implementation).mean
    assert torch.autograd.grad(mean.sum(), a)[0].abs() < 1e-12


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("per_row", [False, True])
def test_rows_without_pairs_do_not_spoil_the_gradient_of_the_scale(implementation, per_row):
    q, alone = rows(9, 4), torch.tensor([0] * 9)
    a = torch.full((9,), 3.0, dtype=torch.float64, requires_grad=True) if per_row else number(3.0)
    found = row_statistics(q, rows(2, 4), scale=a, query_ids=alone, key_ids=torch.tensor([0, 0]))
    own = row_statistics(q, scale=a, query_ids=alone, implementation=implementation)
    for each in (found, own):
        assert each.lse.isneginf().all() and (each.mean == 0).all()
        total = each.mean.sum() + torch.logaddexp(each.lse, torch.zeros(9)).sum()
        for gradient in torch.autograd.grad(total, [a, q]):
            assert (gradient == 0).all()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision(kind):
    """Rows are multiplied in float32 and rounded once; the scale's gradient has the scale's own type."""
    q, a = normalize(torch.randn(40, 32), dim=1).to(kind), number(7.0)
    exact = row_statistics(q.double(), scale=a, query_ids=torch.arange(40))
    expected = torch.autograd.grad(exact.lse.sum() + exact.mean.sum(), a)[0]
    found = row_statistics(q, scale=a, query_ids=torch.arange(40))
    assert found.lse.dtype == torch.float32
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[kind]
    torch.testing.assert_close(found.lse.double(), exact.lse, rtol=tolerance, atol=tolerance)
    gradient = torch.autograd.grad(found.lse.sum() + found.mean.sum(), a)[0]
    assert gradient.dtype == torch.float64
    torch.testing.assert_close(gradient, expected, rtol=tolerance, atol=tolerance)


def test_segments_merge():
    q, k, a = rows(9, 4), rows(8, 4), number(3.0)
    whole = row_statistics(q, k, scale=a)
    merged = merge([row_statistics(q, part, scale=a) for part in (k[:3], k[3:])])
    torch.testing.assert_close(merged, whole)
    slopes = [torch.autograd.grad(x.lse.sum() + x.mean.square().sum(), a)[0] for x in (merged, whole)]
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("pairs", [0, 2**40])  # link by link, and from one matrix
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("places", [[(0, 0), (1, 1)], [(0, 1), (1, 0)]])
def test_links(monkeypatch, pairs, per_row, places):
    monkeypatch.setattr(links, "SMALL", {"cpu": pairs})
    q, a = rows(2, 5, 4), torch.full((5,) if per_row else (), 3.0, dtype=torch.float64, requires_grad=True)
    given = {"query_ids": torch.arange(5), "key_ids": torch.arange(5), "with_mean": True}

    def statistics(a, q):
        return tuple(link_statistics(q, None, places, scale=[a, 2.0], **given))

    expected = link_statistics(q, None, places, scale=[3.0, 2.0], **given)
    torch.testing.assert_close(RowStatistics(*statistics(a, q)), expected)
    assert torch.autograd.gradcheck(statistics, (a, q))


def test_torch_func_and_the_compiler():
    q, a = rows(9, 4).detach(), torch.tensor(3.0, dtype=torch.float64)

    def loss(a, q):
        found = row_statistics(q, scale=a, query_ids=torch.arange(9))
        return found.lse.sum() + row_statistics(q, q[:5], scale=[a, 2.0]).mean.sum()

    leaf = a.clone().requires_grad_()
    expected = torch.autograd.grad(loss(leaf, q), leaf)[0]
    torch.testing.assert_close(torch.func.grad(loss)(a, q), expected)
    torch.testing.assert_close(torch.func.jvp(lambda a: loss(a, q), (a,), (torch.ones_like(a),))[1], expected)
    several = torch.tensor([3.0, 5.0], dtype=torch.float64)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss), (0, None))(several, q)[0], expected)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(leaf, q), leaf)[0], expected)


def test_a_scale_that_is_not_positive_gives_nan():
    """Its value is never read; the symmetric form needs its square root."""
    assert row_statistics(rows(9, 4), scale=torch.tensor(-1.0)).lse.isnan().all()


@pytest.mark.parametrize("scale", [torch.ones(4), torch.ones(2, 9), torch.tensor(2), [torch.ones(1, 1)]])
def test_other_tensors_are_refused(scale):
    with pytest.raises(ValueError, match="scale is "):
        row_statistics(rows(9, 4), scale=scale)
