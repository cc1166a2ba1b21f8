"""Every argument of every objective: right in value and gradient, whatever kind of number it is given as, or refused.

V views, B images, D width.  z [V,B,D], keys [2,B,D], bank [M,D].
"""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kontrast.objectives import OBJECTIVES, metrics, objective

from support.objective_inputs import extra_inputs, possible_inputs, small_objective

ARGUMENTS = [(name, argument) for name in sorted(OBJECTIVES) for argument in OBJECTIVES.arguments(name)]
NUMBERS = [
    (name, argument)
    for name, argument in ARGUMENTS
    if isinstance(OBJECTIVES.arguments(name)[argument].default, float)
    or argument in ("clamp", "ridge", "bias", "margin")
    or (name, argument) == ("siglip", "temperature")
]
CONSTANT = {
    "ridge", "covariance_weight", "epsilon", "teacher_temperature", "center_momentum", "gamma", "largest", "eps",
    "smoothing",
}  # fmt: skip
"""Arguments that get no gradient where they are not `VICReg`'s; a tensor that requires grad is refused."""
WHOLE = [(n, a) for n, a in ARGUMENTS if type(OBJECTIVES.arguments(n)[a].default) is int]
GIVEN_WITH = {"rbf_t": {"cost": "rbf"}, "clamp": {"detach": False}, "bias": {"temperature": 0.1}}
"""Further arguments, without which an argument has no effect, or with which it is the only parameter."""


def given_with(name: str, argument: str) -> dict:
    return {"bias": -5.0} if (name, argument) == ("siglip", "temperature") else GIVEN_WITH.get(argument, {})


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def default(name: str, argument: str) -> float:
    value = OBJECTIVES.arguments(name)[argument].default
    return (
        value
        if isinstance(value, float)
        else {"clamp": 1.1, "ridge": 0.01, "temperature": 0.1, "bias": -5.0, "margin": 0.5}[argument]
    )


def constant(name: str, argument: str) -> bool:
    if name == "isogclr" or (name, argument) == ("sogclr", "temperature"):
        return True
    return argument in CONSTANT and name != "vicreg"


TRAINED = [(name, argument) for name, argument in NUMBERS if not constant(name, argument)]


