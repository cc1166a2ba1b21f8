"""Linear protocols, few-shot probes, fine-tuning, feature extraction and intervals."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from kontrast.data import ImageSet
from kontrast.data.image_set import RaggedImages
from kontrast.errors import DataError, UsageError
from kontrast.networks import encoder
from kontrast.networks.vit import DropPath
from kontrast.probes import (
    FINE_TUNING,
    PROTOCOLS,
    FineTuner,
    FineTuning,
    extract_features,
    few_per_class,
    few_shot,
    finetune,
    linear,
)
from kontrast.probes.fine_tuning import split_train
from kontrast.probes.layer_decay import build_optimizers, layers_of
from kontrast.probes.mixed_images import mix_images
from kontrast.probes.random_erasing import erase_boxes
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


def test_a_layer_decay_scales_the_rate_of_each_layer():
    """One step of plain descent from the same gradient moves each layer by decay^(layers above it) times the rate."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 2))
    trunk = nn.Sequential(*network[:2])
    both = nn.Sequential(trunk, network[2])
    assert [sum(p.numel() for p in layer) for layer in layers_of(both)] == [16, 20, 20, 10]
    for optimizer, _ in (pairs := build_optimizers(both, FineTuning(layer_decay=0.5))):
        for p in optimizer.parameters.values():
            p.grad = torch.ones_like(p)
    before = [p.clone() for p in both.parameters()]
    for optimizer, factor in pairs:
        optimizer.lr = 0.1 * factor
        optimizer.step()
    moved = [(b - p).mean().item() for b, p in zip(before, both.parameters())]
    steps = [m / moved[-1] for m in moved]
    assert steps == pytest.approx([0.125, 0.125, 0.25, 0.25, 0.5, 0.5, 1.0, 1.0], rel=1e-4)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_layers_of_a_vision_transformer_decay_as_in_mae(frozen):
    """Block i of 12 has the decay to the power of 12 - i; patches, class token and positions have it to that of 13."""
    vit = encoder("vit-tiny", size=16, patch=8, positions="learned", frozen_patches=frozen)
    network = nn.Sequential(vit, nn.Linear(vit.width, 3))
    factors = {p: factor for one, factor in build_optimizers(network, FineTuning("mae", layer_decay=0.5))
               for p in one.parameters.values()}  # fmt: skip
    powers = {name: -math.log2(factors[p]) for name, p in network.named_parameters() if p.requires_grad}
    assert len(factors) == len(powers), "every parameter has one optimizer"
    names = ("0.cls_token", "0.pos_embed", "0.blocks.0.norm1.bias", "0.blocks.11.mlp.fc2.weight", "0.norm.weight")
    assert [powers[name] for name in (*names, "1.weight")] == [13, 13, 12, 1, 0, 0]
    assert frozen or powers["0.patch_embed.proj.weight"] == 13


def test_erased_boxes_are_noise_in_the_given_share_of_images():
    images = torch.full((400, 2, 12, 20), 7.0)
    erased = erase_boxes(images, 0.25, np.random.default_rng(0))
    changed = erased != 7
    hit = changed.any(-1).any(-1)[:, 0]
    assert 70 < hit.sum() < 130 and torch.equal(changed[:, 0], changed[:, 1]) and (images == 7).all()
    rows, columns = changed[hit, 0].any(2), changed[hit, 0].any(1)
    area = rows.sum(1) * columns.sum(1)
    assert torch.equal(area, changed[hit, 0].sum((1, 2))), "what is erased is one box"
    assert area.min() >= 0.02 * 240 - 4 and area.max() <= 240 / 3 + 8
    assert erased[changed].mean().abs() < 0.1 and 0.9 < erased[changed].std() < 1.1
    assert torch.equal(erase_boxes(images, 0.0, np.random.default_rng(0)), images)


def test_drop_path_grows_from_block_to_block_and_repeats_with_the_seed():
    x, y = pictures(12)
    vit = encoder("vit-tiny", size=16)
    protocol = FineTuning(epochs=1, batch=6, drop_path=0.55)
    assert protocol.suited_to(vit) == protocol
    assert protocol.suited_to(encoder("small-conv", size=16, width=8)).drop_path == 0
    before = torch.random.get_rng_state()
    networks = [FineTuner(vit, 3, seed=seed).train(protocol, x, y) for seed in (1, 1, 2)]
    assert torch.equal(torch.random.get_rng_state(), before), "the caller's random numbers go on"
    shares = [module.drop_prob for module in networks[0].modules() if isinstance(module, DropPath)]
    assert shares == pytest.approx([0.05 * number for number in range(12)])
    assert all(module.drop_prob == 0 for module in vit.modules() if isinstance(module, DropPath))
    weights = [network[1].weight for network in networks]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    plain = FineTuner(vit, 3, seed=1).train(dataclasses.replace(protocol, drop_path=0.0), x, y)
    assert not torch.equal(plain[1].weight, weights[0])


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0)])
def test_mixed_images_have_mixed_labels(mixup, cutmix):
    """Image i has the value i everywhere, so that the pixels tell the share of each image."""
    values = torch.arange(6, dtype=torch.float64)
    images = values[:, None, None, None].expand(6, 2, 16, 16)
    for seed in range(5):
        mixed, targets = mix_images(images, torch.arange(6), 6, mixup, cutmix, np.random.default_rng(seed))
        torch.testing.assert_close(targets.sum(1), torch.ones(6, dtype=torch.float64))
        torch.testing.assert_close(mixed.mean((1, 2, 3)), targets @ values)
        whole = torch.isin(mixed, values).all()
        assert whole == bool(cutmix), "cutmix leaves every pixel whole"
    again = mix_images(images, torch.arange(6), 6, mixup, cutmix, np.random.default_rng(4))
    assert torch.equal(again[0], mixed) and images.max() == 5


