"""Bias per key, mean vectors, sums of softplus, nearest keys, and rows with columns: tiled torch is the definition."""

import subprocess
import sys

import pytest
import torch

from kontrast.kernels import (
    mean_vectors,
    nearest_keys,
    row_statistics,
    softplus_sums,
    tiled,
    two_way_statistics,
)
from kontrast.kernels.mean_vectors import operation as mean_operation
from kontrast.kernels.softplus_sums import operation as softplus_operation
from kontrast.kernels.two_way_statistics import operation as two_way_operation

from support.statistics_cases import ids, scalar, unit_rows, value_and_gradients


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiled, "TILE", 32)
    torch.manual_seed(0)


def key_bias(given, **options):
    q, k, _, b, _, _ = given
    return row_statistics(q, k, key_bias=b, **options)


def constant_key_bias(given, **options):
    q, k, _, b, _, _ = given
    return row_statistics(q, k, key_bias=b.detach(), detach_weights=True, **options)


def means_of_keys(given, **options):
    q, k, _, b, _, _ = given
    return [mean_vectors(q, k, key_bias=b, **options)]


def means_of_values(given, **options):
    q, k, v, _, _, _ = given
    return [mean_vectors(q, k, values=v, **options)]


def softplus(given, *, scale, **options):
    q, k, _, _, a, c = given
    return [softplus_sums(q, k, scale=a * scale, bias=c, **options)]


def both_ways(given, *, scale, detach_weights=False, with_mean=True, **options):
    q, k, _, _, a, _ = given
    rows, columns = two_way_statistics(
        q, k, scale=a * scale, detach_weights=detach_weights, with_mean=with_mean, **options
    )
    return [*rows, *columns]


def both_ways_detached(given, **options):
    return both_ways(given, detach_weights=True, **options)


def both_ways_lse(given, **options):
    return both_ways(given, with_mean=False, **options)


def nearest(given, *, scale, **options):
    q, k, _, _, _, _ = given
    return nearest_keys(q, k, **options)


# The function, and the indices of the inputs that get a gradient.
STATISTICS = {
    key_bias: (0, 1, 3),
    constant_key_bias: (0, 1),
    means_of_keys: (0, 1, 3),
    means_of_values: (0, 1, 2),
    softplus: (0, 1, 4, 5),
    both_ways: (0, 1, 4),
    both_ways_detached: (0, 1, 4),
    both_ways_lse: (0, 1, 4),
    nearest: (0, 1),
}
all_statistics = pytest.mark.parametrize("statistic", STATISTICS, ids=lambda f: f.__name__)


def inputs(M, K, D, kind=torch.float64):
    """Return queries, keys, values, bias per key, scale and bias."""
    wide = torch.float64 if kind == torch.float64 else torch.float32
    bias = torch.randn(K, dtype=torch.float64).to(wide).requires_grad_()
    return [
        unit_rows(M, D, kind),
        unit_rows(K, D, kind),
        unit_rows(K, 5, kind),
        bias,
        scalar(1, wide),
        scalar(-2, wide),
    ]


def results(statistic, given, **options):
    wanted = [given[n] for n in STATISTICS[statistic]]
    return value_and_gradients(lambda: statistic(given, **options), wanted)


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0, 100.0, 1000.0, 0.0, -5.0])
@pytest.mark.parametrize("kind", ["absent", "none", "one", "many", "same"])
@all_statistics
def test_tiled_is_the_definition(statistic, kind, scale):
    if kind == "same" and statistic in (nearest, softplus, means_of_keys):
        pytest.skip("test_rows_without_pairs covers it")
    given, M, K = inputs(33, 101, 17), 33, 101
    options = {"scale": scale, "query_ids": ids(kind, M), "key_ids": ids(kind, K)}
    expected = results(statistic, given, implementation="dense", **options)
    torch.testing.assert_close(results(statistic, given, implementation="tiled", **options), expected)


