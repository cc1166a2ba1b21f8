"""The papers' augmentations by their numbers."""

from __future__ import annotations

import pytest
import torch

from kontrast.views import POLICIES, Policy, Views, keys

C10 = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
C100 = ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))
STL = ((0.4409, 0.4279, 0.3868), (0.2683, 0.2610, 0.2687))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
UNIT = ((0.0,), (1.0,))  # pictures from 0 to 1
WEAK, STRONG = (0.4, 0.4, 0.4, 0.1), (0.8, 0.8, 0.8, 0.2)

# name: its views in turn, each: least crop, flip, jitter and its p, gray, blur, solarize, mean and std
TABLE = {
    "cacr-cifar": [(0.2, 0.5, (0.4, 0.4, 0.4, 0.4), 1.0, 0.2, 0.0, 0.0, C10)],  # hue 0.4, always: as published
    "cacr-cifar100": [(0.2, 0.5, (0.4, 0.4, 0.4, 0.4), 1.0, 0.2, 0.0, 0.0, C100)],
    "cacr-stl": [(0.08, 0.5, (0.4, 0.4, 0.4, 0.4), 1.0, 0.2, 0.0, 0.0, STL)],
    "moco-v2": [(0.2, 0.5, WEAK, 0.8, 0.2, 0.5, 0.0, IMAGENET)],
    "moco-v3": [
        (0.08, 0.5, (0.4, 0.4, 0.2, 0.1), 0.8, 0.2, 1.0, 0.0, IMAGENET),
        (0.08, 0.5, (0.4, 0.4, 0.2, 0.1), 0.8, 0.2, 0.1, 0.2, IMAGENET),
    ],
    "dino-local": [(0.08, 0.5, (0.4, 0.4, 0.2, 0.1), 0.8, 0.2, 0.5, 0.0, IMAGENET)],
    "dcl": [(0.08, 0.5, STRONG, 0.8, 0.2, 0.5, 0.0, IMAGENET)],  # blur's p and the mean unstated: SimCLR's, ImageNet's
    "uniclr": [(0.2, 0.5, WEAK, 0.8, 0.2, 0.5, 0.0, IMAGENET)],  # strengths and mean unstated: MoCo v2's
    "hcl-cifar": [(0.08, 0.5, WEAK, 0.8, 0.2, 0.5, 0.0, C10)],
    "moco-cifar": [(0.08, 0.5, WEAK, 0.8, 0.2, 0.0, 0.0, C10)],
    "simclr-cifar": [(0.08, 0.5, WEAK, 0.8, 0.2, 0.0, 0.0, UNIT)],
    "simclr": [(0.08, 0.5, STRONG, 0.8, 0.2, 0.5, 0.0, UNIT)],
    "randbit-mnist": [(0.5, 0.0, (0.0, 0.0, 0.0, 0.0), 1.0, 0.0, 0.0, 0.0, UNIT)],
}


@pytest.mark.parametrize("name", TABLE)
def test_policies_have_the_papers_numbers(name):
    found = [
        (*p.crop_scale, p.flip, p.jitter, p.jitter_p, p.gray, p.blur, p.solarize, (p.mean, p.std))
        for p in POLICIES.build(name)
    ]
    assert found == [(least, 1.0, *rest) for least, *rest in TABLE[name]]


@pytest.mark.parametrize("name", TABLE)
def test_the_papers_crops_and_blurs(name):
    """Boxes of 3/4 to 4/3, sigma from 0.1 to 2; SimCLR's kernel is a tenth of the view, HCL's is three pixels."""
    for policy in POLICIES.build(name):
        assert (policy.crop_ratio, policy.blur_sigma) == ((3 / 4, 4 / 3), (0.1, 2.0))
        assert policy.interpolation == ("bicubic" if name == "simclr" else "bilinear")
        assert policy.blur_kernel == {"simclr": 0.1, "hcl-cifar": 3}.get(name)


def test_the_reach_of_the_blurs():
    reach = {(name, size): POLICIES.build(name)[0].radius(size) for name, size in [("simclr", 60), ("hcl-cifar", 32)]}
    assert reach == {("simclr", 60): 3, ("hcl-cifar", 32): 1}


@pytest.mark.parametrize(("name", "fraction"), [("evaluate", 1.0), ("evaluate-imagenet", 224 / 256)])
def test_evaluation_uses_the_center(name, fraction):
    (policy,) = POLICIES.build(name)
    assert (policy.crop_scale, policy.center_fraction, policy.flip, policy.gray) == (None, fraction, 0.0, 0.0)
    assert policy.jitter == (0.0, 0.0, 0.0, 0.0) and (policy.mean, policy.std) == IMAGENET


def test_bit_channels_pass_unchanged():
    bits = torch.tensor([0, 255]).view(1, 2, 1, 1).expand(4, 2, 28, 28)
    images = torch.cat([torch.randint(0, 256, (4, 1, 28, 28)), bits], 1).to(torch.uint8)
    views = Views("randbit-mnist", 2, 28, planes=2)(images, keys(0, 0, torch.arange(4)))
    assert torch.equal(views[:, :, 1:], (bits / 255).expand(2, 4, 2, 28, 28))


def test_the_order_is_jitter_gray_blur_solarize_normalize():
    def made(images: torch.Tensor, **fields) -> torch.Tensor:
        policy = Policy(crop_scale=None, flip=0.0, **fields)
        return Views(policy, 1, 8)(images, keys(0, 0, torch.arange(len(images))))[0]

    red = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    red[:, 0] = 200
    turned = made(red, jitter=(0.0, 0.0, 0.0, 0.5), gray=1.0)  # gray has no hue to turn: the color was turned before
    assert (turned - made(red, gray=1.0)).abs().max() > 0.05
    torch.testing.assert_close(turned[:, 0], turned[:, 2])
    stripes = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    stripes[..., ::4] = 255  # solarized first, black and white would both be black, and blurred black still
    assert made(stripes, blur=1.0, blur_sigma=(1.0, 1.0), solarize=1.0).max() > 0.1
    white = torch.full((4, 3, 8, 8), 255, dtype=torch.uint8)
    assert torch.equal(made(white, solarize=1.0, mean=(0.5,), std=(0.25,)), torch.full((4, 3, 8, 8), -2.0))
