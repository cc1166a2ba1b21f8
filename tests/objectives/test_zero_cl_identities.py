"""Zero-CL: its two halves, what rank and ridge leave over, its terms, and the symmetric root that whitens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kontrast.kernels.covariance import inverse_root
from kontrast.objectives import ZeroCL


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_instances_are_the_features_of_the_transpose() -> None:
    for shape in ((2, 6, 6), (3, 5, 9)):
        z = draw(*shape)
        torch.testing.assert_close(ZeroCL("instances")(z), ZeroCL("features")(z.mT))
        torch.testing.assert_close(ZeroCL()(z), ZeroCL("features")(z) + ZeroCL("instances")(z))


@pytest.mark.parametrize(("mode", "shape"), [("features", (40, 6)), ("instances", (6, 40))])
def test_equal_views_of_full_rank_cost_nothing(mode, shape) -> None:
    z = draw(*shape)
    assert ZeroCL(mode, ridge=1e-10)(z, z) < 1e-12


def test_equal_views_of_low_rank_cost_what_whitening_can_not_reach() -> None:
    """With N images, centered features have rank N - 1: at least D (1 - r/D)^2, which is 37.5 here."""
    z = draw(16, 64)
    loss = ZeroCL("features", ridge=1e-9)(z, z).item()
    assert 64 * (1 - 15 / 64) ** 2 <= loss < 38


def test_a_view_and_its_negative() -> None:
    z = draw(40, 6)
    assert ZeroCL("features", ridge=1e-10)(z, -z).item() == pytest.approx(4 * 6)


def test_the_scale_and_offset_of_a_feature_do_not_matter() -> None:
    z = 100 * draw(2, 12, 5)  # so that the 1e-5 of the standardization is small
    changed = z * torch.tensor([1.0, 7.0, 2.0, 0.5, 3.0], dtype=torch.float64) + 300
    torch.testing.assert_close(ZeroCL("features")(changed), ZeroCL("features")(z), rtol=1e-6, atol=1e-6)


def test_the_whitening_matrix_is_constant() -> None:
    """The gradient is that of the loss with the roots of this batch, and differs from the derivative of the value."""
    z = draw(2, 12, 4).requires_grad_()
    ours = torch.autograd.grad(ZeroCL("features")(z), z)[0]

    def standardized(view: Tensor) -> Tensor:
        centered = view - view.mean(0)
        return centered / torch.sqrt(centered.square().mean(0) + 1e-5)

    roots = [inverse_root((standardized(v).T @ standardized(v)).detach() / 12, 0.01) for v in z]
    x, y = (standardized(view) @ root for view, root in zip(z, roots))
    expected = torch.autograd.grad((1 - (x * y).mean(0)).square().sum(), z)[0]
    torch.testing.assert_close(ours, expected)
    exact = torch.autograd.grad(ZeroCL("features", detach=False)(z), z)[0]
    assert (exact - ours).norm() > 0.05 * ours.norm()


@pytest.mark.parametrize("mode", ["features", "instances"])
def test_repulsion_is_what_whitening_adds(mode) -> None:
    """Nothing for uncorrelated features; for equal views on a line everything: D (1 - 1/D)^2."""
    turned = (lambda x: x) if mode == "features" else (lambda x: x.mT)
    loss, line = ZeroCL(mode, ridge=1e-9), turned((100 * draw(20, 1)).expand(20, 5))
    terms = loss.terms(line, line)
    assert terms.attraction < 1e-9 and terms.repulsion.item() == pytest.approx(5 * (1 - 1 / 5) ** 2, rel=1e-6)
    hadamard = torch.tensor([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]], dtype=torch.float64)
    z = turned(torch.stack([100 * hadamard, 50 * hadamard.roll(1, 0)]))
    terms = loss.terms(z)
    assert terms.attraction > 1 and abs(terms.repulsion) < 1e-6


@pytest.mark.parametrize("ridge", [1e-6, 0.01, 1.0])
@pytest.mark.parametrize("rank", [1, 5, 64])
def test_the_root_is_that_of_the_eigenvalues(rank, ridge) -> None:
    x = draw(2, 64, rank) @ draw(2, rank, 30, seed=1)
    x = x / x.norm(dim=1, keepdim=True)
    C = x.mT @ x
    values, vectors = torch.linalg.eigh(C)
    expected = vectors @ torch.diag_embed((values.clamp(min=0) + ridge).rsqrt()) @ vectors.mT
    torch.testing.assert_close(inverse_root(C, ridge), expected, rtol=1e-6, atol=1e-6)


def test_the_root_of_zero() -> None:
    torch.testing.assert_close(inverse_root(torch.zeros(3, 3, dtype=torch.float64), 0.25), 2 * torch.eye(3).double())


def test_ridge_is_above_zero() -> None:
    with pytest.raises(ValueError, match=r"ridge is 0\.0: give a finite number above 0"):
        ZeroCL(ridge=0.0)