@pytest.mark.parametrize(("M", "K", "D"), [(1, 1, 1), (1, 90, 3), (70, 1, 130), (64, 32, 16), (65, 31, 7)])
@all_statistics
def test_odd_shapes(statistic, M, K, D):
    given = inputs(M, K, D)
    expected = results(statistic, given, implementation="dense", scale=4.0)
    torch.testing.assert_close(results(statistic, given, implementation="tiled", scale=4.0), expected)


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
@all_statistics
def test_gradcheck(statistic, implementation):
    given = inputs(9, 7, 4)
    places = STATISTICS[statistic]

    def compute(*wanted):
        changed = list(given)
        for n, x in zip(places, wanted):
            changed[n] = x
        options = {"query_ids": ids("many", 9), "key_ids": ids("many", 7), "implementation": implementation}
        found = [x for x in statistic(changed, scale=3.0, **options) if x.is_floating_point() and x.numel()]
        # The gradient of a detached mean is not its derivative, so gradcheck can only check the lse.
        return tuple(found[::2]) if statistic in (constant_key_bias, both_ways_detached) else tuple(found)

    torch.autograd.gradcheck(compute, [given[n] for n in places])


@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@all_statistics
def test_types(statistic, kind, tolerance):
    given = inputs(65, 70, 19, kind)
    exact = [x.detach().double().requires_grad_() for x in given]
    options = {"scale": 5.0, "query_ids": ids("one", 65), "key_ids": ids("one", 70)}
    truths = results(statistic, exact, implementation="dense", **options)
    for implementation in ("dense", "tiled"):
        found = results(statistic, given, implementation=implementation, **options)
        assert found[0].dtype == torch.float32
        assert [x.dtype for x in found[-len(STATISTICS[statistic]) :]] == [
            given[n].dtype for n in STATISTICS[statistic]
        ]
        for part, truth in zip(found, truths):
            assert (part.double() - truth).norm() <= tolerance * truth.double().norm()


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
@all_statistics
def test_rows_without_pairs(statistic, implementation):
    """They have no gradient, even if their incoming gradient is NaN, as that of exp(lse - lse) would be."""
    given = inputs(40, 6, 5)
    query_ids, key_ids = torch.arange(40) + 10, torch.full((6,), 3)
    query_ids[0] = 3
    found = statistic(given, scale=2.0, query_ids=query_ids, key_ids=key_ids, implementation=implementation)
    first = found[0]
    empty = -torch.inf if first.ndim == 1 and statistic is not softplus else 0.0
    assert first[0].tolist() == (empty if first.ndim == 1 else [empty] * first.shape[1])
    assert first[1:].isfinite().all()
    incoming = torch.ones_like(first)
    incoming[0] = torch.nan if statistic is not softplus else 1.0
    gradients = torch.autograd.grad(first, given[:2], incoming)
    assert gradients[0][0].tolist() == [0.0] * 5
    assert all(x.isfinite().all() for x in gradients)
    if statistic is nearest:
        assert found[1][0] == -1 and found[1][1:].min() >= 0


@all_statistics
def test_second_derivatives_and_torch_func(statistic):
    """They use the definition, also if queries and keys are the same tensor."""
    x = unit_rows(6, 4)
    rest = inputs(6, 6, 4)[2:]

    def loss(x):
        found = statistic([x, x, *rest], scale=2.0)
        return sum(part.square().sum() for part in found if part.is_floating_point() and part.numel())

    if statistic not in (constant_key_bias, both_ways_detached):
        torch.autograd.gradgradcheck(loss, (x,))
    plain = torch.autograd.grad(loss(x), x)[0]
    torch.testing.assert_close(torch.func.grad(loss)(x.detach()), plain)
    # gradgradcheck alone would accept a gradient that counts twice.
    torch.testing.assert_close(torch.autograd.grad(loss(x), x, create_graph=True)[0], plain)


@all_statistics
def test_only_the_wanted_gradients(statistic):
    """Each input alone gets the same gradient as together with the others."""
    given, options = inputs(20, 40, 6), {"scale": 3.0, "implementation": "tiled"}
    count = len(STATISTICS[statistic])
    together = results(statistic, given, **options)[-count:]
    for place, expected in zip(STATISTICS[statistic], together):
        alone = [x.detach() for x in given]
        alone[place].requires_grad_()
        found = value_and_gradients(lambda alone=alone: statistic(alone, **options), [alone[place]])[-1]
        torch.testing.assert_close(found, expected)


