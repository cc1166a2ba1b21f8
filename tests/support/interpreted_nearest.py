"""The Triton kernel of the nearest keys finds those of float64, in the interpreter; test_triton_rows.py runs it."""

import pytest
import torch
from torch.nn.functional import normalize

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(params=["whole", "split"])
def route(request, monkeypatch):
    """Few rows split the columns."""
    from kontrast.kernels import triton_nearest

    torch.manual_seed(0)
    torch.set_num_threads(1)
    if request.param == "split":
        monkeypatch.setattr(triton_nearest, "splits_of", lambda blocks, tiles, device: (2, (tiles + 1) // 2))


def compare(M, K, D, shared, kind=torch.float32):
    from kontrast.kernels import nearest_keys

    q = normalize(torch.randn(M, D), dim=1).to(kind)
    k = None if K is None else normalize(torch.randn(K, D), dim=1).to(kind)
    query_ids = None if shared is None else torch.randint(0, shared, (M,)) + 2**33
    key_ids = None if shared is None or K is None else torch.randint(0, shared, (K,)) + 2**33
    ids = {"query_ids": query_ids, "key_ids": key_ids}
    exact = nearest_keys(q.double(), None if k is None else k.double(), implementation="dense", **ids)
    sides = [side.clone().requires_grad_() for side in (q, k) if side is not None]
    similarity, index = nearest_keys(sides[0], sides[1] if K else None, implementation="triton", **ids)
    assert torch.equal(index, exact[1])
    torch.testing.assert_close(similarity.double(), exact[0], rtol=1e-5, atol=1e-5)
    if similarity.isfinite().any():
        torch.autograd.grad(similarity[similarity.isfinite()].sum(), sides)


@pytest.mark.parametrize(
    ("M", "K", "D", "shared"),
    [
        (7, None, 3, 4),
        (150, None, 17, 20),
        (70, 210, 130, 3),
        (65, 64, 128, None),
        (1, 300, 8, None),
        (70, None, 512, 30),
    ],
)
def test_equal_to_the_definition(route, M, K, D, shared):
    compare(M, K, D, shared)


def test_the_widest_rows(route):
    compare(20, 140, 4096, 9)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_types(route, kind):
    compare(130, 150, 40, 30, kind)


def test_rows_without_pairs(route):
    compare(70, None, 8, 1)


def test_the_first_of_equal_keys(route):
    from kontrast.kernels import nearest_keys

    k = torch.eye(16).repeat(20, 1)
    assert nearest_keys(k[:32], k, implementation="triton")[1].tolist() == [*range(16)] * 2


def test_ids_that_differ_only_in_their_upper_halves(route):
    from kontrast.kernels import nearest_keys

    q, ids = torch.randn(80, 8), torch.arange(80) % 2 * 2**32
    found, expected = (nearest_keys(q, query_ids=ids, implementation=i)[1] for i in ("triton", "dense"))
    assert torch.equal(found, expected)
