"""The Triton kernels equal the definition in float64, in Triton's interpreter; test_triton_rows.py runs this file."""

import pytest
import torch
from torch.nn.functional import normalize

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(params=["exact", "bounded", "split"])
def route(request, monkeypatch):
    """Small problems are exact; large ones use the guarded shortcuts; few rows split the columns."""
    from kontrast.kernels import triton_launch, triton_operands

    torch.manual_seed(0)
    torch.set_num_threads(1)
    if request.param != "exact":
        monkeypatch.setattr(triton_operands, "LARGE", 0)
    if request.param == "split":
        monkeypatch.setattr(triton_launch, "splits_of", lambda blocks, tiles, device: (2, (tiles + 1) // 2))
    return request.param


def compare(M, K, D, scale, shared, *, kind=torch.float32, tolerance=1e-5, with_mean=True, **arguments):
    from kontrast.kernels import row_statistics

    q = normalize(torch.randn(M, D), dim=1).to(kind)
    k = None if K is None else (torch.randn(K, D) / D**0.5).to(kind)
    query_ids = None if shared is None else torch.randint(0, shared, (M,)) - 2**33
    key_ids = None if shared is None or K is None else torch.randint(0, shared, (K,)) - 2**33
    found = []
    for implementation, type_ in (("dense", torch.float64), ("triton", kind)):
        sides = [side.to(type_).requires_grad_() for side in (q, k) if side is not None]
        statistics = row_statistics(
            sides[0], sides[1] if K else None, scale=scale, query_ids=query_ids, key_ids=key_ids,
            implementation=implementation, with_mean=with_mean, **arguments,
        )  # fmt: skip
        weights = torch.rand(statistics.lse.shape, generator=torch.Generator().manual_seed(1)) + 0.5
        loss = (weights * statistics.lse.masked_fill(statistics.lse.isneginf(), 0)).sum()
        if with_mean:
            loss = loss + (weights.flip(-1) * statistics.mean).sum()
        empty = statistics.lse.isneginf()
        gradients = torch.autograd.grad(loss, sides)
        found.append([statistics.lse.detach().masked_fill(empty, 0), statistics.mean.detach(), *gradients, empty])
    for truth, part in zip(*found):
        assert part.isfinite().all()
        assert (part.double() - truth.double()).norm() <= tolerance * truth.double().norm()


@pytest.mark.parametrize(
    ("M", "K", "D", "scale", "shared"),
    [
        (131, None, 17, [2.0, -3.0], 20),
        (70, 133, 19, 5.0, 3),
        (33, 40, 130, [1.0, 5.0], 3),
        (35, None, 130, 2.0, 9),
    ],
)
def test_equal_to_the_definition(route, M, K, D, scale, shared):
    """Rows that fit into one piece and wide ones, with keys and without, at one scale and at two."""
    compare(M, K, D, scale, shared)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("M", "K", "D", "scale", "shared"),
    [
        (7, None, 3, 2.0, 3),
        (150, None, 17, [2.0, -3.0], 20),
        (130, None, 1, 1e-3, 50),
        (129, None, 64, 0.0, None),
        (70, 210, 130, [1.0, 5.0], 3),
        (65, 64, 128, 10.0, 40),
        (1, 200, 8, 4.0, None),
        (70, None, 512, [1.0, 2.0, 3.0], 30),
    ],
)
def test_more_shapes(route, M, K, D, scale, shared):
    compare(M, K, D, scale, shared)


@pytest.mark.slow
@pytest.mark.parametrize("K", [None, 90])
def test_lse_alone_and_detached_weights(route, K):
    compare(140, K, 24, 5.0, 30, with_mean=False)
    compare(140, K, 24, 5.0, 30, detach_weights=True)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [100.0, 1000.0, -1000.0])
@pytest.mark.parametrize("K", [None, 90])
def test_large_scales_are_exact(route, scale, K):
    """The bound rejects the shortcut on the device, and the running maximum is used."""
    compare(100, K, 16, scale, 10, tolerance=2e-4)


@pytest.mark.slow
def test_half_types(route):
    compare(130, None, 16, 2.0, 30, kind=torch.bfloat16, tolerance=5e-3)
    compare(130, None, 16, 2.0, 30, kind=torch.float16, tolerance=1e-3)


