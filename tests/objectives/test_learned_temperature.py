"""temperature="learned": a parameter of NT-Xent and InfoNCE within its bounds, and a word that others refuse."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from kontrast.objectives import OBJECTIVES, LearnedTemperature, objective

LEARNED = ("info-nce", "nt-xent")
REASONS = {
    ("dcl", "temperature"): "falls without bound as tau shrinks",
    ("dclw", "temperature"): "falls without bound as tau shrinks",
    ("decoupled-nt-xent", "temperature"): "only the repulsion depends on tau",
    ("align-uniform", "t"): "falls without bound as t grows",
    ("cacr", "t_plus"): "run to 0",
    ("cacr", "t_minus"): "run to 0",
    ("cacr", "rbf_t"): "falls without bound as it grows",
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", LEARNED)
def test_it_starts_at_the_default_and_its_gradient_is_the_slope(name) -> None:
    z, keys = draw(2, 6, 4), draw(2, 6, 4, seed=1)
    loss = objective(name, temperature="learned").double()
    assert float(loss.temperature) == pytest.approx(OBJECTIVES.arguments(name)["temperature"].default)
    assert [key for key, _ in loss.named_parameters()] == ["temperature.log_scale"]
    for given in ({}, {"keys": keys}):
        (gradient,) = torch.autograd.grad(loss(z, **given), loss.temperature.log_scale)
        theta, step = loss.temperature.log_scale.item(), 1e-6
        above, below = (objective(name, temperature=math.exp(-theta - h))(z, **given) for h in (step, -step))
        torch.testing.assert_close(gradient, (above - below) / (2 * step), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", LEARNED)
def test_initial_value_and_bounds(name) -> None:
    loss = objective(name, temperature="learned", initial_temperature=0.07, temperature_bounds=[0.05, 2])
    assert float(loss.temperature) == pytest.approx(0.07) and loss.temperature.bounds == (0.05, 2.0)
    assert "temperature='learned', " in repr(loss) and "initial_temperature=0.07" in repr(loss)
    for bad in ([0.1], [0.5, 0.1], 0.3, "0.1", [0.0, 1.0], [0.1, math.inf], [math.nan, 1.0], [True, 2.0], "ab"):
        with pytest.raises(ValueError, match="temperature_bounds is "):
            objective(name, temperature="learned", temperature_bounds=bad)
    for bad in (0.001, 2.0, -1.0, math.nan, "0.1", True, nn.Parameter(torch.tensor(0.1))):
        with pytest.raises(ValueError, match="initial_temperature is "):
            objective(name, temperature="learned", initial_temperature=bad)
    for argument, value in (("initial_temperature", 0.1), ("temperature_bounds", [0.1, 1.0])):
        with pytest.raises(ValueError, match=f"{argument} is .*: only temperature='learned' has it"):
            objective(name, temperature=0.1, **{argument: value})


@pytest.mark.parametrize(("beyond", "bound"), [(10.0, 0.01), (-10.0, 1.0)])
def test_it_stays_within_its_bounds_and_can_leave_them_again(beyond, bound) -> None:
    """At a bound the gradient doesn't vanish, and the parameter has not moved on behind the bound."""
    loss, z = objective("nt-xent", temperature="learned").double(), draw(2, 6, 4)
    with torch.no_grad():
        loss.temperature.log_scale.fill_(beyond)
    assert float(loss.temperature) == pytest.approx(bound)
    torch.testing.assert_close(loss(z), objective("nt-xent", temperature=bound)(z))
    assert loss.temperature.log_scale.item() == pytest.approx(-math.log(bound))
    loss(z).backward()
    assert loss.temperature.log_scale.grad.abs() > 0


def test_two_losses_before_one_backward() -> None:
    """The clamp changes the parameter in place, which must not spoil the gradient of an earlier call."""
    loss, z = objective("nt-xent", temperature="learned").double(), draw(2, 6, 4)
    (loss(z) + loss(2 * draw(2, 6, 4, seed=1))).backward()
    assert loss.temperature.log_scale.grad.isfinite()


