"""The embedded set is reproducible, shares no scan between its splits, and is hard for raw pixels."""

from __future__ import annotations

import hashlib

import torch
from torch.nn.functional import normalize

from kontrast.data import digits as module
from kontrast.data import open_data


def neighbours_accuracy(train, test, k: int = 20) -> float:
    """Return the accuracy of a weighted kNN by cosine on raw pixels."""
    fit, held = (normalize(part.images.flatten(1).float(), dim=1) for part in (train, test))
    similarity, index = (held @ fit.T).topk(k)
    votes = torch.zeros(len(test), 10).scatter_add_(1, train.labels[index], (similarity / 0.1).exp())
    return (votes.argmax(1) == test.labels).float().mean().item()


def test_shapes_and_classes():
    for split, count in module.COUNTS.items():
        images = open_data(None, split)
        assert images.images.shape == (count, 3, 32, 32) and images.images.dtype == torch.uint8
        assert len(images.labels.unique()) == len(images.classes) == 10 and images.has_test
        assert len(set(images.names)) == count


def test_train_and_test_share_no_scan():
    train, test = (set(open_data("digits", split).factors["source"].tolist()) for split in ("train", "test"))
    assert not train & test and len(train) + len(test) == 1797


def test_raw_pixels_classify_poorly():
    assert neighbours_accuracy(open_data("digits"), open_data("digits", "test")) <= 0.5


def test_the_set_is_the_same_each_time_it_is_made():
    first = open_data("digits", "test").images
    module.digits.cache_clear()
    again = open_data("digits", "test").images
    assert again is not first and hashlib.sha256(again.numpy()).digest() == hashlib.sha256(first.numpy()).digest()


def test_factors_describe_the_picture():
    images = open_data("digits", "test")
    assert {"background", "hue", "colour", "position", "size", "source"} <= images.factors.keys()
    assert all(len(values) == len(images) for values in images.factors.values())
    # Wherever the scan covers the background fully, the pixel has the recorded color.
    color = images.factors["colour"][:, :, None, None].int()
    hits = ((images.images.int() - color).abs().amax(dim=1) <= 1).flatten(1).any(dim=1)
    assert hits.float().mean() > 0.95


def test_factors_do_not_reveal_the_class():
    images = open_data("digits")
    for name in ("background", "hue"):
        values = images.factors[name]
        table = torch.zeros(10, int(values.max()) + 1).index_put_(
            (images.labels, values), torch.ones(len(images)), True
        )
        expected = table.sum(1, keepdim=True) * table.sum(0) / len(images)
        freedom = (table.shape[0] - 1) * (table.shape[1] - 1)
        assert ((table - expected) ** 2 / expected).sum() < freedom + 5 * (2 * freedom) ** 0.5
