"""The Triton kernels for small batches and unit rows equal their definitions, in Triton's interpreter."""

import pytest
import torch

from kontrast.kernels import small_batch
from kontrast.kernels.triton_unit_launch import triton_unit_backward, triton_unit_forward
from kontrast.kernels.unit_rows import define_unit_rows, unit_gradient
from kontrast.kernels.view_links import ALL, LATER, cases_of_links
from kontrast.objectives import objective

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def compare(found, truth, tolerance=1e-5):
    for part, expected in zip(found, truth):
        assert part.isfinite().all()
        assert (part.double() - expected.double()).norm() <= tolerance * max(1e-3, expected.double().norm())


@pytest.mark.parametrize(("kind", "V", "W", "type_"), [
    (0, 3, 2, torch.float32), (1, 2, None, torch.float16), (2, 2, None, torch.float32), (3, 3, 2, torch.float16),
    (4, 2, None, torch.float16),
])  # fmt: skip
def test_each_case_of_links_once(kind, V, W, type_):
    """float32 uses a stored matrix, half precision a kernel that computes it."""
    check_views(kind, (V, W, 7, 19 if W else 7, 5), ([5.0, -1.0], True, False, True), type_)


@pytest.mark.slow
@pytest.mark.parametrize("type_", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", range(5))
@pytest.mark.parametrize("shape", [(2, None, 19, 19, 5), (3, 2, 7, 70, 20)])
@pytest.mark.parametrize("options", [
    ([2.0], False, False, False), ([5.0, -1.0], True, False, True), ([10.0], True, True, False),
])  # fmt: skip
def test_views_equal_the_definition(kind, shape, options, type_):
    check_views(kind, shape, options, type_)


def check_views(kind, shape, options, type_):
    """Compare the statistics of views with their definition in float64."""
    (V, W, B, N, D), (scales, with_mean, detach, labels) = shape, options
    tolerance = 1e-5 if type_ == torch.float32 else 4e-3
    torch.manual_seed(0)
    q, k = (None if n is None else (torch.randn(n, m, D) / D**0.5).to(type_) for n, m in ((V, B), (W, N)))
    if kind == LATER and W is not None and V != W:
        pytest.skip("later views are compared without a teacher only")
    start = 0 if k is None else N - B
    ids = (None, None)
    if labels:
        ids = (torch.randint(0, 5, (B,)),) * 2 if k is None else tuple(torch.randint(0, 5, (n,)) for n in (B, N))
    count = V if kind == ALL else len(cases_of_links(V, W or V)[kind])
    results = []
    for compute, precision in ((small_batch.small_definition, torch.float64), (small_batch.small_batch, type_)):
        sides = [side.to(precision).requires_grad_() for side in (q, k) if side is not None]
        arguments = *ids, kind, count, start, scales, detach, with_mean, len(scales) == 1
        lse, mean = compute(sides[0], sides[1] if k is not None else None, *arguments)
        weights = torch.rand(lse.shape, generator=torch.Generator().manual_seed(1)) + 0.5
        empty = lse.isneginf()
        loss = (weights * lse.masked_fill(empty, 0)).sum()
        if with_mean:
            loss = loss + (weights.flip(-1) * mean).sum()
        gradients = torch.autograd.grad(loss, sides)
        results.append([lse.detach().masked_fill(empty, 0), mean.detach(), *gradients])
    compare(results[1], results[0], tolerance)


def test_gradients_of_expanded_statistics_need_no_copy():
    """The gradient of a mean has strides of zero."""
    torch.manual_seed(0)
    z = torch.randn(2, 20, 8).requires_grad_()
    found = [
        torch.autograd.grad(compute(z, None, None, None, 0, 2, 0, [1.0], False, False, True)[0].mean(), z)[0]
        for compute in (small_batch.small_batch, small_batch.small_definition)
    ]
    compare(found[:1], found[1:])


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{}, {"symmetric": True}])
@pytest.mark.parametrize("name", ["nt-xent", "info-nce", "dcl", "cacr"])
@pytest.mark.parametrize(("V", "W"), [(2, None), (3, None), (2, 2)])
def test_objectives_in_one_function_equal_the_parts(name, arguments, V, W, monkeypatch):
    """Unit rows, similarities, statistics and attraction in one autograd function, and each by itself."""
    if arguments and name != "info-nce":
        pytest.skip("only InfoNCE is symmetric or not")
    torch.manual_seed(0)
    z, given = torch.randn(V, 6, 5), {} if W is None else {"keys": torch.randn(W, 6, 5)}
    found = []
    for most in (small_batch.SMALL, 0):
        monkeypatch.setattr(small_batch, "SMALL", most)
        rows = z.clone().requires_grad_()
        loss = objective(name, **arguments)(rows, **given)
        found.append([loss.detach(), *torch.autograd.grad(loss, rows)])
    compare(*found)


