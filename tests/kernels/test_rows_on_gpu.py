"""The Triton kernels on a CUDA device: compared with float64, compiled, captured in a graph, and on a million rows."""

import pytest
import torch
from torch.nn.functional import normalize

from kontrast.kernels import row_statistics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def rows(count, width, kind):
    return normalize(torch.randn(count, width, device="cuda"), dim=1).to(kind).requires_grad_()


def results(implementation, q, k, shared, scale, **arguments):
    """Return lse, mean and gradients of a weighted sum, with the same ids for every implementation."""
    generator = torch.Generator("cuda").manual_seed(3)
    query_ids, key_ids = (
        torch.randint(0, shared, (n,), device="cuda", generator=generator) for n in (len(q), len(q if k is None else k))
    )
    ids = {"query_ids": query_ids, "key_ids": None if k is None else key_ids}
    found = row_statistics(q, k, scale=scale, implementation=implementation, **ids, **arguments)
    weights = torch.rand(found.lse.shape, device="cuda", generator=generator) + 0.5
    loss = (weights * (found.lse + found.mean)).sum()
    return [found.lse.detach(), found.mean.detach(), *torch.autograd.grad(loss, [q] if k is None else [q, k])]


CASES = [
    (4352, None, 128, [10.0]),
    (4100, None, 128, [5.0, 10.0]),
    (1000, 777, 130, [5.0, -3.0]),
    (300, 70000, 64, [20.0]),
    (513, None, 1, [2.0]),
    (777, None, 512, [100.0]),
    (200, 300, 2048, [1000.0]),
]


@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3), (torch.float16, 2e-3)])
@pytest.mark.parametrize(("M", "K", "D", "scale"), CASES)
def test_native_kernels_against_float64(M, K, D, scale, kind, tolerance):
    torch.manual_seed(0)
    q, k = rows(M, D, kind), None if K is None else rows(K, D, kind)
    exact = [None if side is None else side.detach().double().requires_grad_() for side in (q, k)]
    for found, truth in zip(results("auto", q, k, 50, scale), results("tiled", *exact, 50, scale)):
        # A large scale multiplies the rounding of s itself.
        assert (found.double() - truth).norm() <= tolerance * max(1.0, abs(scale[-1]) / 40) * truth.norm()


def loss(q, ids):
    return row_statistics(q, None, scale=10.0, query_ids=ids, with_mean=False).lse.mean()


@pytest.mark.parametrize("count", [512, 4608])
def test_compiles_into_one_graph(count):
    q, ids = rows(count, 128, torch.float32), torch.arange(count, device="cuda") // 2
    compiled = torch.compile(loss, fullgraph=True)
    torch.testing.assert_close(compiled(q, ids), loss(q, ids))
    torch.testing.assert_close(*(torch.autograd.grad(f(q, ids), q)[0] for f in (compiled, loss)))


@pytest.mark.parametrize("count", [512, 4608])
def test_captured_in_a_graph(count):
    q, ids = rows(count, 64, torch.bfloat16), torch.arange(count, device="cuda") // 2
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            torch.autograd.grad(loss(q, ids), q)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = loss(q, ids)
        gradient = torch.autograd.grad(value, q)[0]
    with torch.no_grad():
        q.copy_(rows(count, 64, torch.bfloat16))
    graph.replay()
    torch.testing.assert_close(value, loss(q, ids))
    torch.testing.assert_close(gradient, torch.autograd.grad(loss(q, ids), q)[0], rtol=2e-2, atol=1e-6)


def test_deterministic_algorithms_give_the_same_bits():
    q, ids = rows(4608, 64, torch.float32), torch.arange(4608, device="cuda") // 2
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (row_statistics(q, None, scale=10.0, query_ids=ids) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first.lse, second.lse) and torch.equal(first.mean, second.mean)


def test_no_wait_for_the_device():
    q, ids = rows(4608, 128, torch.bfloat16), torch.arange(4608, device="cuda") // 2
    torch.autograd.grad(loss(q, ids), q)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(loss(q, ids), q)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.slow
def test_a_million_rows_fit():
    """2^20 rows: their matrix would be 4 TiB. Identical unit rows in two groups have a known lse and gradient."""
    count = 2**20
    q = torch.zeros(count, 128, device="cuda", dtype=torch.bfloat16)
    q[: count // 2, 0] = 1
    q[count // 2 :, 1] = 1
    q.requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    found = row_statistics(q, None, scale=2.0, with_mean=False).lse
    gradient = torch.autograd.grad(found.sum(), q)[0]
    expected = torch.log(torch.tensor(count / 2, dtype=torch.float64) * (1 + torch.e**2))
    torch.testing.assert_close(found.double(), expected.to("cuda").expand(count), rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient[0, 0].item(), 4 * torch.e**2 / (1 + torch.e**2), rtol=1e-2, atol=0)
    assert torch.cuda.max_memory_allocated() < 3 * 2**30
