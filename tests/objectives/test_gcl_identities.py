"""Decoupled NT-Xent and SWD: the identities of the generalized contrastive loss (GCL)."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from kontrast.config.recipe_files import resolve
from kontrast.kernels.projections import directions_and_prior, sliced_wasserstein
from kontrast.objectives import SWD, DecoupledNTXent, NTXent, objective

ZERO = torch.zeros((), dtype=torch.int64)


@pytest.mark.parametrize("tau", [0.1, 0.5])
def test_weight_tau_is_tau_times_nt_xent(projections, three_views, tau) -> None:
    for z in (projections, three_views):
        torch.testing.assert_close(DecoupledNTXent(tau, tau)(z), tau * NTXent(tau)(z))


@pytest.mark.parametrize("name", ["cifar10/gcl-nt-xent", "cifar10/randbit", "imagenet/gcl-nt-xent"])
def test_the_recipes_of_the_paper_add_both_directions_as_equation_2(name, projections) -> None:
    """-1/n sum over the 2n anchors, not their mean; under LARS, vectors of parameters notice the factor."""
    given = resolve(name).objective
    z = projections.clone().requires_grad_()
    rows = normalize(z, dim=-1).flatten(0, 1)
    logits = (rows @ rows.T / 0.2).masked_fill(torch.eye(14, dtype=torch.bool), -torch.inf)
    expected = cross_entropy(logits, torch.arange(14).roll(7), reduction="sum") / 7
    ours = objective(given.name, **given.arguments)(z)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(torch.autograd.grad(ours, z)[0], torch.autograd.grad(expected, z)[0])


def test_linear_in_the_weight(projections) -> None:
    one, two, five = (DecoupledNTXent(0.5, w)(projections) for w in (1.0, 2.0, 5.0))
    torch.testing.assert_close(five - one, 4 * (two - one))


def test_attraction_per_dimension_as_in_the_code(projections) -> None:
    """The released code: mean((h1 - h2)^2)/2 = (1 - cos)/d; then lambda is d times smaller for the same balance."""
    x = normalize(projections, dim=-1)
    mean = DecoupledNTXent(1.0, 0.1, align_reduction="mean")
    torch.testing.assert_close(mean.terms(projections).attraction, (x[0] - x[1]).square().mean() / 2)
    literal = DecoupledNTXent(1.0, 0.5)(projections)
    torch.testing.assert_close(mean(projections) * 5, literal + 1)


def test_include_self_as_in_the_code(projections, keys) -> None:
    z = projections.requires_grad_()
    for normalized in (True, False):
        x = (normalize(z, dim=-1) if normalized else z).flatten(0, 1)
        given = {"align_reduction": "mean", "loss_scale": 1000.0, "include_self": True, "normalize": normalized}
        value = DecoupledNTXent(0.5, 0.1, **given).terms(z).repulsion
        expected = 100 * torch.logsumexp(x @ x.T / 0.5, 1).mean()
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(torch.autograd.grad(value, z)[0], torch.autograd.grad(expected, z)[0])
    with pytest.raises(ValueError, match="without keys"):
        DecoupledNTXent(include_self=True)(z, keys=keys[:2])


@pytest.mark.parametrize("prior", ["hypersphere", "hypercube", "normal"])
def test_swd_is_algorithm_1(projections, prior) -> None:
    z = projections.clone().requires_grad_()
    loss = SWD(prior, distribution_weight=5.0, loss_scale=10.0)
    W, P = directions_and_prior(prior, 14, 5, 0, ZERO)
    h = normalize(z, dim=-1) if prior == "hypersphere" else z
    projected, aimed = h.reshape(14, 5) @ W, P @ W
    swd = sum((projected[:, j].sort().values - aimed[:, j].sort().values).square().sum() for j in range(5)) / (14 * 5)
    expected = 10 * ((h[0] - h[1]).square().mean() / 2 + 5 * swd)
    torch.testing.assert_close(loss(z), expected)
    torch.testing.assert_close(torch.autograd.grad(loss(z), z)[0], torch.autograd.grad(expected, z)[0])
    paper = SWD(prior, divisor="paper").terms(z).repulsion
    loss.step.zero_()
    torch.testing.assert_close(paper, SWD(prior).terms(z).repulsion * 14 / 5)


def test_draws_change_with_the_backward_pass(projections) -> None:
    """A loss and its terms use the same draws; each training step uses new ones; the counter is in the state."""
    z = projections.requires_grad_()
    loss = SWD()
    first = loss(z)
    torch.testing.assert_close(loss.terms(z).total, first)
    first.backward()
    assert loss.step.item() == 1
    second = loss(z)
    assert (second - first).abs() > 1e-6
    resumed = SWD()
    resumed.load_state_dict(loss.state_dict())
    torch.testing.assert_close(resumed(z), second, rtol=0, atol=0)
    assert (SWD(seed=1)(z) - SWD(seed=0)(z)).abs() > 1e-6


def test_distance_of_the_prior_to_itself_is_zero() -> None:
    W, P = directions_and_prior("hypersphere", 16, 5, 0, ZERO)
    shuffled = P[torch.randperm(16, generator=torch.Generator().manual_seed(0))].view(2, 8, 5)
    assert SWD().terms(shuffled).repulsion.item() < 1e-20
    assert sliced_wasserstein(P, P, W).item() < 1e-30


@pytest.mark.gpu
def test_a_module_on_the_cpu_is_captured_with_z_on_the_gpu() -> None:
    """Each replay draws anew and advances the counter, which stays a buffer that is saved and loaded."""
    z = torch.randn(2, 32, 16, device="cuda", requires_grad=True)
    loss, reference = SWD(seed=3), SWD(seed=3).cuda()
    loss.load_state_dict({"step": torch.tensor(40)})
    loss(z).backward()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        value = loss(z)
        gradient = torch.autograd.grad(value, z)[0]
    for number in range(41, 44):
        assert loss.state_dict()["step"].item() == number
        graph.replay()
        reference.step.fill_(number)
        expected = reference(z)
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(gradient, torch.autograd.grad(expected, z)[0], rtol=1e-4, atol=1e-6)
    resumed = SWD(seed=3)
    resumed.load_state_dict(loss.state_dict())
    torch.testing.assert_close(resumed(z), reference(z))


@pytest.mark.gpu
def test_a_module_on_the_cpu_can_not_be_captured_before_its_first_call() -> None:
    z = torch.randn(2, 32, 16, device="cuda", requires_grad=True)
    SWD()(z).backward()  # loads the libraries
    with pytest.raises(RuntimeError, match=r"SWD is on the CPU .* call it once before the capture"):  # noqa: SIM117
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            SWD()(z)


def test_loss_scale_multiplies_all_terms():
    z = normalize(torch.randn(2, 8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3)), dim=-1)
    plain, scaled = (DecoupledNTXent(align_reduction="mean", loss_scale=s).terms(z) for s in (1.0, 1000.0))
    for name in ("attraction", "repulsion"):
        torch.testing.assert_close(scaled[name], 1000 * plain[name])
