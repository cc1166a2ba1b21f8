"""The metrics of small sets: definitions, scikit-learn's values, and fine-tuning with several labels per image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from kontrast.errors import DataError
from kontrast.probes import classification_metrics
from kontrast.probes.classification_metrics import (
    CLASSIFICATION_METRICS,
    mean_average_precision,
    mean_per_class,
    roc_auc,
)
from kontrast.probes.fine_tuning import tuned_scores
from kontrast.probes.finetuning_protocols import FineTuning

from support.doctests import run_examples


def test_mean_per_class_and_roc_auc_are_scikit_learns():
    from sklearn.metrics import balanced_accuracy_score, roc_auc_score

    rng = np.random.default_rng(0)
    scores, labels = torch.from_numpy(rng.normal(size=(200, 3)).round(1)), torch.from_numpy(rng.integers(0, 3, 200))
    expected = balanced_accuracy_score(labels, scores.argmax(1))
    assert mean_per_class(scores, labels) == pytest.approx(expected, abs=1e-12)
    two, which = scores[:, :2], labels.clamp(max=1)
    assert roc_auc(two, which) == pytest.approx(roc_auc_score(which, two[:, 1] - two[:, 0]), abs=1e-12)
    with pytest.raises(DataError, match="two classes"):
        roc_auc(scores, labels)


def test_mean_average_precision_of_a_hand_computed_example():
    """Class 0: right, wrong, right of 2 objects: precision 1 up to recall 1/2 (6 points), 2/3 beyond (5 points).

    Class 1: all right. Class 2 has no image and doesn't count.
    """
    scores = torch.tensor([[3.0, 0.0, 1.0], [2.0, 5.0, 1.0], [1.0, 4.0, 1.0]])
    labels = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 0]])
    assert mean_average_precision(scores, labels) == pytest.approx(((6 + 5 * 2 / 3) / 11 + 1) / 2)


def test_several_labels_are_learned_and_the_search_takes_the_metric_that_is_asked_for():
    torch.manual_seed(0)
    labels = (torch.rand(80, 3) < 0.4).float()
    features = torch.cat([labels + 0.1 * torch.randn(80, 3), torch.randn(80, 2)], dim=1)
    frozen = nn.BatchNorm1d(5, affine=False)
    frozen.width = 5
    seen = []

    def measure(scores, held):
        seen.append(held.shape)
        return mean_average_precision(scores, held)

    settings = FineTuning("x", lr=0.1, epochs=20, batch=16)
    scores, used = tuned_scores(frozen, features, labels, features, 3, settings, transform=lambda x: x, search=True,
                                measure=measure, rates=(0.001, 1.0), decays=(0.0,))  # fmt: skip
    assert mean_average_precision(scores, labels) > 0.99
    assert seen == [(16, 3)] * 2 and [one["lr"] for one in used["searched"]] == pytest.approx([1e-4, 0.1])
    assert used["lr"] == max(used["searched"], key=lambda one: one["held_out"])["lr"]


@pytest.mark.parametrize("name", [*(f.__name__ for f in CLASSIFICATION_METRICS.values()), "area_of_curve"])
def test_examples(name):
    run_examples(getattr(classification_metrics, name))
