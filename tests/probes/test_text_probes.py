"""Zero-shot classification and retrieval across images and texts, against their definitions."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.nn.functional import normalize

from kontrast.data.captioned_digits import COLORS
from kontrast.errors import DataError, UsageError
from kontrast.probes import class_vectors, retrieval, retrieval_ranks, zero_shot
from kontrast.probes.zero_shot import DIGIT_COLORS, TEMPLATES, templates_named


def ranks_by_definition(images, texts, ids, starts):
    """One query at a time, with sets."""
    s = normalize(texts, dim=-1) @ normalize(images, dim=-1).T
    owners = [i for i in range(len(images)) for _ in range(starts[i], starts[i + 1])]
    has = [{ids[m] for m in range(starts[i], starts[i + 1])} for i in range(len(images))]
    to_image, to_text = [], []
    for text in ids:
        right = [i for i in range(len(images)) if text in has[i]]
        best = max(s[text, i] for i in right)
        to_image.append(1 + sum(bool(s[text, i] >= best) for i in range(len(images)) if i not in right))
    for i in range(len(images)):
        best = max(s[text, i] for text in has[i])
        to_text.append(1 + sum(bool(s[text, i] >= best) for text in ids if text not in has[i]))
    return to_image, to_text, owners


@pytest.mark.parametrize("shared", [False, True])
def test_ranks_are_those_of_the_definition(shared, monkeypatch):
    monkeypatch.setattr(sys.modules["kontrast.probes.retrieval"], "CHUNK", 4)
    made = torch.Generator().manual_seed(0)
    images, texts = torch.randn(7, 3, generator=made), torch.randn(12, 3, generator=made)
    starts = [0, 2, 4, 5, 8, 9, 11, 14]
    ids = [0, 1, 2, 1, 3, 4, 5, 5, 6, 7, 0, 8, 9, 10] if shared else [*range(12), 0, 1][:14]
    found = retrieval_ranks(images, texts, torch.tensor(ids), torch.tensor(starts))
    to_image, to_text, owners = ranks_by_definition(images, texts, ids, starts)
    assert (found.to_image.tolist(), found.to_text.tolist(), found.owners.tolist()) == (to_image, to_text, owners)


def test_a_model_that_cannot_tell_anything_apart_is_last():
    """argsort would put the right answer first; ties count against the model."""
    ranks = retrieval_ranks(torch.ones(10, 4), torch.ones(50, 4), torch.arange(50), torch.arange(0, 51, 5))
    assert ranks.to_image.tolist() == [10] * 50 and ranks.to_text.tolist() == [46] * 10
    assert all(result.accuracy == 0 for result in retrieval(ranks) if result.protocol["k"] < 10)


def test_chance_is_that_of_flickr8k():
    """1,000 images with five captions: 0.1, 0.5 and 1 % in both directions."""
    made = torch.Generator().manual_seed(1)
    images, texts = torch.randn(1000, 64, generator=made), torch.randn(5000, 64, generator=made)
    ranks = retrieval_ranks(images, texts, torch.arange(5000), torch.arange(0, 5001, 5))
    found = {result.probe: result for result in retrieval(ranks)}
    assert found["text-to-image-r10"].accuracy == pytest.approx(0.01, abs=0.006)
    assert found["image-to-text-r10"].accuracy == pytest.approx(0.01, abs=0.011)
    assert found["text-to-image-r5"].n == 5000 and found["image-to-text-r5"].n == 1000
    assert abs(found["text-to-image-r1"].extra["median_rank"] - 500) < 60


def test_any_of_five_counts_and_perfect_is_perfect():
    images = torch.eye(6)
    texts = torch.cat([torch.eye(6), -torch.eye(6)])  # each image has one good and one bad caption
    ids = torch.tensor([x for i in range(6) for x in (i, i + 6)])
    ranks = retrieval_ranks(images, texts, ids, torch.arange(0, 13, 2))
    assert ranks.to_text.tolist() == [1] * 6 and ranks.to_image.tolist() == [1, 6] * 6
    results = {result.probe: result for result in retrieval(ranks)}
    assert results["image-to-text-r1"].accuracy == 1 and results["text-to-image-r1"].accuracy == 0.5
    # The interval is over images, and each of them has one hit of two.
    assert (results["text-to-image-r1"].low, results["text-to-image-r1"].high) == (0.5, 0.5)
    assert ranks.curve()[0] == (1, 1.0, 0.5)


def test_class_vectors_are_means_of_unit_vectors():
    made = {
        text: torch.randn(5) * (1 + 9 * i) for i, text in enumerate(("a cat", "the cat", "a hot dog", "the hot dog"))
    }
    found = class_vectors(lambda texts: torch.stack([made[t] for t in texts]), ["cat", "hot_dog"], ["a {}", "the {}"])
    cat = normalize(made["a cat"], dim=0) + normalize(made["the cat"], dim=0)
    torch.testing.assert_close(found[0], normalize(cat, dim=0))
    torch.testing.assert_close(found.norm(dim=1), torch.ones(2))


def test_zero_shot_takes_the_nearest_class_by_angle():
    images, classes = torch.tensor([[9.0, 1.0], [0.1, 0.2], [3.0, 2.0]]), torch.eye(2)
    found = zero_shot(images, torch.tensor([0, 1, 1]), classes)
    assert found.accuracy == pytest.approx(2 / 3) and found.probe == "zero-shot" and found.low < found.high
    with pytest.raises(DataError, match="label 2, and there are 2 class names"):
        zero_shot(images, torch.tensor([0, 1, 2]), classes)
    with pytest.raises(DataError, match="not finite"):
        zero_shot(images * float("nan"), torch.tensor([0, 1, 1]), classes)


def test_templates_by_name_or_of_your_own():
    assert len(TEMPLATES["cifar-18"]) == len(set(TEMPLATES["cifar-18"])) == 18 and len(TEMPLATES["clip-7"]) == 7
    assert all(one.count("{}") == 1 for group in TEMPLATES.values() for one in group)
    assert templates_named(["a {}", "b {}"]) == ("a {}", "b {}") and DIGIT_COLORS == COLORS
    with pytest.raises(UsageError, match="did you mean 'photo'"):
        templates_named("photos")
