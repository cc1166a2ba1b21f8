"""SogCLR: two steps as loops over anchors in float64, the estimates that it stores, and when they change."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from kontrast.errors import UsageError
from kontrast.objectives import DCL, SogCLR

TAU, GAMMA = 0.3, 0.7
INDICES = torch.tensor([11, 3, 0, 7, 19, 4, 8])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def step_by_definition(
    z: Tensor, indices: Tensor, u: dict[int, float], tau: float = TAU, gamma: float = GAMMA
) -> tuple[Tensor, Tensor, dict[int, float]]:
    """Return the loss, its gradient estimate and the new estimates of a step, from the estimates by image before it."""
    x = normalize(z, dim=-1)
    V, B, _ = z.shape
    values, surrogates, estimates = [], [], {int(i): [] for i in indices}
    for i in range(B):
        image = int(indices[i])
        for v in range(V):
            positives = torch.stack([x[v, i] @ x[w, i] for w in range(V) if w != v])
            negatives = torch.stack([x[v, i] @ x[w, j] for w in range(V) for j in range(B) if j != i])
            exponentials = torch.exp(negatives / tau)
            g = exponentials.mean().item()
            estimate = (1 - gamma) * u[image] + gamma * g if image in u else g
            values.append(-positives.mean().item() + tau * math.log(estimate))
            weights = exponentials.detach() / estimate
            surrogates.append(-positives.mean() + (weights * negatives).mean())
            estimates[image].append(estimate)
    slope = torch.autograd.grad(torch.stack(surrogates).mean(), z)[0]
    return torch.tensor(values).mean(), slope, u | {i: sum(each) / len(each) for i, each in estimates.items()}


@pytest.mark.parametrize("views", [2, 3])
def test_steps_equal_the_definition(views) -> None:
    """The third batch has images of the first, of the second, and new ones: what is new is decided for each image."""
    loss, u = SogCLR(images=20, temperature=TAU, gamma=GAMMA).double(), {}
    for seed, indices in enumerate((INDICES, INDICES.roll(2), torch.tensor([3, 1, 19, 2, 15, 8, 5]))):
        z = draw(views, 7, 5, seed=seed).requires_grad_()
        value = loss(z, indices=indices)
        expected, slope, u = step_by_definition(z, indices, u)
        torch.testing.assert_close(value.detach(), expected, check_dtype=False)
        torch.testing.assert_close(torch.autograd.grad(value, z)[0], slope)
        stored = {i: float(x) for i, x in enumerate(loss.log_u.exp()) if x > 0}
        assert stored == pytest.approx(u)


def test_with_gamma_one_it_is_tau_times_dcl() -> None:
    """Whatever was stored before: the gradient is exactly tau times DCL's, and the value differs by tau log n."""
    z = draw(2, 7, 5).requires_grad_()
    dcl, loss = DCL(TAU)(z), SogCLR(images=20, temperature=TAU, gamma=1.0)
    loss.log_u.copy_(draw(20, seed=1))
    ours = loss(z, indices=INDICES)
    torch.testing.assert_close(ours, TAU * (dcl - math.log(12)))
    torch.testing.assert_close(*[torch.autograd.grad(x, z)[0] for x in (ours, TAU * dcl)])


def test_the_gradient_is_that_of_dcl_with_a_weight_per_row() -> None:
    """tau grad[-s+/tau + (g/u) lse], with g/u constant."""
    z, tau = draw(2, 7, 5).requires_grad_(), TAU
    loss = SogCLR(images=20, temperature=tau, gamma=GAMMA)
    loss.log_u.copy_(1.0 + draw(20, seed=1))
    x = normalize(z, dim=-1).flatten(0, 1)
    same = torch.arange(7).repeat(2)[:, None] == torch.arange(7).repeat(2)
    lse = torch.logsumexp((x @ x.T / tau).masked_fill(same, -torch.inf), 1).view(2, 7)
    g = (lse.exp() / 12).detach()
    u = (1 - GAMMA) * loss.log_u[INDICES].double().exp() + GAMMA * g
    positive = (x[:7] * x[7:]).sum(1)
    expected = tau * (-positive / tau + (g / u) * lse).mean()
    slopes = [torch.autograd.grad(value, z)[0] for value in (loss(z, indices=INDICES), expected)]
    torch.testing.assert_close(*slopes)
    assert (slopes[0] - torch.autograd.grad(tau * DCL(tau)(z), z)[0]).abs().max() > 1e-3


