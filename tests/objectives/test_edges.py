"""Edge cases of the objectives: second derivatives, lengths that overflow, casts, arguments out of range."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from kontrast.errors import UsageError
from kontrast.kernels import links
from kontrast.objectives import OBJECTIVES, Objective, metrics, objective

from support.objective_inputs import DETACHED_KEYS, possible_inputs, small_objective

# Weights that are constant by default get a gradient here, so that the gradient is the derivative of the value.
ATTACHED = {
    "dclw": {"detach": False},
    "cacr": {"detach_positive_weights": False},
    "sim-trace": {"variant": "paper", "ridge": 0.05},
    "sogclr": {"gamma": 1.0},
    "isogclr": {"gamma": 1.0},
    "zero-cl": {"detach": False},
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("images", [6, 120])  # from one matrix, and link by link
@pytest.mark.parametrize("name", OBJECTIVES)
def test_second_derivatives(name, images, monkeypatch) -> None:
    """By autograd.grad and by backward, they equal the difference of two gradients along one direction."""
    monkeypatch.setitem(links.SMALL, "cpu", 2**10)
    z, direction, step = draw(2, images, 4), draw(2, images, 4, seed=1), 1e-6
    loss, given = small_objective(name, z, **ATTACHED.get(name, {})), possible_inputs(name, z)[name in DETACHED_KEYS]
    state = copy.deepcopy(loss.state_dict())
    if name == "jcl":
        direction[1:] = 0  # its keys get no gradient

    def gradient(x: Tensor, graph: bool = False) -> Tensor:
        loss.load_state_dict(state)  # buffers change with each gradient
        x = x if graph else x.detach().requires_grad_()
        return torch.autograd.grad(loss(x, **given), x, create_graph=graph)[0]

    x = z.clone().requires_grad_()
    (gradient(x, graph=True) * direction).sum().backward()
    expected = (gradient(z + step * direction) - gradient(z - step * direction)) / (2 * step)
    torch.testing.assert_close(x.grad, expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item() + 1e-8)
    y = z.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad((gradient(y, graph=True) * direction).sum(), y)[0], x.grad)


def test_lengths_that_overflow_give_nan() -> None:
    """A run that diverges must not look healthy: the training loop checks for NaN."""
    z = draw(2, 6, 4).float()
    torch.testing.assert_close(objective("nt-xent")(1e15 * z), objective("nt-xent")(z))
    assert objective("nt-xent")(1e25 * z).isnan()


def test_terms_of_a_custom_objective_may_be_a_plain_dict_of_any_names() -> None:
    class Push(Objective):
        def contrast(self, pairs):
            return {"push": pairs.negatives(scale=2.0).lse, "pull": -pairs.positive}

    terms = Push().terms(draw(2, 6, 4))
    assert list(terms) == ["push", "pull", "repulsion"] and terms.repulsion == 0
    torch.testing.assert_close(Push()(draw(2, 6, 4)), terms.push + terms.pull)


def test_whitened_rows_of_half_precision_are_compared_in_float32() -> None:
    """With more dimensions than images the gradient is as small as the rounding of whitened rows in half precision."""
    made = torch.Generator().manual_seed(0)
    z = (torch.randn(64, 256, generator=made) + torch.randn(2, 64, 256, generator=made)).bfloat16()
    found = []
    for x in (z, z.double()):
        x = x.clone().requires_grad_()
        found.append(torch.autograd.grad(objective("sim-whitening")(x), x)[0].double())
    assert (found[0] - found[1]).norm() < 0.01 * found[1].norm()


@pytest.mark.parametrize("name", ["w-mse", "sim-trace", "sim-whitening"])
def test_a_relative_ridge_is_at_most_one(name) -> None:
    assert objective(name, ridge=1.0)(draw(2, 30, 4)).isfinite()
    with pytest.raises(UsageError, match=r"ridge is 1\.5"):
        objective(name, ridge=1.5)(draw(2, 30, 4))


def test_casts_do_not_round_lambda() -> None:
    loss, z = objective("jcl", covariance_weight=0.3), draw(3, 6, 4)
    expected = loss(z)
    torch.testing.assert_close(loss.bfloat16()(z), expected, rtol=0, atol=0)
    with torch.device("meta"):
        assert objective("jcl", covariance_weight=0.3).covariance_weight == 0.3


def test_equal_views_have_distance_zero_at_any_power() -> None:
    same = draw(1, 5, 4).expand(2, 5, 4)
    assert [metrics.alignment(same, power).item() for power in (0.5, 1.0, 2.0, 3.0)] == [0.0] * 4


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        ("info-nce", "temperature", 1e-308),
        ("jcl", "temperature", 1e308),
        ("hard-negative", "beta", 1e308),
        ("cacr", "t_minus", 1e308),
        ("align-uniform", "t", 1e308),
    ],
)
def test_arguments_whose_products_overflow_are_refused(name, argument, value) -> None:
    """They used to be accepted, and the first step overflowed."""
    with pytest.raises(UsageError, match=f"{argument} is .*: give a number between 1e-18 and 1e.18"):
        objective(name, **{argument: value})
    assert objective(name, **{argument: 0.5})(draw(3, 6, 4).float()).isfinite()
