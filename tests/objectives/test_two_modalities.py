"""Images against texts in both directions: CLIP, InfoLOOB, CACR and SigLIP, with their matrix in one pass."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from kontrast.kernels import links, tiled
from kontrast.objectives import objective

from support.objective_definitions import clip, info_loob, siglip, symmetric_cacr

TWO_WAY = {
    "info-nce": ({"temperature": 0.3, "symmetric": True}, lambda z, labels=None: clip(z, 0.3, labels)),
    "dcl": ({"temperature": 0.3, "negatives": "cross-view"}, lambda z, labels=None: info_loob(z, 0.3, labels)),
    "cacr": ({"t_minus": 1.5, "symmetric": True}, lambda z, labels=None: symmetric_cacr(z, 1.5, labels)),
    "siglip": ({"temperature": 0.2, "bias": -1.5}, lambda z, labels=None: siglip(z, 5.0, -1.5, labels)),
}
CAPTIONS = [0, 0, 1, 2, 3, 3, 3]
"""Labels of seven captions: the first two show the same image, and so do the last three."""


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("name", TWO_WAY)
def test_captions_of_one_image_are_no_negatives(name, small, projections, monkeypatch) -> None:
    """Images and texts may come as two tensors; large batches are tiled."""
    if not small:
        monkeypatch.setattr(links, "SMALL", {})
        monkeypatch.setattr(tiled, "TILE", 4)
    arguments, definition = TWO_WAY[name]
    images, texts = (x.clone().requires_grad_() for x in projections)
    for labels in (None, CAPTIONS):
        given = None if labels is None else torch.tensor(labels)
        ours = objective(name, **arguments)(images, texts, labels=given)
        expected = definition(torch.stack([images, texts]), labels)
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
        slopes = [torch.autograd.grad(loss, [images, texts]) for loss in (ours, expected)]
        torch.testing.assert_close(*slopes, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["info-nce", "dcl", "cacr"])
def test_both_directions_share_one_matrix(name, projections, monkeypatch) -> None:
    calls = []
    compute = links.two_way_statistics
    monkeypatch.setattr(links, "two_way_statistics", lambda *a, **k: calls.append(a) or compute(*a, **k))
    monkeypatch.setattr(links, "row_statistics", lambda *a, **k: pytest.fail("one direction at a time"))
    objective(name, **TWO_WAY[name][0])(projections)
    assert len(calls) == 1


@pytest.mark.parametrize("name", TWO_WAY)
def test_images_and_texts_may_change_places(name, projections) -> None:
    loss = objective(name, **TWO_WAY[name][0])
    torch.testing.assert_close(loss(projections), loss(projections.flip(0)))


def test_clip_is_cross_entropy_of_rows_and_columns(projections) -> None:
    logits = 14.3 * normalize(projections[0], dim=-1) @ normalize(projections[1], dim=-1).T
    expected = (cross_entropy(logits, torch.arange(7)) + cross_entropy(logits.T, torch.arange(7))) / 2
    torch.testing.assert_close(objective("info-nce", temperature=1 / 14.3, symmetric=True)(projections), expected)


def test_cacr_is_the_mean_of_both_directions(projections) -> None:
    one_way = objective("cacr")
    both = (one_way(projections) + one_way(projections.flip(0))) / 2
    torch.testing.assert_close(objective("cacr", symmetric=True)(projections), both)
    one_way = objective("cacr", cost="rbf")
    both = (one_way(projections) + one_way(projections.flip(0))) / 2
    torch.testing.assert_close(objective("cacr", cost="rbf", symmetric=True)(projections), both)


def test_info_loob_is_clip_without_the_positive(projections) -> None:
    """As NT-Xent is the softplus of DCL."""
    clip_rows = objective("info-nce", temperature=0.3, symmetric=True).rows(projections)
    dcl_rows = objective("dcl", temperature=0.3, negatives="cross-view").rows(projections)
    torch.testing.assert_close(clip_rows, torch.nn.functional.softplus(dcl_rows))


def test_siglip_starts_where_its_paper_does() -> None:
    """Orthogonal images and texts at 4,096 pairs cost 10.19; without the bias they would cost 2,839."""
    at_start = math.log1p(math.exp(10)) + 4095 * math.log1p(math.exp(-10))
    assert round(at_start, 2) == 10.19
    loss = objective("siglip")
    assert (loss.temperature.log_scale.item(), loss.b.item()) == (pytest.approx(math.log(10)), -10.0)
    images, texts = torch.eye(8).chunk(2)
    expected = math.log1p(math.exp(10)) + 3 * math.log1p(math.exp(-10))
    assert loss(images, texts).item() == pytest.approx(expected, rel=1e-6)
    assert len(list(objective("siglip", temperature=0.1, bias=-10.0).parameters())) == 0


def test_siglip_learns_temperature_and_bias(projections) -> None:
    loss = objective("siglip").double()
    parameters = [loss.temperature.log_scale, loss.b]
    expected = siglip(projections, loss.temperature.log_scale.exp(), loss.b)
    value = loss(projections)
    torch.testing.assert_close(value, expected)
    slopes = torch.autograd.grad(value, parameters)
    torch.testing.assert_close(slopes, torch.autograd.grad(expected, parameters))
    # d loss / d b is the mean over images of the sum of the row's probabilities, minus one.
    x, y = normalize(projections, dim=-1)
    sigma = torch.sigmoid(loss.temperature.log_scale.exp() * x @ y.T + loss.b)
    torch.testing.assert_close(slopes[1], (sigma.sum() - 7) / 7)
    assert set(loss.state_dict()) == {"temperature.log_scale", "b"}


def test_siglip_takes_any_number_as_bias(projections) -> None:
    assert objective("siglip", bias=3).bias == 3.0
    with pytest.raises(ValueError, match="bias is 'high'"):
        objective("siglip", bias="high")


def test_open_clips_losses(projections) -> None:
    open_clip = pytest.importorskip("open_clip")
    images, texts = normalize(projections, dim=-1)
    scale, bias = torch.tensor(14.3, dtype=torch.float64), torch.tensor(-4.0, dtype=torch.float64)
    theirs = open_clip.loss.ClipLoss()(images, texts, scale)
    torch.testing.assert_close(objective("info-nce", temperature=1 / 14.3, symmetric=True)(projections), theirs)
    theirs = open_clip.loss.SigLipLoss()(images, texts, scale, bias)
    torch.testing.assert_close(objective("siglip", temperature=1 / 14.3, bias=-4.0)(projections), theirs)


def test_gradients_are_those_of_open_clips_losses(projections) -> None:
    """To images and texts, and to the log of the scale and the bias, which open_clip learns too."""
    open_clip = pytest.importorskip("open_clip", reason="a benchmark-only dependency")
    images, texts = (x.clone().requires_grad_() for x in projections)
    log_scale, bias = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (math.log(10.0), -10.0))
    units = [normalize(x, dim=-1) for x in (images, texts)]

    clip = objective("info-nce", temperature="learned", initial_temperature=0.1, symmetric=True).double()
    theirs = open_clip.loss.ClipLoss()(*units, log_scale.exp())
    slopes = torch.autograd.grad(clip(images, texts), [images, texts, clip.temperature.log_scale])
    torch.testing.assert_close(slopes, torch.autograd.grad(theirs, [images, texts, log_scale], retain_graph=True))

    siglip_loss = objective("siglip").double()
    theirs = open_clip.loss.SigLipLoss()(*units, log_scale.exp(), bias)
    torch.testing.assert_close(siglip_loss(images, texts), theirs)
    slopes = torch.autograd.grad(
        siglip_loss(images, texts), [images, texts, siglip_loss.temperature.log_scale, siglip_loss.b]
    )
    torch.testing.assert_close(slopes, torch.autograd.grad(theirs, [images, texts, log_scale, bias]))


@pytest.mark.parametrize("name", TWO_WAY)
def test_all_labels_equal_are_refused(name, projections) -> None:
    with pytest.raises(ValueError, match="all 7 labels are 2"):
        objective(name, **TWO_WAY[name][0])(projections, labels=torch.full((7,), 2))


def test_a_row_whose_label_everyone_else_has_keeps_the_loss_finite() -> None:
    z: Tensor = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 0, 0, 1])
    for name in TWO_WAY:
        value = objective(name, **TWO_WAY[name][0])(z, labels=labels)
        assert value.isfinite() and torch.autograd.grad(value, z)[0].isfinite().all()