SHAPES = [(2, None, 9, 19), *(pytest.param(*s, marks=pytest.mark.slow) for s in ((3, None, 5, 600), (1, 4, 6, 16)))]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("V", "W", "B", "D"), [*SHAPES, (3, 2, 7, 8)])
def test_unit_rows_equal_the_definition(V, W, B, D, normalize):
    torch.manual_seed(0)
    z, keys = torch.randn(V, B, D), None if W is None else torch.randn(W, B, D)
    z[0, 0] = 0
    units, key_units, similarities = triton_unit_forward(z, keys, normalize)
    expected = define_unit_rows(z.double(), None if keys is None else keys.double(), normalize)
    compare([units, similarities], [expected.z, expected.similarities])
    if keys is not None:
        compare([key_units], [expected.keys])
    grads = torch.randn(V, B, D), torch.randn(similarities.shape[::-1]).T
    for given in (grads, (grads[0], None), (None, grads[1])):
        wide = [None if grad is None else grad.double() for grad in given]
        found = triton_unit_backward(z, keys, *given, normalize)
        compare([found], [unit_gradient(z.double(), None if keys is None else keys.double(), *wide, normalize)])


LOSSES = [
    ("nt-xent", {}), ("info-nce", {}), ("info-nce", {"symmetric": True}), ("dcl", {}),
    ("dcl", {"negatives": "cross-view"}), ("multi-view-nce", {}), ("decoupled-nt-xent", {"loss_scale": 2.0}),
    ("cacr", {}), ("cacr", {"symmetric": True, "repulsion": "reversed"}), ("cacr", {"negatives": "same-view"}),
    ("cacr", {"detach_negative_weights": True}), ("hard-negative", {}), ("hard-negative", {"tau_plus": 0.0}),
    ("hard-negative", {"tau_plus": 0.6, "temperature": 0.1}),
    ("sim-whitening", {}), ("sim-affinity", {}), ("sim-affinity", {"symmetric": True, "normalize_by_n": True}),
]  # fmt: skip


TELLING = [4, 6, 9, 11, 15]  # one of each repulsion and of each case of links
MORE = [
    pytest.param(*case, small_batch.SMALL, marks=[] if n in TELLING else pytest.mark.slow)
    for n, case in enumerate(LOSSES)
]


LARGE = [pytest.param(*case, 0) for case in (LOSSES[0], LOSSES[3], LOSSES[6])]


@pytest.mark.parametrize(("name", "arguments", "small"), [*MORE, *LARGE])
def test_loss_of_two_views_equals_the_definition(name, arguments, small, monkeypatch):
    """One function for the whole loss, of two tensors or of one, against the objective's own definition in float64."""
    monkeypatch.setattr(small_batch, "SMALL", small)
    torch.manual_seed(0)
    # Some close pairs, some that are not: with HN-CL some rows are at the floor of N and some above it.
    z = torch.randn(2, 19, 5)
    z[1] += torch.linspace(0, 3, 19)[:, None] * z[0]
    loss = objective(name, **arguments)
    exact = z.double().requires_grad_()
    truth = loss(exact)
    slope = torch.autograd.grad(truth, exact)[0]
    monkeypatch.setattr(loss, "contrast", lambda pairs: pytest.fail("not in one function"))
    for kind, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-2)):
        views = [view.to(kind).requires_grad_() for view in z]
        found = loss(*views)
        compare([found.detach(), torch.stack(torch.autograd.grad(found, views))], [truth.detach(), slope], tolerance)
    joined = z.clone().requires_grad_()
    compare(torch.autograd.grad(loss(joined), joined), [slope])


@pytest.mark.parametrize(("name", "arguments"), [pytest.param(*LOSSES[11], marks=pytest.mark.slow), LOSSES[15]])
def test_second_derivative_of_the_loss_of_two_views(name, arguments):
    torch.manual_seed(0)
    z, loss, found = torch.randn(2, 6, 5), objective(name, **arguments), []
    for kind in (torch.float32, torch.float64):
        views = [view.to(kind).requires_grad_() for view in z]
        slopes = torch.autograd.grad(loss(*views), views, create_graph=True)
        found.append(torch.autograd.grad(sum(slope.square().sum() for slope in slopes), views))
    compare(*found, tolerance=1e-4)


def test_nan_in_the_second_view_is_refused():
    z = torch.randn(2, 6, 5)
    z[1, 2, 3] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        objective("nt-xent")(*z)