def test_it_learns() -> None:
    """For fixed rows it reaches the temperature with the smallest loss among many."""
    z = nn.functional.normalize(draw(1, 64, 8) + 0.3 * draw(2, 64, 8, seed=1), dim=-1)
    loss = objective("nt-xent", temperature="learned", initial_temperature=0.9).double()
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.3)
    for _ in range(100):
        optimizer.zero_grad()
        loss(z).backward()
        optimizer.step()
    tried = torch.linspace(0.01, 1.0, 100).tolist()
    best = min(tried, key=lambda tau: objective("nt-xent", temperature=tau)(z).item())
    assert float(loss.temperature) == pytest.approx(best, abs=0.02) and 0.02 < best < 0.5


def test_state_and_copies() -> None:
    loss, other = (objective("info-nce", temperature="learned", initial_temperature=t) for t in (0.3, 0.5))
    other.load_state_dict(loss.state_dict())
    assert float(other.temperature) == pytest.approx(0.3) == float(copy.deepcopy(loss).temperature)
    assert loss.learned_numbers() == {"temperature": pytest.approx(0.3)}
    assert objective("info-nce").learned_numbers() == {}


@pytest.mark.parametrize("name", LEARNED)
def test_it_compiles_into_one_graph(name) -> None:
    """With the clamp of its parameter."""
    z, loss = draw(2, 6, 5), objective(name, temperature="learned").double()
    with torch.no_grad():
        loss.temperature.log_scale.fill_(7.0)
    other = copy.deepcopy(loss)
    value = loss(z)
    expected = torch.autograd.grad(value, loss.temperature.log_scale)[0]
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")(z)
    torch.testing.assert_close(compiled, value)
    torch.testing.assert_close(torch.autograd.grad(compiled, other.temperature.log_scale)[0], expected)
    assert other.temperature.log_scale.item() == pytest.approx(math.log(100.0))


def test_torch_func_leaves_the_parameter_unchanged() -> None:
    z, loss = draw(2, 6, 4), objective("nt-xent", temperature="learned").double()
    given = {"temperature.log_scale": torch.tensor(7.0, dtype=torch.float64)}

    def value(parameters: dict[str, Tensor], z: Tensor) -> Tensor:
        return torch.func.functional_call(loss, parameters, (z,))

    gradient = torch.func.grad(value)(given, z)["temperature.log_scale"]
    assert given["temperature.log_scale"] == 7.0
    with torch.no_grad():
        loss.temperature.log_scale.fill_(7.0)
    torch.testing.assert_close(gradient, torch.autograd.grad(loss(z), loss.temperature.log_scale)[0])
    torch.func.grad(loss)(z)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_where_it_makes_no_sense_the_word_is_refused_with_the_reason(name) -> None:
    for argument in OBJECTIVES.arguments(name):
        if (name, argument) in [("siglip", "bias"), *((learned, "temperature") for learned in (*LEARNED, "siglip"))]:
            continue
        reason = REASONS.get((name, argument), "only nt-xent, info-nce and siglip" if argument == "temperature" else "")
        with pytest.raises(ValueError, match=f"{argument} is 'learned': .*{reason}"):
            objective(name, **{argument: "learned"})


def test_an_objective_of_ones_own_may_learn_a_temperature() -> None:
    temperature = LearnedTemperature(initial=0.5, bounds=(0.1, 1.0))
    assert temperature().item() == pytest.approx(0.5) and "initial=0.5" in repr(temperature)


@pytest.mark.gpu
def test_it_is_captured_in_a_cuda_graph() -> None:
    """A replay uses and clamps the parameter's present value."""
    loss, z = objective("nt-xent", temperature="learned").cuda(), draw(2, 32, 16).float().cuda()
    theta = loss.temperature.log_scale
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.autograd.grad(loss(z), theta)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = loss(z)
        gradient = torch.autograd.grad(value, theta)[0]
    for log_scale in (1.0, 3.0, 9.0):
        with torch.no_grad():
            theta.fill_(log_scale)
        graph.replay()
        temperature = math.exp(-min(log_scale, math.log(100.0)))
        assert theta.item() == pytest.approx(-math.log(temperature))
        torch.testing.assert_close(value, objective("nt-xent", temperature=temperature)(z), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradient, torch.autograd.grad(loss(z), theta)[0], rtol=1e-4, atol=1e-5)