def calls(name: str) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Return two views and three views, each alone, with keys, with keys and a bank, and with labels."""
    given = possible_inputs(name, draw(2, 5, 4))
    given += [given[0] | {"labels": torch.tensor([3, 1, 3, 0, 1])}] * OBJECTIVES[name].takes_labels
    return [(draw(views, 5, 4, seed=views), each) for views in (2, 3) for each in given]


@pytest.mark.parametrize(("name", "argument"), TRAINED)
def test_the_gradient_of_a_tensor_is_the_slope_of_the_loss(name, argument) -> None:
    value, step = 1.07 * default(name, argument), 1e-6
    settings = [given_with(name, argument)]
    settings += [{"repulsion": "uniform", "cost": "rbf"}] if argument == "rbf_t" else []
    settings += [{"negatives": "same-view"}, {"attraction": "reversed"}] if argument in ("t_plus", "t_minus") else []
    settings += (
        [{"variant": "mocov3"}, {"variant": "mocov3", "cost": "rbf"}] if argument in ("t_plus", "t_minus") else []
    )
    settings += [{"variant": "mocov3"}, {"symmetric": True}] if name == "sim-whitening" else []
    for further in settings:
        for z, given in calls(name):

            def loss(number, z=z, given=given, further=further) -> Tensor:
                return small_objective(name, **{argument: number}, **further)(z, **given)

            number = torch.tensor(value, dtype=torch.float64, requires_grad=True)
            found = loss(number)
            torch.testing.assert_close(found.detach(), loss(value), rtol=1e-12, atol=1e-12)
            slope = (loss(value + step) - loss(value - step)) / (2 * step)
            gradient = torch.autograd.grad(found, number)[0]
            torch.testing.assert_close(gradient, slope, rtol=1e-6, atol=1e-7 * max(1.0, abs(found.item())))


@pytest.mark.parametrize(("name", "argument"), TRAINED)
def test_a_parameter_is_part_of_the_module(name, argument) -> None:
    """It is trained, saved and moved with the objective, and a tensor that requires grad is used as it is."""
    parameter = nn.Parameter(torch.tensor(default(name, argument)))
    loss = small_objective(name, **{argument: parameter}, **given_with(name, argument))
    assert dict(loss.named_parameters()) == {argument: parameter} and argument in loss.state_dict()
    assert loss.learned_numbers() == {argument: pytest.approx(default(name, argument))}
    assert f"{argument}=tensor(" in repr(loss)
    z = draw(3, 5, 4).float()
    loss(z, **extra_inputs(name, z)).backward()
    assert parameter.grad is not None and parameter.grad.isfinite()
    assert loss.double().state_dict()[argument].dtype == torch.float64


@pytest.mark.parametrize(("name", "argument"), [pair for pair in NUMBERS if constant(*pair)])
def test_a_tensor_without_a_gradient_here_is_refused(name, argument) -> None:
    for tensor in (torch.tensor(0.01, requires_grad=True), nn.Parameter(torch.tensor(0.01))):
        with pytest.raises(ValueError, match=rf"{argument} is .*: {argument} gets no gradient here; give a number"):
            objective(name, **{argument: tensor})
    assert getattr(objective(name, **{argument: torch.tensor(0.25)}), argument) == 0.25


@pytest.mark.parametrize("argument", ["t_minus", "rbf_t"])
@pytest.mark.parametrize(
    "further", [{"detach_negative_weights": True}, {"detach_negative_weights": "bank"}, {"repulsion": "reversed"}]
)
def test_cacr_refuses_a_tensor_whose_gradient_would_be_wrong(argument, further) -> None:
    with pytest.raises(ValueError, match=f"{argument} gets no gradient here"):
        objective("cacr", **{argument: torch.tensor(2.0, requires_grad=True)}, **further)
    assert getattr(objective("cacr", **{argument: torch.tensor(2.0)}, **further), argument) == 2.0


@pytest.mark.parametrize(("name", "argument"), NUMBERS)
def test_numbers_of_every_kind_are_numbers(name, argument) -> None:
    kinds = (1, np.float64(0.5), np.float16(0.5), np.array(0.5), np.int64(1), Decimal("0.5"), Fraction(1, 2))
    for number in (*kinds, torch.tensor(0.5), torch.tensor(0.5, dtype=torch.bfloat16), torch.tensor(1)):
        if argument in ("tau_plus", "center_momentum") and float(number) == 1:
            continue
        checked = getattr(objective(name, **{argument: number}), argument)
        assert type(checked) is float and checked == float(number)


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_everything_else_is_refused_by_name(name, argument) -> None:
    wrong = ["0.5", "", b"1", 1j, np.complex64(1), [0.5], (0.5,), np.ones(1), torch.ones(1), torch.ones(2, 2), {}]
    wrong += [Decimal("NaN"), Decimal("sNaN"), Decimal("1e400"), Fraction(10**400), 10**400, np.float32("nan")]
    wrong += [np.bool_(True), torch.tensor(True), np.array(True), torch.tensor(math.inf), object(), torch]
    wrong += [torch.tensor(math.nan, requires_grad=True), torch.ones(2, requires_grad=True)]
    wrong += [nn.Parameter(torch.tensor(-300.0)), nn.Parameter(torch.ones(1))]
    number = (name, argument) in [*NUMBERS, *WHOLE, ("siglip", "initial_temperature")]
    wrong += [True, False] if number else [1, 0.0, torch.tensor(1)]
    for value in wrong:
        if argument in ("clamp", "bias") and isinstance(value, nn.Parameter) and not value.ndim:
            continue  # it may be negative
        with pytest.raises(ValueError, match=f"{argument} is "):
            objective(name, **{argument: value})


def test_a_trained_number_that_may_be_zero_starts_above_zero() -> None:
    """At 0, the statistics at scale a have no gradient that could be computed at scale 1."""
    for name, argument in (("cacr", "t_minus"), ("hard-negative", "beta")):
        with pytest.raises(ValueError, match=f"{argument} is .*: give a finite number above 0"):
            objective(name, **{argument: torch.tensor(0.0, requires_grad=True)})
        assert objective(name, **{argument: 0.0})(draw(2, 5, 4)).isfinite()


@pytest.mark.parametrize("name", sorted({name for name, _ in TRAINED}))
def test_torch_func_differentiates_arguments(name) -> None:
    z = draw(3, 5, 4)
    given = extra_inputs(name, z)
    for argument in [argument for owner, argument in TRAINED if owner == name]:
        value = torch.tensor(default(name, argument), dtype=torch.float64)

        def loss(number, argument=argument) -> Tensor:
            return small_objective(name, **{argument: number}, **given_with(name, argument))(z, **given)

        leaf = value.clone().requires_grad_()
        expected = torch.autograd.grad(loss(leaf), leaf)[0]
        torch.testing.assert_close(torch.func.grad(loss)(value), expected)
        both = torch.func.vmap(loss)(torch.stack([value, 1.01 * value]))
        torch.testing.assert_close(both, torch.stack([loss(value), loss(1.01 * value)]))


@pytest.mark.parametrize("name", ["nt-xent", "cacr", "hard-negative"])
def test_a_loss_with_parameters_compiles_into_one_graph(name) -> None:
    torch.compiler.reset()  # or the traces of earlier tests count towards the limit of recompilations
    z = draw(2, 6, 5)
    arguments = [argument for owner, argument in TRAINED if owner == name and argument != "rbf_t"]
    loss = objective(name, **{a: nn.Parameter(torch.tensor(default(name, a)).double()) for a in arguments})
    expected = torch.autograd.grad(loss(z), list(loss.parameters()))
    torch.compiler.reset()  # the compiler keeps a limited number of versions of a function
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(z), list(loss.parameters())), expected)


@pytest.mark.parametrize("images", [6, 120])  # from one matrix, and link by link
@pytest.mark.parametrize("name", ["nt-xent", "info-nce", "cacr", "align-uniform"])
def test_second_derivatives_of_arguments(name, images) -> None:
    argument = next(argument for owner, argument in TRAINED if owner == name)
    argument = {"cacr": "t_minus", "align-uniform": "t"}.get(name, argument)
    z, number = draw(2, images, 4), torch.tensor(1.5, dtype=torch.float64, requires_grad=True)

    def slope(number: Tensor) -> Tensor:
        return torch.autograd.grad(objective(name, **{argument: number})(z), number, create_graph=True)[0]

    step = 1e-5
    expected = (slope(number + step) - slope(number - step)) / (2 * step)
    torch.testing.assert_close(torch.autograd.grad(slope(number), number)[0], expected, rtol=1e-5, atol=1e-8)


def test_metrics_are_differentiable_in_their_arguments() -> None:
    z = draw(2, 6, 4)
    for measure in (metrics.conditional_entropy, metrics.uniformity, metrics.alignment, metrics.coupling_multiplier):
        number = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
        gradient = torch.autograd.grad(measure(z, number).sum(), number)[0]
        slope = (measure(z, 1.5 + 1e-6).sum() - measure(z, 1.5 - 1e-6).sum()) / 2e-6
        torch.testing.assert_close(gradient, slope, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(measure(z, Decimal("1.5")), measure(z, 1.5))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nt-xent", "hard-negative", "cacr", "align-uniform"])
def test_a_number_on_the_cpu_serves_rows_on_a_gpu(name) -> None:
    for argument in [argument for owner, argument in TRAINED if owner == name]:
        z, further = draw(2, 32, 16).float(), GIVEN_WITH.get(argument, {})
        found = []
        for rows in (z, z.cuda()):
            number = torch.tensor(default(name, argument), requires_grad=True)
            found.append(torch.autograd.grad(objective(name, **{argument: number}, **further)(rows), number)[0])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
