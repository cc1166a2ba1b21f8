"""Objectives against the papers' definitions in float64, on random shapes, scales and types."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from kontrast.objectives import objective

from support.fuzzing import amounts, fuzz
from support.objective_definitions import CASES
from support.objective_inputs import extra_inputs

DIGITS = {
    torch.float64: (1e-8, 1e-8),
    torch.float32: (2e-4, 2e-4),
    torch.bfloat16: (5e-2, 5e-2),
    torch.float16: (1e-2, 1e-2),
}
WHITENED = ("w-mse", "sim-whitening", "sim-trace")


@pytest.mark.fault(22)
@amounts(5, 200)
@pytest.mark.parametrize("case", CASES, ids=[f"{name}-{n}" for n, (name, *_) in enumerate(CASES)])
def test_objectives_equal_their_definitions_on_any_rows(case, cases, tally):
    """Any number of images, any width, rows a million times longer or shorter, float64 to half: the paper's value."""
    name, arguments, definition, views = case
    loss = objective(name, **arguments)

    def attempt(V: int, B: int, D: int, seed: int, scale: float, dtype: torch.dtype, repeat: bool) -> None:
        if dtype == torch.float16:
            scale = min(max(scale, 1e-2), 1e2)  # its own range is smaller
        if name in WHITENED:
            B, scale = (
                B + 2 * D,
                1.0,
            )  # a ridge is added to the covariance: the scale and the rank are part of the value
        if not loss.normalize:
            scale = min(max(scale, 1e-2), 10.0)  # a value of 1e12 has no digits left to compare
        z = torch.randn(V, B, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        if repeat and name not in WHITENED:
            z[0, 1] = z[0, 0]
        z = (z * scale).to(dtype)
        given = z.clone().requires_grad_()
        ours, book = loss(given, **extra_inputs(name, z)), definition(z.double())
        rtol, atol = DIGITS[dtype]
        torch.testing.assert_close(ours.double(), book, rtol=rtol, atol=atol)
        assert bool(torch.isfinite(torch.autograd.grad(ours, given)[0]).all())

    drawn = {
        "V": st.sampled_from(views),
        "B": st.integers(3, 9),
        "D": st.integers(2, 7),
        "seed": st.integers(0, 2**31),
        "scale": st.sampled_from([1e-6, 1e-3, 1.0, 30.0, 1e3, 1e6]),
        "dtype": st.sampled_from(list(DIGITS)),
        "repeat": st.booleans(),
    }
    tally("fuzz cases", fuzz(cases, attempt, **drawn))
