"""Statistics of links, from one matrix and link by link, equal the definition in value and gradient."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kontrast.kernels import links as links_module
from kontrast.kernels.links import link_statistics
from kontrast.kernels.row_statistics import row_statistics
from kontrast.objectives import OBJECTIVES

WAYS = {"one matrix": 2**40, "link by link": 0}
LINKS = {
    "all": [(v, w) for v in range(3) for w in range(3) if v != w],
    "one way": [(0, 1), (0, 2), (1, 2)],
    "same": [(0, 0), (1, 1), (2, 2)],
    "one": [(1, 2)],
}


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    monkeypatch.setattr(links_module, "SMALL", {"cpu": WAYS[request.param]})
    return request.param


def draw(*shape, dtype=torch.float64):
    return torch.nn.functional.normalize(torch.randn(*shape, dtype=dtype), dim=-1).requires_grad_()


def by_definition(queries, keys, links, ids, key_ids, **options):
    keys = queries if keys is None else keys
    rows = [
        row_statistics(queries[v], keys[w], query_ids=ids, key_ids=key_ids, implementation="dense", **options)
        for v, w in links
    ]
    return torch.stack([row.lse for row in rows], -2), torch.stack([row.mean for row in rows], -2)


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("with_keys", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"with_mean": True}, {"with_mean": True, "detach_weights": True}, {"scale": [2.0, -3.0]}]
)
def test_both_ways_equal_the_definition(way, links, with_keys, options):
    torch.manual_seed(0)
    queries, keys = draw(3, 5, 4), draw(3, 7, 4) if with_keys else None
    ids, key_ids = torch.arange(5), torch.arange(7 if with_keys else 5)
    options = {"scale": 5.0, "with_mean": False} | options
    found = link_statistics(queries, keys, LINKS[links], query_ids=ids, key_ids=key_ids, **options)
    expected = by_definition(queries, keys, LINKS[links], ids, key_ids, **options)
    leaves = [queries] if keys is None else [queries, keys]
    torch.testing.assert_close(tuple(found), expected)
    weights = [torch.randn_like(x) for x in expected]
    gradients = [
        torch.autograd.grad(sum((w * x).sum() for w, x in zip(weights, statistics)), leaves, retain_graph=True)
        for statistics in (found, expected)
    ]
    torch.testing.assert_close(*gradients)


def test_rows_without_pairs(way):
    queries = draw(2, 3, 4)
    ids = torch.tensor([0, 0, 0])
    found = link_statistics(queries, None, [(0, 1), (1, 0)], scale=3.0, query_ids=ids, key_ids=ids, with_mean=True)
    assert torch.isneginf(found.lse).all() and (found.mean == 0).all()
    (gradient,) = torch.autograd.grad(found.mean.sum(), queries)
    assert (gradient == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_half_precision_are_summed_in_float32(way, dtype):
    """Also under autocast, which would round a plain matrix product."""
    torch.manual_seed(0)
    queries, ids = draw(3, 40, 64, dtype=torch.float32).detach().to(dtype), torch.arange(40)
    exact = link_statistics(queries.double(), None, LINKS["one way"], scale=10.0, query_ids=ids, key_ids=ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = link_statistics(queries, None, LINKS["one way"], scale=10.0, query_ids=ids, key_ids=ids)
    assert found.lse.dtype == torch.float32
    torch.testing.assert_close(found.lse.double(), exact.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["cacr", "multi-view-nce"])
def test_small_batches_of_many_views_take_few_operations(name):
    """With five views, link by link would take over 500 operations, each a launch on a GPU."""

    class Counted(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.counts = Counter()

        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            self.counts[function] += 1
            return function(*arguments, **(keywords or {}))

    objective, z = OBJECTIVES[name](), torch.randn(5, 16, 8, requires_grad=True)
    with Counted() as operations:
        objective(z).backward()
    assert operations.counts.total() < 400
