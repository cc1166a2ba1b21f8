"""KoLeo: closed forms, identical rows, and which rows are repelled."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from kontrast import distributed
from kontrast.objectives import KoLeo
from kontrast.objectives.inputs import values_unread


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_orthonormal_rows() -> None:
    eye = torch.eye(6, dtype=torch.float64)
    assert KoLeo()(eye, eye).item() == pytest.approx(-math.log(2) / 2, abs=1e-7)


def test_it_is_half_the_log_of_two_minus_twice_the_largest_similarity() -> None:
    z = normalize(draw(2, 9, 5), dim=-1)
    s = (z @ z.mT).masked_fill(torch.eye(9, dtype=torch.bool), -2.0)
    torch.testing.assert_close(KoLeo()(z), -torch.log(2 - 2 * s.amax(-1)).mean() / 2, rtol=1e-7, atol=1e-7)


def test_identical_rows_cost_the_log_of_eps_and_get_no_gradient() -> None:
    """They would need a direction. Public code divides 0 by 0 here, or adds eps to every coordinate."""
    z = torch.ones(2, 8, 384).requires_grad_()
    loss = KoLeo()(z)
    assert loss.item() == pytest.approx(-math.log(1e-8), abs=1e-5) == pytest.approx(18.42, abs=0.01)
    assert torch.autograd.grad(loss, z)[0].abs().max() == 0
    released = torch.nn.functional.pairwise_distance(torch.ones(1, 384), torch.ones(1, 384), eps=1e-8)
    assert -torch.log(released + 1e-8).item() == pytest.approx(15.4, abs=0.05)


def test_close_rows_keep_their_digits_in_float32() -> None:
    z = normalize(draw(1, 8, 16), dim=-1)
    z = torch.cat([z, normalize(z + 1e-5 * draw(1, 8, 16, seed=1), dim=-1)], dim=1).expand(2, 16, 16)
    torch.testing.assert_close(KoLeo()(z.float()).double(), KoLeo()(z), rtol=3e-3, atol=0)


def test_both_ends_of_the_distance_have_a_gradient() -> None:
    """The middle row is the neighbor of both others, but its own neighbor is the first."""
    angles = torch.tensor([0.0, 0.5, 1.3], dtype=torch.float64, requires_grad=True)
    view = torch.stack([angles.cos(), angles.sin()], dim=-1)
    slope = torch.autograd.grad(KoLeo(eps=1e-15)(view, view), angles)[0]
    near, far = (0.5 / math.tan(x / 2) / 3 for x in (0.5, 0.8))  # of log(2 sin(x/2)), a third each
    torch.testing.assert_close(slope, torch.tensor([2 * near, -2 * near + far, -far], dtype=torch.float64))


def test_neighbors_are_of_the_same_view() -> None:
    """Views of one image may be equal, and views are averaged."""
    z, other = draw(9, 5), draw(9, 5, seed=1)
    loss = KoLeo()
    torch.testing.assert_close(loss(z, z), loss(z, z.flip(0)))
    torch.testing.assert_close(loss(z, other), (loss(z, z) + loss(other, other)) / 2)


def test_local_views_and_keys_do_not_count() -> None:
    z = draw(4, 7, 5).requires_grad_()
    loss = KoLeo()
    value = loss(z, global_views=2)
    torch.testing.assert_close(value, loss(z[:2]))
    assert torch.autograd.grad(value, z)[0][2:].abs().max() == 0
    assert loss.rows(z, global_views=2).shape == (2, 7)
    torch.testing.assert_close(loss(z, keys=draw(4, 7, 5, seed=1)), loss(z))


def test_attraction_is_zero() -> None:
    terms = KoLeo().terms(draw(2, 6, 5))
    assert list(terms) == ["attraction", "repulsion"] and terms.attraction == 0


def test_one_image_per_rank_has_no_neighbor(monkeypatch) -> None:
    monkeypatch.setattr(distributed, "world", lambda: 2)
    with values_unread(), pytest.raises(ValueError, match="KoLeo has one image per rank: give at least 2"):
        KoLeo()(draw(2, 1, 5))
