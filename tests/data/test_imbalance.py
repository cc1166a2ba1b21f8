"""Label imbalance keeps exactly as many images per class as the paper's code."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kontrast.data import ImageSet
from kontrast.data.imbalance import counts, imbalance


def test_cifar10_counts():
    assert counts([5000] * 10, "linear") == [500 * (i + 1) for i in range(10)]
    assert counts([5000] * 10, "exponential") == [0, 1, 4, 12, 33, 91, 248, 676, 1839, 5000]
    assert sum(counts([5000] * 10, "linear")) == 27500 and sum(counts([5000] * 10, "exponential")) == 7904


def test_cifar100_deciles():
    assert sum(counts([500] * 100, "linear")) == 27500 and sum(counts([500] * 100, "exponential")) == 7870
    assert counts([500] * 100, "exponential")[::10] == [0, 0, 0, 1, 3, 9, 24, 67, 183, 500]


@pytest.mark.parametrize("classes", [2, 3, 7, 25, 1000])
def test_the_last_class_keeps_all_images_for_any_number_of_classes(classes):
    for kind in ("linear", "exponential"):
        kept = counts([60] * classes, kind)
        assert kept[-1] == 60 and kept == sorted(kept) and kept[0] < 60


def test_images_are_chosen_by_the_shuffle_of_scikit_learn():
    from sklearn.utils import shuffle

    labels = torch.arange(1000) % 10
    images = ImageSet(torch.zeros(1000, 1, 1, 1), [""] * 1000, labels)
    kept = imbalance(images, "linear")
    assert torch.bincount(labels[kept]).tolist() == [10 * (i + 1) for i in range(10)]
    expected = shuffle(np.flatnonzero(labels.numpy() == 0), random_state=2021)[:10]
    assert kept[:10].tolist() == expected.tolist() and len(set(kept.tolist())) == len(kept)
    assert not torch.equal(kept, imbalance(images, "linear", seed=1))