@pytest.mark.parametrize("name", list(FINE_TUNING))
def test_every_fine_tuning_protocol_learns(name):
    torch.manual_seed(0)
    x, y = pictures()
    network = encoder("small-conv", size=16, width=16)
    given = FINE_TUNING[name]
    rate = 0.1 if given.optimizer == "sgd" else 0.01
    protocol = dataclasses.replace(given, epochs=30, batch=16, warmup=min(1.0, given.warmup), lr=rate)
    found = finetune(network, x[:60], y[:60], x[60:], y[60:], protocol=protocol)
    assert found.accuracy > 0.9 and found.protocol["name"] == name and not found.protocol["augmented"]
    assert found.mean_per_class > 0.8 and len(found.per_class) == 3


def test_the_published_settings_of_fine_tuning():
    mae, small = FINE_TUNING["mae"], FINE_TUNING["moco-v3-small"]
    assert (mae.optimizer, mae.lr, mae.weight_decay, mae.layer_decay, mae.epochs) == ("adamw", 2e-3, 0.05, 0.65, 100)
    assert (mae.mixup, mae.cutmix, mae.smoothing, mae.warmup) == (0.8, 1.0, 0.1, 5)
    assert small.lr == pytest.approx(3e-4 * 1024 / 512) and FINE_TUNING["moco-v3"].lr == pytest.approx(
        5e-4 * 1024 / 512
    )
    assert (
        mae.rate(2.5) == pytest.approx(1e-3)
        and mae.rate(5) == pytest.approx(2e-3)
        and mae.rate(100) == pytest.approx(0)
    )
    with pytest.raises(UsageError, match="did you mean 'mae'"):
        finetune(encoder("small-conv", size=16, width=8), *pictures(9), *pictures(9), protocol="mea")


def test_augmentation_sees_the_epoch_and_each_image_once():
    x, y = pictures(12)
    seen: list[tuple[int, list[int]]] = []

    def augment(epoch, rows, images, sizes):
        seen.append((epoch, rows.tolist()))
        assert torch.equal(images, x[rows]) and sizes is None
        return images.float() / 255

    network = encoder("small-conv", size=16, width=8)
    found = finetune(network, x, y, x, y, epochs=2, batch=6, augment=augment)
    assert [epoch for epoch, _ in seen] == [0, 0, 1, 1] and found.protocol["augmented"]
    assert sorted(seen[0][1] + seen[1][1]) == sorted(seen[2][1] + seen[3][1]) == list(range(12))


def test_a_search_uses_held_out_train_images_only():
    """The best rate on a fifth of train is taken, whatever the test images say."""
    torch.manual_seed(0)
    x, y = pictures()
    network = encoder("small-conv", size=16, width=16)
    options = {"epochs": 6, "batch": 16, "lr": 0.1, "search": True, "rates": (1e-6, 1.0), "decays": (0.0, 1e-3)}
    found = finetune(network, x[:60], y[:60], x[60:], y[60:], **options)
    other = finetune(network, x[:60], y[:60], x[60:], y[60:].flip(0), **options)
    tried = found.protocol["searched"]
    assert [one["lr"] for one in tried] == pytest.approx([1e-7, 1e-7, 0.1, 0.1]) and tried == other.protocol["searched"]
    assert found.protocol["lr"] == pytest.approx(0.1) and found.accuracy > 0.9
    best = max(one["held_out"] for one in tried)
    assert best == next(
        one["held_out"] for one in tried if one["weight_decay"] == found.protocol["weight_decay"] and one["lr"] > 0.01
    )
    fitted, held = split_train(y[:60], seed=3)
    assert torch.bincount(y[held]).tolist() == [4, 4, 4] and sorted([*fitted.tolist(), *held.tolist()]) == list(
        range(60)
    )
    with pytest.raises(DataError, match="two train images"):
        split_train(torch.arange(5), 0)