def test_large_scales_lse_alone_constant_weights_and_half_types_once(monkeypatch):
    """The slow tests have these in more combinations."""
    from kontrast.kernels import triton_operands

    torch.manual_seed(0)
    torch.set_num_threads(1)
    monkeypatch.setattr(triton_operands, "LARGE", 0)
    compare(40, None, 16, 1000.0, 10, tolerance=2e-4)
    compare(40, 30, 24, 5.0, 30, with_mean=False)
    compare(40, None, 24, 5.0, 30, detach_weights=True)
    compare(40, None, 16, 2.0, 30, kind=torch.bfloat16, tolerance=5e-3)
    compare(40, 30, 16, 2.0, 30, kind=torch.float16, tolerance=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("K", [None, 90])
@pytest.mark.parametrize("per_row", [False, True])
def test_gradient_of_the_scale(route, K, per_row):
    from kontrast.kernels import row_statistics

    q, k = normalize(torch.randn(100, 16), dim=1), None if K is None else torch.randn(K, 16) / 4
    given = {"query_ids": torch.arange(100) // 2, "key_ids": None if K is None else torch.arange(K)}
    found = []
    for implementation, kind in (("dense", torch.float64), ("triton", torch.float32)):
        a = torch.full((100,) if per_row else (), 5.0, dtype=kind, requires_grad=True)
        sides = [None if side is None else side.to(kind) for side in (q, k)]
        lse, mean = row_statistics(*sides, scale=a, implementation=implementation, **given)
        found.append([lse, mean, torch.autograd.grad((lse + mean).sum(), a)[0]])
    for truth, part in zip(*found):
        assert (part.double() - truth).norm() <= 1e-5 * truth.norm()


@pytest.mark.slow
def test_all_pairs_excluded(route):
    compare(70, None, 8, 3.0, 1)


@pytest.mark.slow
def test_ids_that_differ_only_in_their_upper_halves(route):
    from kontrast.kernels import row_statistics

    q = normalize(torch.randn(80, 8), dim=1)
    ids = torch.arange(80) % 2 * 2**32
    found, expected = (row_statistics(q, None, scale=2.0, query_ids=ids, implementation=i) for i in ("triton", "dense"))
    torch.testing.assert_close(found, expected)


def test_a_single_row_cut_out_of_wider_ones():
    """torch calls it contiguous; its stride is not one that the kernels can read."""
    from kontrast.kernels import row_statistics

    wide, keys = torch.randn(1, 27).half()[:, :24], torch.randn(9, 24).half()
    found = row_statistics(wide, keys, scale=1.0, implementation="triton")
    torch.testing.assert_close(found, row_statistics(wide, keys, scale=1.0, implementation="dense"))


def test_autocast_does_not_round_products():
    from kontrast.kernels import mean_vectors

    q, k = torch.randn(20, 8), torch.randn(30, 8)
    exact = mean_vectors(q, k, scale=2.0, implementation="triton")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mean_vectors(q, k, scale=2.0, implementation="triton"), exact)


def test_no_outputs_of_an_operator_share_memory():
    """torch refuses that in compiled programs."""
    from kontrast.kernels.triton_softplus import triton_softplus_forward

    q, k = torch.randn(20, 8), torch.randn(30, 8)
    found = triton_softplus_forward(q, k, None, None, torch.tensor(2.0), torch.tensor(-1.0))
    assert len({x.untyped_storage().data_ptr() for x in found}) == 3


@pytest.mark.slow
def test_strided_and_misaligned_rows(route):
    from kontrast.kernels import row_statistics

    base = normalize(torch.randn(81, 16), dim=1)
    for q in (base[:, ::2], base.flatten()[1 : 1 + 80 * 16].view(80, 16), base[::2]):
        found, expected = (row_statistics(q, None, scale=2.0, implementation=i) for i in ("triton", "dense"))
        torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_deterministic_algorithms_use_no_atomic_sums(monkeypatch):
    from kontrast.kernels import row_statistics, triton_launch, triton_operands

    monkeypatch.setattr(triton_operands, "LARGE", 0)
    monkeypatch.setattr(triton_launch, "launch_triangle", lambda *_: pytest.fail("atomic sums"))
    torch.use_deterministic_algorithms(True)
    try:
        row_statistics(torch.randn(40, 8), None, scale=1.0, implementation="triton")
    finally:
        torch.use_deterministic_algorithms(False)
