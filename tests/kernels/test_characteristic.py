"""Sums of cosines and sines of projected rows: chunks of rows equal the definition, and store little."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kontrast.kernels import characteristic
from kontrast.kernels.characteristic import characteristic_sums, distance_to_normal
from kontrast.kernels.projections import gaussian_and_prior, unit_directions


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("held", [1, 40, 2**16])  # one row at a time, several chunks of which the last is short, all
@pytest.mark.parametrize("knots", [2, 3, 17])
def test_chunks_equal_the_definition(held, knots, monkeypatch) -> None:
    """In value, gradient and second derivative."""
    monkeypatch.setitem(characteristic.CHUNK, "cpu", held)
    directions, found = draw(4, 5, seed=1), []
    for implementation in ("dense", "tiled"):
        rows = draw(3, 11, 5).requires_grad_()
        sums = characteristic_sums(rows, directions, knots=knots, largest=2.5, implementation=implementation)
        loss = (sums * draw(*sums.shape, seed=2)).sum()
        (plain,) = torch.autograd.grad(loss, rows, retain_graph=True)
        (gradient,) = torch.autograd.grad(loss, rows, create_graph=True)
        (second,) = torch.autograd.grad(gradient.pow(3).sum(), rows)
        found.append((sums.detach(), plain, gradient.detach(), second))
    torch.testing.assert_close(*found)


def test_sums_are_those_of_their_rows() -> None:
    rows, directions = draw(2, 4, 3), draw(5, 3, seed=1)
    sums = characteristic_sums(rows, directions, knots=4, largest=1.5)
    for v in range(2):
        for s in range(5):
            for k in range(4):
                angles = [0.5 * k * float(rows[v, i] @ directions[s]) for i in range(4)]
                assert sums[0, v, s, k].item() == pytest.approx(sum(map(math.cos, angles)), abs=1e-12)
                assert sums[1, v, s, k].item() == pytest.approx(sum(map(math.sin, angles)), abs=1e-12)


def test_float32_stays_close_for_large_projections() -> None:
    """The last knot is a product of sixteen factors, whose errors must not grow."""
    rows, directions = 10 * draw(2, 300, 8), unit_directions(32, 8, 0, torch.tensor(0))
    exact = characteristic_sums(rows, directions, knots=17, largest=3.0)
    ours = characteristic_sums(rows.float(), directions.float(), knots=17, largest=3.0)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double() / 300, exact / 300, rtol=0, atol=1e-5)


def test_the_backward_pass_stores_no_projections() -> None:
    rows, directions, stored = draw(2, 512, 8).requires_grad_(), draw(256, 8, seed=1), []

    def count(x: Tensor) -> Tensor:
        stored.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        distance_to_normal(characteristic_sums(rows, directions, knots=17, largest=3.0), 512, 3.0).mean().backward()
    assert sum(stored) < 2 * 512 * 256 < 2 * 512 * 256 * 17


def test_directions_get_no_gradient() -> None:
    rows, directions = draw(2, 6, 3).requires_grad_(), draw(4, 3, seed=1).requires_grad_()
    for implementation in ("dense", "tiled"):
        sums = characteristic_sums(rows, directions, knots=5, largest=3.0, implementation=implementation)
        assert torch.autograd.grad(sums.sum(), directions, allow_unused=True) == (None,)


def test_unit_directions_are_fresh_rows_of_the_sphere() -> None:
    first, again, later, other = (
        unit_directions(7, 5, seed, torch.tensor(step)) for seed, step in ((0, 3), (0, 3), (0, 4), (1, 3))
    )
    torch.testing.assert_close(first.norm(dim=1), torch.ones(7, dtype=torch.float64))
    assert torch.equal(first, again) and not torch.isin(first, torch.stack([later, other])).any()
    assert torch.equal(first, gaussian_and_prior("hypersphere", 7, 5, 0, torch.tensor(3))[1])
    assert unit_directions(7, 5, 0, torch.tensor(3), torch.float32).dtype == torch.float32