@all_statistics
def test_compiles_into_one_graph(statistic):
    given = inputs(33, 40, 6)
    options = {"scale": 3.0, "query_ids": ids("many", 33), "key_ids": ids("many", 40)}
    expected = results(statistic, given, **options)
    torch.compiler.reset()
    compiled = torch.compile(lambda given: statistic(given, **options), fullgraph=True, backend="aot_eager")
    wanted = [given[n] for n in STATISTICS[statistic]]
    torch.testing.assert_close(value_and_gradients(lambda: compiled(given), wanted), expected)


@pytest.mark.slow
def test_operators_pass_torchs_opcheck():
    q, k, v, b, a, c = inputs(40, 36, 8)
    pairs = ids("one", 40), ids("one", 36)
    torch.library.opcheck(mean_operation.operator, (q, k, v, *pairs, b, 2.0, "tiled"))
    torch.library.opcheck(softplus_operation.operator, (q, k, *pairs, a, c, "tiled"))
    torch.library.opcheck(two_way_operation.operator, (q, k, *pairs, a, False, True, "tiled", None, False))


def test_mean_vectors_are_the_gradient_of_lse_and_project_to_the_mean():
    q, k, _, b, _, _ = inputs(30, 50, 6)
    given = {"scale": 4.0, "query_ids": ids("many", 30), "key_ids": ids("many", 50), "key_bias": b}
    means, rows = mean_vectors(q, k, **given), row_statistics(q, k, **given)
    torch.testing.assert_close((q * means).sum(1), rows.mean)
    torch.testing.assert_close(4 * means, torch.autograd.grad(rows.lse.sum(), q)[0])


def test_mean_vectors_at_the_ends_of_the_scale():
    """Scale 0 gives the mean of the keys, and a large scale the nearest key."""
    q, k = unit_rows(20, 6), unit_rows(40, 6)
    torch.testing.assert_close(mean_vectors(q, k, scale=0.0), k.mean(0).expand(20, 6))
    torch.testing.assert_close(mean_vectors(q, k, scale=1e6), k[nearest_keys(q, k)[1]])


def test_values_alone_get_a_gradient_with_constant_weights():
    """As the codes of SwAV and DINO's teacher, which get none."""
    q, k, v, b, _, _ = inputs(30, 50, 6)
    weights = torch.softmax(2 * q @ k.T + b, dim=1).detach()
    means = mean_vectors(q.detach(), k.detach(), values=v, key_bias=b.detach(), scale=2.0)
    torch.testing.assert_close(means, weights @ v)
    torch.testing.assert_close(torch.autograd.grad(means.sum(), v)[0], weights.sum(0)[:, None].expand(50, 5))


def test_a_bias_shifts_the_softmax():
    """The same bias for all keys shifts lse alone; a large bias selects its key."""
    q, k = unit_rows(20, 6), unit_rows(40, 6)
    plain = row_statistics(q, k, scale=3.0)
    shifted = row_statistics(q, k, scale=3.0, key_bias=torch.full((40,), 7.0, dtype=torch.float64))
    torch.testing.assert_close(shifted, (plain.lse + 7, plain.mean))
    chosen = torch.zeros(40, dtype=torch.float64)
    chosen[5] = 1e4
    torch.testing.assert_close(row_statistics(q, k, scale=3.0, key_bias=chosen).mean, q @ k[5])


def test_both_ways_are_the_statistics_of_the_matrix_and_its_transpose():
    q, k = unit_rows(50, 6), unit_rows(70, 6)
    query_ids, key_ids = ids("one", 50), ids("one", 70)
    rows, columns = two_way_statistics(q, k, scale=6.0, query_ids=query_ids, key_ids=key_ids)
    torch.testing.assert_close(rows, row_statistics(q, k, scale=6.0, query_ids=query_ids, key_ids=key_ids))
    torch.testing.assert_close(columns, row_statistics(k, q, scale=6.0, query_ids=key_ids, key_ids=query_ids))


