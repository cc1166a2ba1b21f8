"""Cross-entropy: the definition as loops in float64, torch's own, its classifier, and labels that don't fit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kontrast.objectives import CrossEntropy
from kontrast.objectives.inputs import values_unread

LABELS = torch.tensor([2, 0, 1, 2, 2, 0])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def definition(z: Tensor, W: Tensor, b: Tensor, smoothing: float) -> Tensor:
    """The cross-entropy of the softmax to the smoothed label, class by class."""
    losses = []
    for view in z:
        for row, label in zip(view, LABELS.tolist()):
            odds = [torch.exp(W[c] @ row + b[c]) for c in range(len(W))]
            target = [smoothing / len(W) + (1 - smoothing) * (c == label) for c in range(len(W))]
            losses.append(-sum(q * torch.log(p / sum(odds)) for q, p in zip(target, odds)))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("views", [2, 3])
def test_the_loss_is_its_definition(views, smoothing) -> None:
    """In value and in the gradients of z and of the classifier."""
    z, loss = draw(views, 6, 5).requires_grad_(), CrossEntropy(3, 5, smoothing).double()
    W, b = loss.classifier.parameters()
    ours, expected = loss(z, labels=LABELS), definition(z, W, b, smoothing)
    torch.testing.assert_close(ours, expected)
    for found, wanted in zip(*(torch.autograd.grad(x, (z, W, b)) for x in (ours, expected))):
        torch.testing.assert_close(found, wanted)
    repeated = cross_entropy(loss.classifier(z).flatten(0, 1), LABELS.repeat(views), label_smoothing=smoothing)
    torch.testing.assert_close(ours, repeated)


def test_attraction_is_the_label_and_repulsion_the_log_sum_exp() -> None:
    z, loss = draw(2, 6, 5), CrossEntropy(3, 5).double()
    logits, terms = loss.classifier(z), loss.terms(z, labels=LABELS)
    torch.testing.assert_close(terms.attraction, -logits[:, range(6), LABELS].mean())
    torch.testing.assert_close(terms.repulsion, torch.logsumexp(logits, -1).mean())
    assert loss.rows(z, labels=LABELS).shape == (2, 6)


def test_the_gradient_of_the_logits_is_softmax_minus_label() -> None:
    z, loss = draw(2, 6, 3).requires_grad_(), CrossEntropy(3, 3).double()
    loss.classifier.load_state_dict({"weight": torch.eye(3), "bias": torch.zeros(3)})
    slope = torch.autograd.grad(loss(z, labels=LABELS), z)[0]
    torch.testing.assert_close(slope, (torch.softmax(z, -1) - torch.nn.functional.one_hot(LABELS, 3)).detach() / 12)


def test_a_classifier_of_zeros_costs_the_log_of_the_classes() -> None:
    loss = CrossEntropy(7, 5)
    loss.classifier.load_state_dict({"weight": torch.zeros(7, 5), "bias": torch.zeros(7)})
    torch.testing.assert_close(loss(draw(2, 6, 5).float(), labels=LABELS), torch.tensor(7.0).log())


def test_a_few_steps_learn_the_labels() -> None:
    z, loss = draw(2, 6, 5).float(), CrossEntropy(3, 5)
    optimizer = torch.optim.SGD(loss.parameters(), lr=1.0)
    for _ in range(300):
        optimizer.zero_grad()
        loss(z, labels=LABELS).backward()
        optimizer.step()
    assert loss(z, labels=LABELS) < 0.2


def test_what_does_not_fit_is_refused() -> None:
    z, loss = draw(2, 6, 5), CrossEntropy(3, 5)
    with pytest.raises(ValueError, match="CrossEntropy needs labels=: give the class of each image"):
        loss(z)
    with pytest.raises(ValueError, match="labels range from 0 to 3: give 0 to 2, or more classes"):
        loss(z, labels=LABELS + (LABELS == 2))
    with pytest.raises(ValueError, match="labels range from -1 to 2"):
        loss(z, labels=LABELS - (LABELS == 0).int())
    with pytest.raises(ValueError, match=r"z is .*: give \[views, images, 5\], the width of the classifier"):
        loss(draw(2, 6, 4), labels=LABELS)
    with pytest.raises(ValueError, match="labels don't go with keys"):
        loss(z, labels=LABELS, keys=z)
    with pytest.raises(ValueError, match="classes is 1: give a whole number, at least 2"):
        CrossEntropy(classes=1)
    with values_unread():  # a training loop doesn't wait for the values, and its labels fit
        assert loss(z, labels=LABELS).isfinite()
