"""||A - A^T||_F without A: tiles and closed form equal the matrix in value and gradient."""

from __future__ import annotations

import pytest
import torch

from kontrast.kernels import symmetry
from kontrast.kernels.covariance import identity
from kontrast.kernels.symmetry import asymmetry, asymmetry_by_definition


def dense(z, y):
    A = z @ y.T
    return torch.linalg.norm(A - A.T)


@pytest.mark.parametrize("method", ["tiles", "closed", "auto"])
@pytest.mark.parametrize(("N", "D"), [(2, 1), (7, 3), (33, 4)])
def test_both_forms_equal_the_norm(method, N, D, monkeypatch) -> None:
    monkeypatch.setattr(symmetry, "TILE", 5 * N)  # several blocks, the last one ragged
    z, y = torch.randn(2, N, D, dtype=torch.float64, requires_grad=True).unbind()
    ours, expected = asymmetry(z, y, method=method), dense(z, y)
    torch.testing.assert_close(ours, expected)
    for gradient, truth in zip(torch.autograd.grad(ours, (z, y)), torch.autograd.grad(expected, (z, y))):
        torch.testing.assert_close(gradient, truth)


@pytest.mark.parametrize("method", ["tiles", "closed"])
@pytest.mark.parametrize("block", [10_000, 30])
def test_ranks_add_up(method, block, monkeypatch) -> None:
    """Each of two ranks gives the norm of both, and the gradients of its own rows and of everyone's."""
    monkeypatch.setattr(symmetry, "TILE", block)
    z, y = torch.randn(2, 10, 4, dtype=torch.float64, requires_grad=True).unbind()
    expected = dense(z, y)
    ranks = (slice(0, 4), slice(4, 10))
    squares = [asymmetry(z[r], y[r], z, y, method=method).detach().square() for r in ranks]
    own, everyone = [torch.zeros_like(z) for _ in range(2)], [torch.zeros_like(z) for _ in range(2)]
    for n, r in enumerate(ranks):
        rows = [x.detach().clone().requires_grad_() for x in (z[r], y[r], z, y)]
        other = iter([squares[1 - n], 0.0])  # what the other rank adds to the square, and to the gradient of the norm
        norm = asymmetry(*rows, total=lambda x, other=other: x + next(other), method=method)
        torch.testing.assert_close(norm, expected)
        grads = torch.autograd.grad(norm, rows)
        for total, part in zip(own, grads[:2]):
            total[r] += part
        for total, part in zip(everyone, grads[2:]):
            total += part
    for parts in zip(own, everyone, torch.autograd.grad(expected, (z, y))):
        torch.testing.assert_close(parts[0] + parts[1], parts[2])


@pytest.mark.parametrize("method", ["tiles", "closed"])
def test_few_operations_equal_the_definition(method) -> None:
    """In value, gradient and second derivative, with rows of all ranks and without."""
    rows = torch.randn(4, 7, 3, dtype=torch.float64, requires_grad=True)
    for count in (2, 4):
        inputs = [*rows[:count].unbind(), *[None] * (4 - count)]
        ours, expected = (
            asymmetry(*inputs, method=method), asymmetry_by_definition(*inputs, identity, method)
        )  # fmt: skip
        torch.testing.assert_close(ours, expected)
        grads = [torch.autograd.grad(norm, rows, retain_graph=True)[0] for norm in (ours, expected)]
        torch.testing.assert_close(*grads)
    pair = [x.detach().requires_grad_() for x in rows[:2]]
    assert torch.autograd.gradgradcheck(lambda z, y: asymmetry(z, y, method=method), pair)


@pytest.mark.parametrize("method", ["tiles", "closed"])
def test_float32_near_symmetry_keeps_its_digits(method) -> None:
    """N=256, D=64, views 1e-3 apart: plain float32 is off in the third digit, float64 inside is not."""
    generator = torch.Generator().manual_seed(0)
    z = torch.nn.functional.normalize(torch.randn(256, 64, generator=generator), dim=-1)
    y = torch.nn.functional.normalize(z + 1e-3 * torch.randn(256, 64, generator=generator), dim=-1)
    ours = asymmetry(z, y, method=method).double()
    torch.testing.assert_close(ours, dense(z.double(), y.double()), rtol=1e-7, atol=0)


@pytest.mark.parametrize("method", ["tiles", "closed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_symmetric_has_value_and_gradient_zero(method, dtype) -> None:
    z = torch.randn(40, 6, dtype=dtype, requires_grad=True)
    value = asymmetry(z, z, method=method)
    assert value.item() == 0
    assert torch.autograd.grad(value, z)[0].abs().max().item() == 0


def test_closed_form_is_only_for_many_narrow_float32_rows(monkeypatch) -> None:
    """Without the tiles, only the closed form works."""
    monkeypatch.setattr(symmetry, "tiled_norm", None)
    narrow = torch.randn(2, 64, 2)
    asymmetry(*narrow)
    for rows in (narrow.double(), torch.randn(2, 8, 16)):
        with pytest.raises(TypeError):
            asymmetry(*rows)
