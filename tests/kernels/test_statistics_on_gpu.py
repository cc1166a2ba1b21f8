"""The statistics of the affinity matrix on a CUDA device: compared with float64, and captured in a graph."""

import pytest
import torch
from torch.nn.functional import normalize

from kontrast.kernels import mean_vectors, nearest_keys, row_statistics, softplus_sums, two_way_statistics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def statistics(q, k, b, a, query_ids, key_ids):
    """Return a loss of each statistic."""
    ids = {"query_ids": query_ids, "key_ids": key_ids}
    rows = row_statistics(q, k, scale=5.0, key_bias=b, **ids)
    both = two_way_statistics(q, k, scale=a, **ids)
    return {
        "key bias": rows.lse.sum() + rows.mean.square().sum(),
        "mean vectors": mean_vectors(q, k, scale=5.0, key_bias=b, **ids).square().sum(),
        "softplus": softplus_sums(q, k, scale=a, bias=-2.0, **ids).square().mean(),
        "both ways": sum(part.square().sum() for side in both for part in side),
        "nearest": nearest_keys(q, k, **ids)[0].square().sum(),
    }


def inputs(M, K, D, kind):
    torch.manual_seed(0)
    q, k = (torch.randn(n, D, device="cuda") for n in (M, K))
    # Unit rows of width 1 are 1 or -1: their weights are all of one side, and rounding is most of their gradient.
    q, k = (x / 3 if D == 1 else normalize(x, dim=1) for x in (q, k))
    q, k = (x.to(kind).requires_grad_() for x in (q, k))
    b = torch.randn(K, device="cuda", requires_grad=True)
    ids = [torch.randint(0, 50, (n,), device="cuda") for n in (M, K)]
    return [q, k, b, torch.tensor(5.0, device="cuda", requires_grad=True)], ids


@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2), (torch.float16, 5e-3)])
@pytest.mark.parametrize(("M", "K", "D"), [(1000, 777, 130), (513, 300, 1), (200, 3000, 512)])
def test_equal_to_float64(M, K, D, kind, tolerance):
    given, ids = inputs(M, K, D, kind)
    exact = [x.detach().double().requires_grad_() for x in given]
    for name, truth in statistics(*exact, *ids).items():
        found = statistics(*given, *ids)[name]
        torch.testing.assert_close(found.double(), truth, rtol=tolerance, atol=0)
        slopes = (torch.autograd.grad(x, y, allow_unused=True) for x, y in ((found, given), (truth, exact)))
        for slope, expected in zip(*slopes):
            assert (slope is None) == (expected is None)
            if slope is not None:
                assert (slope.double() - expected).norm() <= tolerance * expected.norm(), name


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("M", "K", "D"), [(64, 100_000, 128), (5000, 4000, 130), (300, 2000, 4096), (77, 64, 19)])
def test_nearest_keys_in_triton(M, K, D, kind):
    """Another key is found only if it is as near, up to rounding."""
    (q, k, _, _), ids = inputs(M, K, D, kind)
    given = {"query_ids": ids[0], "key_ids": ids[1]}
    exact, _ = nearest_keys(q.double(), k.double(), implementation="tiled", **given)
    similarity, index = nearest_keys(q, k, implementation="triton", **given)
    assert (ids[0] != ids[1][index]).all()
    torch.testing.assert_close(similarity.double(), exact, rtol=1e-5, atol=1e-5)


def test_capture_in_a_graph():
    given, ids = inputs(300, 200, 64, torch.float32)

    def step():
        loss = sum(statistics(*given, *ids).values())
        return loss, *torch.autograd.grad(loss, given)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        given[0].copy_(given[0].roll(1, dims=0))
    graph.replay()
    replayed = [x.clone() for x in captured]
    torch.testing.assert_close(replayed, list(step()), rtol=1e-4, atol=1e-4)
