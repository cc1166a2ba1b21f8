"""iSogCLR: steps as loops over anchors in float64, and where its temperatures settle."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from kontrast.errors import UsageError
from kontrast.objectives import ISogCLR, SogCLR

from support.objective_inputs import draw

GAMMA, RADIUS, RATE, BETA, BOUNDS = 0.7, 0.4, 0.3, 0.6, (0.05, 1.0)
INDICES = torch.tensor([11, 3, 0, 7, 19, 4, 8])


class State:
    """The estimate u, the temperature and the momentum of each image; u is None before the first visit."""

    def __init__(self, images: int, tau: float):
        self.u: list[float | None] = [None] * images
        self.tau, self.velocity = [tau] * images, [0.0] * images


def step_by_definition(z: Tensor, indices: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """Return the loss and its gradient estimate of a step, and change the state of its images."""
    x = normalize(z, dim=-1)
    V, B, _ = z.shape
    values, surrogates = [], []
    for i, image in enumerate(indices.tolist()):
        tau, estimates, slopes = state.tau[image], [], []
        for v in range(V):
            positives = torch.stack([x[v, i] @ x[w, i] for w in range(V) if w != v])
            negatives = torch.stack([x[v, i] @ x[w, j] for w in range(V) for j in range(B) if j != i])
            exponentials = torch.exp(negatives / tau)
            g, old = exponentials.mean().item(), state.u[image]
            u = g if old is None else (1 - GAMMA) * old + GAMMA * g
            values.append(-positives.mean().item() + tau * math.log(u) + tau * RADIUS)
            surrogates.append(-positives.mean() + tau / u * exponentials.mean())
            slope = RADIUS + math.log(u) - (exponentials * negatives).mean().item() / (u * tau)
            estimates.append(u)
            slopes.append(min(3.0, max(-3.0, slope)))
        state.u[image] = sum(estimates) / V
        state.velocity[image] = (1 - BETA) * state.velocity[image] + BETA * sum(slopes) / V
        state.tau[image] = min(BOUNDS[1], max(BOUNDS[0], tau - RATE * state.velocity[image]))
    return torch.tensor(values).mean(), torch.autograd.grad(torch.stack(surrogates).mean(), z)[0]


@pytest.mark.parametrize("views", [2, 3])
@pytest.mark.parametrize("tau", [0.1, 0.5])
def test_steps_equal_the_definition(views, tau) -> None:
    """Temperatures move by different amounts, and at 0.1 some gradients are clipped."""
    loss = ISogCLR(20, tau, GAMMA, RADIUS, temperature_lr=RATE, beta=BETA, temperature_bounds=BOUNDS).double()
    state = State(20, tau)
    for seed, indices in enumerate((INDICES, INDICES.roll(2), torch.tensor([3, 1, 19, 2, 15, 8, 5]))):
        z = draw(views, 7, 5, seed=seed).requires_grad_()
        value = loss(z, indices=indices)
        expected, slope = step_by_definition(z, indices, state)
        torch.testing.assert_close(value.detach(), expected, check_dtype=False)
        torch.testing.assert_close(torch.autograd.grad(value, z)[0], slope)
        assert loss.log_u.exp().tolist() == pytest.approx([u or 0.0 for u in state.u])
        assert loss.tau.tolist() == pytest.approx(state.tau)
        assert loss.velocity.tolist() == pytest.approx(state.velocity)
    assert loss.tau[INDICES].std() > 0.01


def divergences(z: Tensor, tau: Tensor) -> Tensor:
    """Return KL(w || uniform) of the weights of the negatives at each image's temperature [B], averaged over views."""
    V, B, _ = z.shape
    x = normalize(z, dim=-1).flatten(0, 1)
    same = torch.arange(B).repeat(V)[:, None] == torch.arange(B).repeat(V)
    log_w = torch.log_softmax((x @ x.T / tau.repeat(V)[:, None]).masked_fill(same, -torch.inf), 1)
    kl = math.log(V * (B - 1)) + (log_w.exp() * log_w.masked_fill(same, 0)).sum(1)
    return kl.view(V, B).mean(0)


