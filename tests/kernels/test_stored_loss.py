"""The loss of two views in few operations on the CPU: the same value and gradient as its terms."""

from __future__ import annotations

import pytest
import torch

from kontrast.kernels import two_view_loss
from kontrast.kernels.stored_loss import StoredLossFunction
from kontrast.objectives import objective

LOSSES = {"nt-xent": {"temperature": 0.2}, "dcl": {"temperature": 0.1}, "decoupled-nt-xent": {"temperature": 0.5}}


def views(kind=torch.float64, images=7, width=5):
    z = torch.randn(2, images, width, dtype=kind, generator=torch.Generator().manual_seed(0))
    z[1, 2] = 0  # a row that can't be normalized
    return z.requires_grad_()


def gradient(value, z, **options):
    return torch.autograd.grad(value, z, **options)[0]


@pytest.fixture
def calls(monkeypatch):
    """How often the function ran."""
    counted = []

    class Counted(StoredLossFunction):
        @staticmethod
        def forward(ctx, *inputs):
            counted.append(inputs)
            return StoredLossFunction.forward(ctx, *inputs)

    monkeypatch.setattr(two_view_loss, "StoredLossFunction", Counted)
    return counted


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("stacked", [True, False])
def test_value_and_gradients_are_those_of_the_terms(name, stacked, calls):
    loss, z = objective(name, **LOSSES[name]), views()
    inputs = (z,) if stacked else (z[0], z[1])
    value, terms = loss(*inputs), loss.terms(*inputs).total
    assert len(calls) == 1
    torch.testing.assert_close(value, terms, rtol=1e-13, atol=0)
    torch.testing.assert_close(gradient(3 * value, z), gradient(3 * terms, z), rtol=1e-11, atol=1e-13)
    z = torch.where(z == 0, 1.0, z)  # the length of zero has no second derivative
    inputs = (z,) if stacked else (z[0], z[1])
    once, twice = (gradient(x, z, create_graph=True) for x in (loss(*inputs), loss.terms(*inputs).total))
    torch.testing.assert_close(
        gradient(once.square().sum(), z), gradient(twice.square().sum(), z), rtol=1e-10, atol=1e-12
    )


def test_both_views_get_their_own_gradient():
    z = views(torch.float32)
    first, second = z[0].detach().requires_grad_(), z[1].detach().requires_grad_()
    loss = objective("nt-xent")
    loss(first, second).backward()
    torch.testing.assert_close(torch.stack([first.grad, second.grad]), gradient(loss(z), z))


def test_a_row_whose_length_overflows_makes_the_loss_nan(calls):
    z = views(torch.float32).detach().clone()
    z[0, 3] = 3e38
    assert objective("nt-xent")(z).isnan() and calls


@pytest.mark.parametrize(
    "case", ["half precision", "a large batch", "a temperature below 1/40", "a learned temperature", "three views"]
)
def test_other_inputs_are_left_to_the_kernels(case, calls):
    z = views(torch.bfloat16 if case == "half precision" else torch.float32)
    z = views(torch.float32, images=600, width=2) if case == "a large batch" else z
    z = torch.cat([z, z[:1]]) if case == "three views" else z
    temperature = {"a temperature below 1/40": 0.02, "a learned temperature": "learned"}.get(case, 0.2)
    assert objective("nt-xent", temperature=temperature)(z).isfinite() and not calls
