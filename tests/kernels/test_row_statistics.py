"""Definition, tiled torch and operator are equal in value and gradient, exact at the edges and linear in memory."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from kontrast.kernels import RowStatistics, merge, row_statistics, tiled
from kontrast.kernels.operator import statistics_operator


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiled, "TILE", 32)
    torch.manual_seed(0)


def rows(count, width, kind=torch.float64):
    return normalize(torch.randn(count, width, dtype=torch.float64), dim=1).to(kind).requires_grad_()


def ids(kind, count):
    """Return ids that are shared by no, one or many other rows, or None."""
    return {
        "absent": None,
        "none": torch.arange(count),
        "one": torch.arange(count) // 2 - 2**40,
        "many": torch.arange(count) % 3,
    }[kind]


def results(implementation, queries, keys, **arguments):
    """Return lse, mean and the gradients of a random combination of both."""
    found = row_statistics(queries, keys, implementation=implementation, **arguments)
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(2, *found.lse.shape, generator=generator).to(found.lse.dtype)
    loss = (weights[0] * found.lse.masked_fill(found.lse.isneginf(), 0)).sum()
    if found.mean.shape[-1]:
        loss = loss + (weights[1] * found.mean).sum()
    gradients = torch.autograd.grad(loss, [queries] if keys is None else [queries, keys])
    return [found.lse.detach(), found.mean.detach(), *gradients]


SCALES = [1e-3, 1.0, 10.0, 100.0, 1e3, 0.0, -5.0, [2.0, 4.0], [0.5, -40.0, 300.0]]


@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("kind", ["absent", "none", "one", "many"])
@pytest.mark.parametrize(("M", "K"), [(70, None), (33, 101)])
def test_tiled_is_the_definition(M, K, kind, scale):
    q, k = rows(M, 17), None if K is None else rows(K, 17)
    given = {"query_ids": ids(kind, M), "key_ids": None if K is None else ids(kind, K), "scale": scale}
    for detached in (False, True):
        expected = results("dense", q, k, detach_weights=detached, **given)
        torch.testing.assert_close(results("tiled", q, k, detach_weights=detached, **given), expected)
    lse_alone = row_statistics(q, k, with_mean=False, **given)
    torch.testing.assert_close(lse_alone.lse, expected[0])
    assert lse_alone.mean.numel() == 0


@pytest.mark.parametrize("D", [1, 3, 17, 64, 128, 130, 512, 2048])
@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_widths_and_types(D, kind, tolerance):
    q = rows(65, D, kind)
    exact = results("dense", q.detach().double().requires_grad_(), None, scale=5.0, query_ids=ids("one", 65))
    for implementation in ("dense", "tiled"):
        found = results(implementation, q, None, scale=5.0, query_ids=ids("one", 65))
        assert found[0].dtype == torch.float32 and found[2].dtype == kind
        for part, truth in zip(found, exact):
            assert (part.double() - truth).norm() <= tolerance * truth.norm()


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
@pytest.mark.parametrize("detached", [False, True])
def test_gradcheck(implementation, detached):
    q, k = rows(9, 4), rows(7, 4)

    def statistics(q, k):
        given = {"scale": [3.0, -60.0], "implementation": implementation, "detach_weights": detached}
        found = row_statistics(q, k, query_ids=ids("many", 9), key_ids=ids("many", 7), **given)
        own = row_statistics(q, None, query_ids=ids("one", 9), **given)
        # The gradient of a detached mean is not its derivative, so gradcheck can only check the lse.
        return (found.lse, own.lse) if detached else (*found, *own)

    torch.autograd.gradcheck(statistics, (q, k))


def test_detached_mean_has_the_gradient_of_constant_weights():
    q = rows(8, 3)
    affinity = q @ q.T
    weights = torch.softmax(2 * affinity, dim=1).detach()
    expected = torch.autograd.grad((weights * affinity).sum(), q)[0]
    for implementation in ("dense", "tiled"):
        mean = row_statistics(q, None, scale=2.0, detach_weights=True, implementation=implementation).mean
        torch.testing.assert_close(torch.autograd.grad(mean.sum(), q)[0], expected)


def test_mean_is_the_slope_of_lse():
    q, step = rows(40, 6), 1e-6
    above, below = (row_statistics(q, None, scale=4 + d, query_ids=ids("one", 40)).lse for d in (step, -step))
    slope = (above - below) / (2 * step)
    torch.testing.assert_close(row_statistics(q, None, scale=4.0, query_ids=ids("one", 40)).mean, slope)


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
def test_a_row_without_pairs(implementation):
    q = rows(40, 5)
    alone = torch.full((40,), 3)
    alone[1:] = torch.arange(1, 40) + 10
    key_ids = torch.full((6,), 3)
    found = row_statistics(
        q, rows(6, 5), scale=[2.0, 200.0], query_ids=alone, key_ids=key_ids, implementation=implementation
    )
    assert found.lse[:, 0].tolist() == [-torch.inf] * 2 and found.mean[:, 0].tolist() == [0, 0]
    # Even if its incoming gradient is NaN, as that of exp(lse - lse) would be.
    gradient = torch.autograd.grad(found, q, [torch.full_like(found.lse, torch.nan), torch.ones_like(found.mean)])[0]
    assert gradient[0].tolist() == [0.0] * 5


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [2.0, 100.0, 1000.0])
def test_hard_inputs_stay_finite(kind, scale):
    e = torch.eye(64, 8)
    hard = torch.cat([e[:1].repeat(20, 1), -e[:1].repeat(20, 1), torch.zeros(20, 8), torch.randn(20, 8)]).to(kind)
    hard.requires_grad_()
    for implementation in ("dense", "tiled"):
        for part in results(implementation, hard, None, scale=[scale, -scale], query_ids=ids("one", 80)):
            assert part.isfinite().all()


@pytest.mark.parametrize("detached", [False, True])
def test_merge_of_random_segments_is_the_whole(detached):
    q, k = rows(30, 6), rows(90, 6)
    given = {"scale": [3.0, 80.0], "detach_weights": detached}
    own_ids, key_ids = ids("many", 30), ids("many", 90)
    whole = row_statistics(q, k, query_ids=own_ids, key_ids=key_ids, **given)
    cuts = [0, *sorted(torch.randint(1, 90, (4,)).unique().tolist()), 90]
    segments = [
        row_statistics(q, k[a:b], query_ids=own_ids, key_ids=key_ids[a:b], **given) for a, b in itertools.pairwise(cuts)
    ]
    nothing = row_statistics(q, k[:1], query_ids=own_ids * 0, key_ids=key_ids[:1] * 0, **given)
    assert nothing.lse.isneginf().all()
    merged = merge([nothing, *segments, nothing], detach_weights=detached)
    torch.testing.assert_close(merged, whole)
    loss = [(found.lse.sum() + found.mean.square().sum()) for found in (merged, whole)]
    torch.testing.assert_close(*(torch.autograd.grad(part, [q, k]) for part in loss))


def test_merge_of_empty_segments():
    lse = torch.full((3,), -torch.inf, requires_grad=True)
    mean = torch.zeros(3, requires_grad=True)
    found = merge([RowStatistics(lse, mean)] * 2)
    assert found.lse.isneginf().all() and found.mean.tolist() == [0, 0, 0]
    gradients = torch.autograd.grad(found.mean.sum(), [lse, mean])
    assert all(gradient.tolist() == [0, 0, 0] for gradient in gradients)


def test_merge_without_means():
    q = rows(10, 4)
    halves = [row_statistics(q, part, scale=2.0, with_mean=False) for part in (q[:5], q[5:])]
    torch.testing.assert_close(merge(halves).lse, row_statistics(q, None, scale=2.0).lse)


@pytest.mark.parametrize("keyed", [False, True])
def test_operator_passes_torchs_opcheck(keyed):
    q, k = rows(40, 8), rows(36, 8) if keyed else None
    bias = torch.randn(36, dtype=torch.float64, requires_grad=True) if keyed else None
    given = (q, k, ids("one", 40), ids("one", 36) if keyed else None, [2.0, 3.0], False, True, "tiled", bias, False)
    torch.library.opcheck(statistics_operator, given)


@pytest.mark.parametrize("mean", [False, True])
def test_compiles_into_one_graph(mean):
    def loss(q, k, query_ids, key_ids):
        found = row_statistics(q, None, scale=2.0, query_ids=query_ids)
        other = row_statistics(q, k, scale=[2.0, 3.0], query_ids=query_ids, key_ids=key_ids)
        return found.lse.sum() + other.lse.sum() + (other.mean.sum() if mean else 0.0)

    q, k = rows(40, 8), rows(36, 8)
    arguments = (q, k, ids("one", 40), ids("one", 36))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), loss(*arguments))
    torch.testing.assert_close(*(torch.autograd.grad(f(*arguments), [q, k]) for f in (compiled, loss)))


def test_detached_keys_get_no_gradient():
    q, k = rows(40, 8), rows(36, 8).detach()
    expected = results("dense", q, k.clone().requires_grad_(), scale=2.0)[2]
    found = row_statistics(q, k, scale=2.0)
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(2, 40, generator=generator).double()
    (weights[0] * found.lse + weights[1] * found.mean).sum().backward()
    torch.testing.assert_close(q.grad, expected)
    assert k.grad is None


PEAK = """
import torch
from kontrast.kernels import row_statistics
torch.set_num_threads(1)
def high_water():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM"))
def step(count):
    z = torch.nn.functional.normalize(torch.randn(count, 32), dim=1).requires_grad_()
    row_statistics(z, None, scale=10.0, query_ids=torch.arange(count) // 2).lse.sum().backward()
step(64)
before = high_water()
step(6144)
print((high_water() - before) / 1024)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the process's high-water mark from /proc")
def test_memory_is_linear():
    """The whole matrix of 6,144 rows would be 144 MiB; forward and backward with their inputs stay far under it."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 40


BAD = {
    "implementation": ({"implementation": "cuda"}, "implementation is 'cuda'"),
    "no rows": ({"queries": torch.zeros(0, 4)}, r"shape \[0, 4\]"),
    "vector": ({"queries": torch.zeros(4)}, r"shape \[4\]"),
    "integers": ({"queries": torch.zeros(4, 4, dtype=torch.int64)}, "int64"),
    "width": ({"keys": torch.zeros(4, 3)}, r"keys is .*shape \[4, 3\]"),
    "type": ({"keys": torch.zeros(4, 4, dtype=torch.float64)}, "keys is torch.float64"),
    "one side": ({"keys": torch.zeros(4, 4), "query_ids": torch.arange(4)}, "key_ids is None"),
    "key ids alone": ({"key_ids": torch.arange(4)}, "key_ids is torch.int64"),
    "length of ids": ({"query_ids": torch.arange(3)}, r"give \[4\] int64"),
    "type of ids": ({"query_ids": torch.arange(4.0)}, "int64"),
    "no scale": ({"scale": []}, "at least one"),
    "an array": ({"queries": np.zeros((4, 4))}, "queries is ndarray"),
    "infinite scale": ({"scale": float("inf")}, "finite"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name):
    given, message = BAD[name]
    arguments = {"queries": torch.zeros(4, 4), "keys": None, "scale": 1.0, **given}
    with pytest.raises(ValueError, match=message):
        row_statistics(arguments.pop("queries"), arguments.pop("keys"), **arguments)