def test_the_gradient_of_a_temperature_is_the_radius_minus_the_divergence() -> None:
    z, loss = draw(2, 7, 5).requires_grad_(), ISogCLR(7, 0.4, 1.0, RADIUS, beta=1.0).double()
    loss(z, indices=torch.arange(7)).backward()
    expected = RADIUS - divergences(z.detach(), torch.full((7,), 0.4, dtype=torch.float64))
    assert expected.abs().max() < 3  # none is clipped
    torch.testing.assert_close(loss.velocity, expected)


def test_temperatures_settle_where_the_divergence_is_the_radius() -> None:
    """On the same batch again and again; images with sharper neighborhoods get another temperature."""
    z, loss = draw(2, 12, 6).requires_grad_(), ISogCLR(12, 0.5, 1.0, RADIUS).double()
    for _ in range(600):
        loss(z, indices=torch.arange(12)).backward()
    inside = (loss.tau > BOUNDS[0]) & (loss.tau < BOUNDS[1])
    assert inside.sum() >= 6
    torch.testing.assert_close(
        divergences(z.detach(), loss.tau)[inside], torch.full((int(inside.sum()),), RADIUS).double()
    )
    assert loss.learned_numbers() == {"temperature": pytest.approx(loss.tau.mean().item())}


def test_with_temperatures_that_stay_it_is_sogclr() -> None:
    """The first step, before any temperature has moved: the same gradient, and tau radius more."""
    z = draw(2, 7, 5).requires_grad_()
    ours, theirs = (kind(20, 0.3, GAMMA).double() for kind in (ISogCLR, SogCLR))
    values = [loss(z, indices=INDICES) for loss in (ours, theirs)]
    torch.testing.assert_close(values[0], values[1] + 0.3 * RADIUS)
    torch.testing.assert_close(*[torch.autograd.grad(value, z)[0] for value in values])
    assert ours.learned_numbers().keys() == {"temperature"} and theirs.learned_numbers() == {}


def test_nothing_changes_without_a_backward_pass() -> None:
    z, loss = draw(2, 7, 5).requires_grad_(), ISogCLR(20)
    before = {name: buffer.clone() for name, buffer in loss.named_buffers()}
    loss.terms(z, indices=INDICES), loss.rows(z, indices=INDICES)
    assert all(torch.equal(buffer, before[name]) for name, buffer in loss.named_buffers())
    loss(z, indices=INDICES).backward()
    assert not torch.equal(loss.tau, before["tau"]) and loss.state_dict().keys() == {"log_u", "tau", "velocity"}


def test_the_last_place_of_a_repeated_image_counts() -> None:
    z, repeated = draw(2, 7, 5).requires_grad_(), torch.tensor([4, 9, 4, 2, 9, 4, 0])
    once, twice = ISogCLR(20), ISogCLR(20)
    once(z, indices=torch.arange(7)).backward()
    twice(z, indices=repeated).backward()
    for name in ("log_u", "tau", "velocity"):
        stored, single = twice.get_buffer(name), once.get_buffer(name)
        torch.testing.assert_close(stored[torch.tensor([4, 9, 2, 0])], single[torch.tensor([5, 4, 3, 6])])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"temperature": 0.01, "temperature_bounds": (0.05, 1.0)},
            r"temperature is 0.01: give a number within temperature_bounds, \[0.05, 1.0\]",
        ),
        ({"temperature_bounds": (0.2, 0.1)}, "give the least and the largest temperature"),
        ({"beta": 1.5}, "beta is 1.5: give a number above 0 and at most 1"),
        ({"radius": -0.1}, "radius is -0.1"),
        ({"temperature_lr": 0.0}, "temperature_lr is 0.0"),
    ],
)
def test_impossible_arguments_are_refused(arguments, words) -> None:
    with pytest.raises(UsageError, match=words):
        ISogCLR(20, **arguments)
