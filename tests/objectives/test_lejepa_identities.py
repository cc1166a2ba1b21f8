"""LeJEPA: the loss as loops in float64, the values of SIGReg, its directions, and which views count where."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kontrast.kernels.characteristic import characteristic_sums, distance_to_normal
from kontrast.kernels.projections import unit_directions
from kontrast.objectives import LeJEPA


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def statistic(rows: Tensor, knots: int = 17, largest: float = 3.0) -> Tensor:
    """Return SIGReg of rows [N,1], whose only direction is 1."""
    one = torch.ones(1, 1, dtype=torch.float64)
    sums = characteristic_sums(rows[None], one, knots=knots, largest=largest)
    return distance_to_normal(sums, len(rows), largest).squeeze()


def normal_quantiles(count: int) -> Tensor:
    """Return a sample [count,1] that is as normal as a sample can be."""
    middle = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return torch.special.ndtri(middle)[:, None]


def lejepa(z: Tensor, directions: Tensor, weight: float, knots: int, largest: float, global_views: int) -> Tensor:
    """The loss as the paper and its code have it, image by image and knot by knot."""
    V, N, D = z.shape
    invariance, sigreg = [], []
    for v in range(V):
        for i in range(N):
            mean = sum(z[g, i] for g in range(global_views)) / global_views
            invariance += [(z[v, i, d] - mean[d]) ** 2 for d in range(D)]
        for a in directions:
            total = torch.zeros((), dtype=torch.float64)
            for k in range(knots):
                t = largest * k / (knots - 1)
                cosine = sum(torch.cos(t * (a @ z[v, i])) for i in range(N)) / N
                sine = sum(torch.sin(t * (a @ z[v, i])) for i in range(N)) / N
                width = largest / (knots - 1) * (1 if k in (0, knots - 1) else 2)
                total = total + width * math.exp(-t * t / 2) * ((cosine - math.exp(-t * t / 2)) ** 2 + sine**2)
            sigreg.append(N * total)
    return (1 - weight) * torch.stack(invariance).mean() + weight * torch.stack(sigreg).mean()


@pytest.mark.parametrize(("views", "global_views"), [(2, None), (3, None), (4, 2)])
def test_the_loss_is_its_definition(views, global_views) -> None:
    z = draw(views, 4, 3).requires_grad_()
    loss = LeJEPA(sigreg_weight=0.3, directions=5, knots=6, largest=2.5, seed=4)
    directions = unit_directions(5, 3, 4, torch.tensor(0))
    ours, expected = loss(z, global_views=global_views), lejepa(z, directions, 0.3, 6, 2.5, global_views or views)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(torch.autograd.grad(ours, z)[0], torch.autograd.grad(expected, z)[0])


@pytest.mark.parametrize("images", [4, 64])
def test_normal_projections_have_the_same_value_at_any_batch_size(images) -> None:
    """E T = sum_k w_k (1 - phi(t_k)^2), because each cosine and sine has mean phi and 0."""
    values = torch.stack([LeJEPA(1.0, seed=n)(draw(2, images, 32, seed=n)) for n in range(40)])
    assert values.mean().item() == pytest.approx(1.0525, abs=5 * (values.std().item() + 0.02) / math.sqrt(40))


def test_collapse_costs_its_share_of_the_batch() -> None:
    for images in (8, 128):
        z = torch.zeros(2, images, 6, dtype=torch.float64)
        assert LeJEPA(1.0).terms(z).repulsion.item() / images == pytest.approx(0.402, abs=5e-4)


def test_a_dense_wide_grid_gives_the_integral_over_all_t() -> None:
    """sqrt(2 pi) (1/N sum_ij e^(-(x_i-x_j)^2/2) - sqrt(2) sum_i e^(-x_i^2/4) + N/sqrt(3))"""
    x = 1.3 * draw(9, 1) + 0.4
    pairs = sum(torch.exp(-((a - b) ** 2) / 2) for a in x for b in x) / 9
    single = sum(torch.exp(-a * a / 4) for a in x)
    expected = math.sqrt(2 * math.pi) * (pairs - math.sqrt(2) * single + 9 / math.sqrt(3))
    torch.testing.assert_close(statistic(x, knots=400, largest=9.0), expected.squeeze(), rtol=1e-9, atol=1e-9)


def test_closed_forms_of_shift_and_scale() -> None:
    x = normal_quantiles(4000)
    for mu in (0.3, 1.0, 2.5):
        expected = 2 * math.sqrt(2 * math.pi / 3) * (1 - math.exp(-(mu**2) / 6))
        assert statistic(x + mu, 400, 9.0).item() / 4000 == pytest.approx(expected, rel=2e-3)
    for sigma in (0.2, 0.7, 3.0):
        parts = 1 / math.sqrt(2 * sigma**2 + 1) - 2 / math.sqrt(sigma**2 + 2) + 1 / math.sqrt(3)
        assert statistic(sigma * x, 400, 9.0).item() / 4000 == pytest.approx(math.sqrt(2 * math.pi) * parts, rel=2e-3)


def test_the_gradient_is_bounded_however_far_a_row_is() -> None:
    """An outlier moves by at most 2 sum_k w_k t_k |mean exp(i t x) - phi|; a squared distance would pull harder."""
    t = torch.linspace(0, 3, 17, dtype=torch.float64)
    bound = 2 * (6 / 16 * t * torch.exp(-(t**2) / 2) * 2).sum().item()
    for far in (10.0, 1e3, 1e6):
        x = torch.cat([draw(63, 1), torch.tensor([[far]], dtype=torch.float64)]).requires_grad_()
        slope = torch.autograd.grad(statistic(x), x)[0]
        assert slope.abs().max() < bound
        assert slope[-1].abs() < 0.25 * bound


@pytest.mark.parametrize("views", [2, 4])
def test_the_invariance_is_half_the_mean_distance_of_all_pairs_of_views(views) -> None:
    z = draw(views, 6, 5)
    pairs = (z[:, None] - z[None]).square().mean()
    torch.testing.assert_close(LeJEPA(0.0)(z), pairs / 2)


def test_every_view_counts_in_both_terms() -> None:
    """Public code once left the global views out of one term, and another pooled the views."""
    z = draw(4, 8, 5).requires_grad_()
    loss = LeJEPA(0.5, directions=64)
    terms = loss.terms(z, global_views=2)
    for term in (terms.attraction, terms.repulsion):
        slope = torch.autograd.grad(term, z, retain_graph=True)[0]
        assert (slope.abs().amax((1, 2)) > 1e-4).all()
        loss.step.zero_()
    each = [LeJEPA(1.0, directions=64)(torch.stack([view, view])) for view in z.detach()]
    torch.testing.assert_close(terms.repulsion.detach(), torch.stack(each).mean() / 2)
    with pytest.raises(ValueError, match="global_views is 1"):
        loss(z, global_views=1)


def test_the_mean_of_the_global_views_has_a_gradient() -> None:
    """Of the mean alone: local views move the global ones."""
    z = draw(3, 6, 5).requires_grad_()
    whole = torch.autograd.grad(LeJEPA(0.0)(z, global_views=2), z)[0]
    constant = (z - z[:2].mean(0).detach()).square().mean()
    assert (whole - torch.autograd.grad(constant, z)[0])[:2].abs().max() > 1e-3


def test_a_teacher_gives_the_mean() -> None:
    z, keys = draw(1, 6, 5), draw(2, 6, 5, seed=1)
    torch.testing.assert_close(LeJEPA(0.0)(z, keys=keys), (z - keys.mean(0)).square().mean())


def test_directions_are_fresh_after_each_step_and_the_same_after_resuming() -> None:
    z, loss = draw(2, 6, 5).requires_grad_(), LeJEPA(1.0, directions=8)
    values = []
    for _ in range(3):
        assert loss(z) == loss(z)  # evaluation alone changes nothing
        values.append(loss(z))
        values[-1].backward()
    assert loss.step == 3 and len({value.item() for value in values}) == 3
    resumed = LeJEPA(1.0, directions=8)
    resumed.load_state_dict(loss.state_dict())
    assert resumed(z) == loss(z)
    assert LeJEPA(1.0, directions=8, seed=1)(z) != values[0]


@pytest.mark.parametrize(("argument", "bad"), [("sigreg_weight", 1.5), ("directions", 0), ("knots", 1)])
def test_numbers_out_of_range_are_refused(argument, bad) -> None:
    with pytest.raises(ValueError, match=f"{argument} is {bad}: give .* (at most 1|at least [12])"):
        LeJEPA(**{argument: bad})
    with pytest.raises(ValueError, match="sigreg_weight is"):
        LeJEPA(torch.tensor(1.5, requires_grad=True))
