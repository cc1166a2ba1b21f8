"""RandAugment: torchvision's operations, drawn for each image, in fine-tuning with repeated augmentation."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from kontrast.errors import UsageError
from kontrast.networks import encoder
from kontrast.probes import FINE_TUNING, FineTuning
from kontrast.probes.fine_tuning import FineTuner
from kontrast.probes.rand_augment import LAYERS, MOVING, OPERATIONS, rand_augment
from kontrast.runs.cropped_features import FineTuningCrops
from kontrast.runs.run import Run

from support import tiny_run

LINEAR = {"interpolation": InterpolationMode.BILINEAR}
TORCHVISION = {
    "autocontrast": lambda x, s: tv.autocontrast(x.float() / 255),
    "equalize": lambda x, s: tv.equalize(x),
    "invert": lambda x, s: tv.invert(x),
    "posterize": lambda x, s: tv.posterize(x, 4 - int(4 * abs(s))),
    "solarize": lambda x, s: tv.solarize(x, 256 - int(256 * abs(s))),
    "brightness": lambda x, s: tv.adjust_brightness(x.float() / 255, 1 + 0.9 * s),
    "contrast": lambda x, s: tv.adjust_contrast(x.float() / 255, 1 + 0.9 * s),
    "saturation": lambda x, s: tv.adjust_saturation(x.float() / 255, 1 + 0.9 * s),
    "sharpness": lambda x, s: tv.adjust_sharpness(x.float() / 255, 1 + 0.9 * s),
    "rotate": lambda x, s: tv.rotate(x.float() / 255, 30 * s, **LINEAR),
    "shear_x": lambda x, s: tv.affine(
        x.float() / 255, 0, [0, 0], 1, [math.degrees(math.atan(0.3 * s)), 0], center=[12, 10], **LINEAR
    ),
    "shift_x": lambda x, s: tv.affine(x.float() / 255, 0, [-0.45 * 24 * s, 0], 1, [0, 0], **LINEAR),
    "shift_y": lambda x, s: tv.affine(x.float() / 255, 0, [0, -0.45 * 20 * s], 1, [0, 0], **LINEAR),
}


def pictures(count: int = 5) -> torch.Tensor:
    """uint8 images of 20 x 24 pixels: noise, a dark one, one with a flat half, and one of a single color."""
    made = torch.randint(0, 256, (count, 3, 20, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    made[1], made[2, :, :10], made[3] = made[1] // 2, 51, 77
    return made


@pytest.mark.parametrize("name", TORCHVISION)
def test_operations_are_those_of_torchvision(name):
    images, strengths = pictures(), torch.tensor([0.9, -0.9, 0.5, -0.3, 0.1])
    expected = torch.stack([TORCHVISION[name](x, float(s)) for x, s in zip(images, strengths)])
    expected = expected / 255 if expected.dtype == torch.uint8 else expected
    torch.testing.assert_close(OPERATIONS[name](images / 255, strengths), expected, rtol=0, atol=1e-5)


def test_the_other_operations():
    x, strengths = pictures() / 255, torch.tensor([0.9, -0.9, 0.5, -0.3, 0.1])
    turned = OPERATIONS["shear_x"](x.mT.contiguous(), strengths).mT
    torch.testing.assert_close(OPERATIONS["shear_y"](x, strengths), turned)
    added = OPERATIONS["solarize_add"](x, strengths)
    dark = (255 * x).round() < 128
    assert torch.equal(added[~dark], x[~dark])
    steps = ((added - x)[:, 0] * 255 / 110).flatten(1).amax(1)
    torch.testing.assert_close(steps[[0, 2, 3, 4]], strengths[[0, 2, 3, 4]].abs())
    assert set(OPERATIONS) == {*TORCHVISION, "shear_y", "solarize_add"}


def test_about_half_of_two_operations_are_applied_and_draws_repeat():
    """Each image is left alone with a probability of a quarter, or when an operation has no effect on it."""
    x = torch.rand(2000, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    found = rand_augment(x, 9.0, np.random.default_rng(0))
    same = (found == x).flatten(1).all(1).float().mean().item()
    assert 0.5**LAYERS - 0.03 < same < 0.5**LAYERS + 0.06
    assert torch.equal(found, rand_augment(x, 9.0, np.random.default_rng(0)))
    assert not torch.equal(found, rand_augment(x, 9.0, np.random.default_rng(1)))
    assert found.min() >= 0 and found.max() <= 1


def test_what_is_outside_has_the_given_color(monkeypatch):
    """So a picture of that color alone stays as it is when it is turned and moved."""
    monkeypatch.setattr("kontrast.probes.rand_augment.OPERATIONS", {x.__name__: x for x in MOVING})
    color = torch.tensor([0.2, 0.4, 0.6])
    x = color.view(1, 3, 1, 1).expand(300, 3, 12, 12)
    torch.testing.assert_close(rand_augment(x, 9.0, np.random.default_rng(0), color), x)
    assert rand_augment(x, 9.0, np.random.default_rng(0)).amin((1, 2, 3)).eq(0).any()


def test_the_protocols_have_it_where_it_fits():
    network, crops = encoder("small-conv", size=16, width=8), FineTuningCrops(Run(tiny_run.trained()), 0)
    mae, moco = FINE_TUNING["mae"], FINE_TUNING["moco-v3"]
    assert (mae.randaugment, mae.repeats, moco.randaugment, moco.repeats) == (9.0, 1, 9.0, 3)
    assert moco.suited_to(network, crops) == dataclasses.replace(moco, drop_path=0.0)
    assert moco.suited_to(network) == dataclasses.replace(moco, drop_path=0.0, randaugment=0.0, repeats=1)
    crops.colors = None  # images that are not red, green and blue
    assert moco.suited_to(network, crops) == dataclasses.replace(moco, drop_path=0.0, randaugment=0.0)
    for wrong in ({"randaugment": 11.0}, {"randaugment": -1.0}, {"repeats": 0}):
        with pytest.raises(UsageError, match="magnitude from 0 to 10"):
            FineTuning(**wrong)


def test_repeats_are_different_crops_of_the_same_images():
    """Seven images in threes: three images per epoch, the last of them once, and new crops in every epoch."""
    run = Run(tiny_run.trained())
    train, crops, seen = run.data("train").first(7), FineTuningCrops(run, 0), []

    class Watched:
        colors = crops.colors

        def __call__(self, epoch, rows, images, sizes):
            seen.append((epoch, rows.tolist()))
            return crops(epoch, rows, images, sizes)

    tuner = FineTuner(run.encoder(), 2, augment=Watched())
    x = tuner._train_input(train, torch.tensor([4, 4, 4, 2, 2, 2, 6]), 1, 3)
    assert seen == [(3, [4, 2, 6]), (4, [4, 2]), (5, [4, 2])]
    assert len(x) == 7 and not torch.equal(x[0], x[1]) and not torch.equal(x[1], x[2])
    pixels, sizes = train.batch(torch.tensor([4]))
    torch.testing.assert_close(x[1:2], crops(4, torch.tensor([4]), pixels, sizes))
    seen.clear()
    protocol = FineTuning(epochs=2, batch=7, repeats=3, randaugment=5.0)
    network = tuner.train(protocol, train, torch.tensor([0, 1, 0, 1, 0, 1, 0]))
    assert [epoch for epoch, _ in seen] == list(range(6)) and [len(rows) for _, rows in seen] == [3, 2, 2] * 2
    assert seen[0][1][:2] == seen[1][1] == seen[2][1] and all(p.isfinite().all() for p in network.parameters())


def test_strengths_are_near_the_magnitude_and_have_both_signs(monkeypatch):
    seen: list[torch.Tensor] = []
    spy = {"spy": lambda x, strength: (seen.append(strength), x)[1]}
    monkeypatch.setattr("kontrast.probes.rand_augment.OPERATIONS", spy)
    rand_augment(torch.rand(2000, 3, 4, 4), 6.0, np.random.default_rng(0))
    strengths = torch.cat(seen)
    assert 1800 < len(strengths) < 2200 and 0.45 < (strengths > 0).float().mean() < 0.55
    assert strengths.abs().mean().item() == pytest.approx(0.6, abs=0.01)
    assert strengths.abs().std().item() == pytest.approx(0.05, abs=0.005)