def test_slopes_of_scale_and_bias():
    """d lse / d scale is the mean; the gradient of a sum of softplus is made of sigmoids."""
    q, k, _, _, _, _ = inputs(30, 50, 6)
    a, b = scalar(4.0), scalar(-1.0)
    for side, exact in enumerate(two_way_statistics(q, k, scale=4.0)):
        lse = two_way_statistics(q, k, scale=a, with_mean=False)[side].lse
        torch.testing.assert_close(torch.autograd.grad(lse.sum(), a)[0], exact.mean.sum())
    s = q @ k.T
    sigma = torch.sigmoid(4 * s - 1)
    slopes = torch.autograd.grad(softplus_sums(q, k, scale=a, bias=b).sum(), [a, b])
    torch.testing.assert_close(slopes, ((sigma * s).sum(), sigma.sum()))


def test_softplus_of_large_arguments_is_exact():
    q = torch.ones(1, 1, dtype=torch.float64)
    for x in (-700.0, -30.0, 0.0, 25.0, 1e4):
        exact = max(x, 0.0) + torch.log1p(torch.tensor(-abs(x), dtype=torch.float64).exp())
        for implementation in ("dense", "tiled"):
            found = softplus_sums(q, q, scale=x, implementation=implementation)
            torch.testing.assert_close(found[0], exact, rtol=1e-15, atol=0)


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
def test_the_first_of_equal_keys_is_nearest(implementation):
    k = torch.eye(4, dtype=torch.float64).repeat(30, 1)
    _, index = nearest_keys(k[:8], k, implementation=implementation)
    assert index.tolist() == [0, 1, 2, 3] * 2


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
def test_nearest_other_row(implementation):
    q = unit_rows(70, 6)
    similarity, index = nearest_keys(q, query_ids=torch.arange(70), implementation=implementation)
    s = (q @ q.T).detach().fill_diagonal_(-torch.inf)
    assert torch.equal(index, s.argmax(1))
    torch.testing.assert_close(similarity, s.amax(1))
    expected = torch.autograd.grad((q * q[index]).sum(1).square().sum(), q)
    torch.testing.assert_close(torch.autograd.grad(similarity.square().sum(), q), expected)
    assert not index.requires_grad


def test_what_is_not_allowed_is_refused():
    q, k = unit_rows(4, 3), unit_rows(5, 3)
    bias = torch.zeros(5)
    cases = [
        (lambda: row_statistics(q, scale=1.0, key_bias=bias[:4]), "key_bias is .*: give None without keys"),
        (lambda: row_statistics(q, k, scale=1.0, key_bias=bias[:4]), r"key_bias is .*: give \[5\]"),
        (lambda: mean_vectors(q, k, scale=1.0, key_bias=bias.long()), r"key_bias is .*: give \[5\]"),
        (lambda: mean_vectors(q, k, scale=1.0, values=q), r"values is .*: give \[5, width\]"),
        (lambda: mean_vectors(q, k, scale=scalar(1.0)), "scale is .*: give a plain number"),
        (lambda: mean_vectors(q, None, scale=1.0), "keys is None"),
        (lambda: softplus_sums(q, None, scale=1.0), "keys is None"),
        (lambda: softplus_sums(q, k, scale=torch.ones(2)), "scale is .*: give a number"),
        (lambda: softplus_sums(q, k, scale=1.0, bias=float("nan")), "bias is nan: give a finite number"),
        (lambda: two_way_statistics(q, None, scale=1.0), "keys is None"),
        (lambda: two_way_statistics(q, k, scale=float("inf")), "scale is inf: give a finite number"),
        (lambda: nearest_keys(q, k, query_ids=torch.arange(4)), "key_ids is None"),
        (lambda: softplus_sums(q, k, scale=1.0, implementation="triton"), "implementation is 'triton'"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.slow
def test_memory_is_linear():
    """12,000 queries and keys: their matrix has 549 MiB, and the tiles far less."""
    code = """
import resource, torch
from kontrast.kernels import *
torch.set_num_threads(1)
q, k = (torch.randn(12_000, 8).requires_grad_() for _ in range(2))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
a = torch.tensor(0.5, requires_grad=True)
rows, columns = two_way_statistics(q, k, scale=a)
loss = rows.lse.sum() + columns.mean.sum() + softplus_sums(q, k, scale=a).sum() + mean_vectors(q, k, scale=0.5).sum()
(loss + nearest_keys(q, k)[0].sum()).backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200