def test_estimates_change_in_the_backward_pass_alone() -> None:
    z, loss = draw(2, 7, 5).requires_grad_(), SogCLR(images=20)
    value = loss(z, indices=INDICES)
    loss.terms(z, indices=INDICES), loss.rows(z, indices=INDICES)
    with torch.no_grad():
        loss(z, indices=INDICES)
    assert bool(torch.isneginf(loss.log_u).all())
    value.backward()
    assert sorted(torch.nonzero(loss.log_u.isfinite()).flatten().tolist()) == sorted(INDICES.tolist())


def test_views_are_averaged_and_not_added() -> None:
    """Equal views have equal estimates, of which the stored one is the mean."""
    z, loss = draw(1, 7, 5).expand(2, 7, 5).clone().requires_grad_(), SogCLR(images=20, temperature=TAU)
    loss(z, indices=INDICES).backward()
    x = normalize(z[0].detach(), dim=-1)
    g = [torch.exp(x[i] @ x[[j for j in range(7) if j != i]].T / TAU).mean() for i in range(7)]
    torch.testing.assert_close(loss.log_u[INDICES].exp(), torch.stack(g).float())


def test_estimates_beyond_float32_are_finite() -> None:
    """exp(1/tau) overflows at tau below 0.0113; the logs don't, nor do those of images that are nearly orthogonal."""
    z = draw(1, 7, 5).expand(2, 7, 5).float().clone()
    z[:, 1] = z[:, 0]
    for tau in (0.01, 0.001):
        loss, rows = SogCLR(images=20, temperature=tau), z.clone().requires_grad_()
        for _ in range(3):
            value = loss(rows, indices=INDICES)
            (slope,) = torch.autograd.grad(value, rows)
            assert bool(value.isfinite()) and bool(slope.isfinite().all())
        assert bool(loss.log_u[INDICES].isfinite().all()) and loss.log_u.max() > 0.9 / tau


def test_estimates_are_in_the_state_dict() -> None:
    """A resumed run continues with them, to the bit."""
    first, z = SogCLR(images=20), draw(2, 7, 5).float().requires_grad_()
    first(z, indices=INDICES).backward()
    second = SogCLR(images=20)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    other = draw(2, 7, 5, seed=1).float()
    assert torch.equal(second(other, indices=INDICES), first(other, indices=INDICES))
    assert not torch.equal(SogCLR(images=20)(other, indices=INDICES), first(other, indices=INDICES))


def test_the_last_place_of_a_repeated_image_counts() -> None:
    """Whichever order a device writes in: with repetitions the stored estimate is that of the last place."""
    z, repeated = draw(2, 7, 5).requires_grad_(), torch.tensor([4, 9, 4, 2, 9, 4, 0])
    once, twice = SogCLR(images=20, temperature=TAU), SogCLR(images=20, temperature=TAU)
    once(z, indices=torch.arange(7)).backward()
    twice(z, indices=repeated).backward()
    torch.testing.assert_close(twice.log_u[torch.tensor([4, 9, 2, 0])], once.log_u[torch.tensor([5, 4, 3, 6])])


@pytest.mark.parametrize("bad", [[-1, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 20]])
def test_indices_beyond_the_images_are_refused(bad) -> None:
    with pytest.raises(ValueError, match=r"indices is .*give numbers from 0 to 19, or a larger images="):
        SogCLR(images=20)(draw(2, 7, 5), indices=torch.tensor(bad))
    with pytest.raises(ValueError, match="SogCLR needs indices="):
        SogCLR(images=20)(draw(2, 7, 5))
    with pytest.raises(UsageError, match="images is 0"):
        SogCLR(images=0)


def test_gamma_may_change_and_is_not_rounded() -> None:
    loss, z = SogCLR(images=20, gamma=0.3), draw(2, 7, 5)
    loss.log_u.copy_(draw(20, seed=1))
    values = []
    for gamma in (1.0, 0.3):
        loss.gamma = gamma
        values.append(loss(z, indices=INDICES))
    assert (values[0] - values[1]).abs() > 1e-3
    loss.log_u = loss.log_u.double()
    wide = loss(z, indices=INDICES)
    log_u = loss.log_u
    loss.bfloat16()
    loss.log_u = log_u
    torch.testing.assert_close(loss(z, indices=INDICES), wide, rtol=0, atol=0)
    for bad in (0.0, 1.5, math.nan):
        with pytest.raises(UsageError, match="gamma is"):
            loss.gamma = bad
    assert loss.gamma == 0.3
