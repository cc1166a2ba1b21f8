"""||A - A^T||_F without A: tiles and closed form equal the matrix in value and gradient."""

from __future__ import annotations

import pytest
import torch

from kontrast.kernels import symmetry
from kontrast.kernels.symmetry import root, squared_asymmetry


def dense(z, y):
    A = z @ y.T
    return torch.linalg.norm(A - A.T)


@pytest.mark.parametrize("method", ["tiles", "closed", "auto"])
@pytest.mark.parametrize(("N", "D"), [(2, 1), (7, 3), (33, 4)])
def test_both_forms_equal_the_norm(method, N, D, monkeypatch) -> None:
    monkeypatch.setattr(symmetry, "TILE", 5 * N)  # several blocks, the last one ragged
    z, y = torch.randn(2, N, D, dtype=torch.float64, requires_grad=True).unbind()
    ours, expected = root(squared_asymmetry(z, y, method=method), z.dtype), dense(z, y)
    torch.testing.assert_close(ours, expected)
    for gradient, truth in zip(torch.autograd.grad(ours, (z, y)), torch.autograd.grad(expected, (z, y))):
        torch.testing.assert_close(gradient, truth)


def test_rows_of_two_ranks_add_up() -> None:
    z, y = torch.randn(2, 10, 4, dtype=torch.float64)
    parts = [squared_asymmetry(z[rows], y[rows], z, y) for rows in (slice(0, 4), slice(4, 10))]
    torch.testing.assert_close(sum(parts), dense(z, y).square())


@pytest.mark.parametrize("method", ["tiles", "closed"])
def test_float32_near_symmetry_keeps_its_digits(method) -> None:
    """N=256, D=64, views 1e-3 apart: plain float32 is off in the third digit, float64 inside is not."""
    generator = torch.Generator().manual_seed(0)
    z = torch.nn.functional.normalize(torch.randn(256, 64, generator=generator), dim=-1)
    y = torch.nn.functional.normalize(z + 1e-3 * torch.randn(256, 64, generator=generator), dim=-1)
    ours = root(squared_asymmetry(z, y, method=method), torch.float64)
    torch.testing.assert_close(ours, dense(z.double(), y.double()), rtol=1e-7, atol=0)


@pytest.mark.parametrize("method", ["tiles", "closed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_symmetric_has_value_and_gradient_zero(method, dtype) -> None:
    z = torch.randn(40, 6, dtype=dtype, requires_grad=True)
    value = root(squared_asymmetry(z, z, method=method), dtype)
    assert value.item() == 0
    assert torch.autograd.grad(value, z)[0].abs().max().item() == 0


def test_closed_form_is_only_for_many_narrow_float32_rows(monkeypatch) -> None:
    """Without the tiles, only the closed form works."""
    monkeypatch.setattr(symmetry, "_SquaredProduct", None)
    narrow = torch.randn(2, 64, 2)
    squared_asymmetry(*narrow)
    for rows in (narrow.double(), torch.randn(2, 8, 16)):
        with pytest.raises(AttributeError):
            squared_asymmetry(*rows)
