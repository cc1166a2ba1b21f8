"""Linear protocols, few-shot probes, fine-tuning, feature extraction and intervals."""

from __future__ import annotations

import dataclasses
import json
from functools import partial

import pytest
import torch
from torch import nn

from kontrast.data import ImageSet
from kontrast.data.image_set import RaggedImages
from kontrast.errors import DataError, UsageError
from kontrast.networks import encoder
from kontrast.probes import PROTOCOLS, extract_features, few_per_class, few_shot, finetune, linear
from kontrast.probes.result import interval


def blobs(n: int = 300, width: int = 12, classes: int = 3, noise: float = 0.7, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    means = torch.randn(classes, width, generator=g)
    y = torch.randint(classes, (2 * n,), generator=g)
    x = means[y] + noise * torch.randn(2 * n, width, generator=g)
    return x[:n], y[:n], x[n:], y[n:]


def pictures(n: int = 90):
    """Red, green and blue noise, one color per class."""
    g = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 3
    x = torch.randint(0, 120, (n, 3, 16, 16), generator=g, dtype=torch.uint8)
    x[torch.arange(n), y] += 100
    return x, y


def test_learning_rates_of_the_protocols():
    rate = {name: [round(p.rate(e), 6) for e in (0, 59, 60, 80)] for name, p in PROTOCOLS.items()}
    assert rate["moco"] == [30, 30, 3, 0.3]
    assert rate["cacr"] == [1e-3, 1e-3, 2e-4, 4e-5]
    assert rate["uniclr"][0] == 30 and PROTOCOLS["uniclr"].rate(50) == pytest.approx(15)
    assert (PROTOCOLS["simclr"].lr, PROTOCOLS["simclr"].nesterov, PROTOCOLS["simclr"].deviation) == (0.2, True, 0.0)
    assert (PROTOCOLS["dcl-lars"].optimizer, PROTOCOLS["dcl-lars"].epochs, PROTOCOLS["dcl-lars"].batch) == (
        "lars",
        90,
        4096,
    )
    assert PROTOCOLS["uniclr-imagenet"].lr == pytest.approx(0.08) and PROTOCOLS["simclr-imagenet"].lr == 1.6
    assert rate["jcl-imagenet100"] == pytest.approx([10, 10, 1, 0.1]) and rate["hcl"] == [1e-3] * 4


@pytest.mark.parametrize("name", list(PROTOCOLS))
def test_every_protocol_learns_and_reports_its_last_epoch(name):
    protocol = PROTOCOLS[name]
    steps = {"dcl-lars": 1100, "uniclr-imagenet": 8000, "hcl": 1000}  # 300 images need more epochs for as many steps
    protocol = dataclasses.replace(protocol, epochs=steps.get(name, protocol.epochs))
    found = linear(*blobs(noise=0.5), protocol)
    assert found.probe == f"linear-{name}" and found.accuracy > 0.9
    assert found.accuracy == found.extra["curve"][-1] <= found.extra["best"] == max(found.extra["curve"])
    assert found.extra["curve"][found.extra["best_epoch"]] == found.extra["best"]
    assert len(found.extra["curve"]) == protocol.epochs


def test_the_same_seed_gives_the_same_classifier():
    first, again, other = (linear(*blobs(noise=2.0), "moco", seed=s) for s in (0, 0, 1))
    assert first == again and first.extra["curve"] != other.extra["curve"]


def test_augmented_features_are_requested_once_per_epoch():
    train, y, test, labels = blobs(noise=2.0)
    epochs = []

    def features_of_epoch(epoch: int) -> torch.Tensor:
        epochs.append(epoch)
        return train + 0.1 * torch.randn(train.shape, generator=torch.Generator().manual_seed(epoch))

    protocol = dataclasses.replace(PROTOCOLS["simclr"], epochs=4)
    found = linear(train, y, test, labels, protocol, features_of_epoch=features_of_epoch)
    assert epochs == [0, 1, 2, 3] and "without augmentation" not in found.note
    assert found.extra["curve"] != linear(train, y, test, labels, protocol).extra["curve"]
    with pytest.raises(DataError, match="augmented train"):
        linear(train, y, test, labels, protocol, features_of_epoch=lambda e: train[:5])


def test_a_batch_larger_than_train_is_noted():
    note = linear(*blobs(), "simclr").note
    assert "512" in note and "300" in note
    with pytest.raises(UsageError, match="'moco'"):
        linear(*blobs(), "mocco")


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_rate_is_not_rounded_to_float32(name, monkeypatch):
    """Training keeps its rate in a float32 tensor for CUDA graphs; a probe's rate is a Python float."""
    protocol, rates = dataclasses.replace(PROTOCOLS[name], epochs=2, lr=0.1), []
    build = dataclasses.replace(protocol).build_optimizer

    def watched(self, classifier):
        optimizer = build(classifier)
        step = optimizer.step
        optimizer.step = lambda: (rates.append(optimizer.lr), step())
        return optimizer

    monkeypatch.setattr(type(protocol), "build_optimizer", watched)
    linear(*blobs(n=40), protocol)
    assert rates[0] == 0.1 and all(type(rate) is float for rate in rates)


def test_few_per_class_draws_the_same_number_of_each_class():
    labels = torch.tensor([0] * 10 + [3] * 6 + [1] * 30)
    rows = few_per_class(labels, 5, seed=1)
    assert torch.bincount(labels[rows]).tolist() == [5, 5, 0, 5] and len(set(rows.tolist())) == 15
    assert not torch.equal(rows, few_per_class(labels, 5, seed=2))
    with pytest.raises(DataError, match="class 3 has 6"):
        few_per_class(labels, 7, seed=0)


def test_few_shot_is_the_mean_over_seeds_with_its_interval():
    found = few_shot(*blobs(noise=1.5), shots=5, seeds=(0, 1, 2, 3))
    values = found.extra["accuracies"]
    assert found.accuracy == pytest.approx(sum(values) / 4) and len(set(values)) > 1
    spread = (
        3.182446 * float(torch.tensor(values, dtype=torch.float64).std()) / 2
    )  # Student's t, three degrees of freedom
    assert (found.low, found.high) == pytest.approx((found.accuracy - spread, min(1.0, found.accuracy + spread)))
    assert found.over == "seeds" and few_shot(*blobs(), seeds=(3,)).over == "test images"
    more = few_shot(*blobs(noise=1.5), shots=60, seeds=(0, 1, 2, 3))
    assert more.accuracy > found.accuracy


def test_fine_tuning_trains_a_copy():
    torch.manual_seed(0)
    network = encoder("small-conv", size=16, width=16)
    before = {k: v.clone() for k, v in network.state_dict().items()}
    x, y = pictures()
    found = finetune(network, x[:60], y[:60], x[60:], y[60:], epochs=8, batch=16, lr=0.1)
    assert found.accuracy > 0.9 and found.probe == "fine-tune"
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())
    probe = partial(finetune, network, epochs=2, batch=8)
    assert few_shot(x[:60], y[:60], x[60:], y[60:], shots=4, seeds=(0,), probe=probe).protocol["probe"] == "fine-tune"
    with pytest.raises(DataError, match=r"60 train images.*59"):
        finetune(network, x[:60], y[:59], x[60:], y[60:])


def test_features_leave_the_encoder_as_it_was():
    network = encoder("small-conv", size=16, width=16).train()
    network.layers[1].eval()
    before = {k: v.clone() for k, v in network.state_dict().items()}
    x, _ = pictures(50)
    counts: list[int] = []
    features = extract_features(network, x, batch=16, advance=counts.append)
    assert counts == [16] * (len(x) // 16) + [len(x) % 16]
    assert features.shape == (50, 16) and features.dtype == torch.float32
    assert network.training and network.layers[4].training and not network.layers[1].training
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())
    torch.testing.assert_close(features, extract_features(network, x, batch=50))
    torch.testing.assert_close(features, extract_features(network, x.numpy(), lambda u: u.float() / 255))
    (features @ nn.Parameter(torch.ones(16))).sum().backward()  # not a tensor of inference mode
    with pytest.raises(DataError, match="no images"):
        extract_features(network, x[:0])


def test_features_come_through_views_and_image_sets():
    """A transform with keys is called as views are, and its first view is taken."""
    seen = []

    def views(images, keys, sizes):
        seen.append((keys.tolist(), sizes.tolist()))
        return torch.stack([images.float() / 255, images.float() * 0])

    images = pictures(6)[0]
    ragged = ImageSet(RaggedImages(images.flatten(), torch.full((6, 2), 16)), list("abcdef"))
    network = encoder("small-conv", size=16, width=16)
    features = extract_features(network, ragged, views, batch=4)
    torch.testing.assert_close(features, extract_features(network, images))
    assert seen == [([0, 1, 2, 3], [[16, 16]] * 4), ([4, 5], [[16, 16]] * 2)]


def test_the_interval_is_the_bootstrap_over_images():
    correct = torch.arange(200) < 160
    g = torch.Generator().manual_seed(1)
    draws = correct.double()[torch.randint(200, (10_000, 200), generator=g)].mean(1)
    expected = torch.quantile(draws, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    assert interval(160, 200) == pytest.approx(expected, abs=0.0051)
    assert interval(160, 200) == interval(160, 200) and interval(200, 200) == (1.0, 1.0)


def test_a_result_is_one_json_line():
    found = linear(*blobs(), dataclasses.replace(PROTOCOLS["moco"], epochs=2))
    line = json.dumps(found.to_dict())
    back = json.loads(line)
    assert "\n" not in line and back["accuracy"] == found.accuracy and back["low"] <= back["accuracy"] <= back["high"]
    assert back["protocol"]["lr"] == 30.0 and back["n"] == 300
