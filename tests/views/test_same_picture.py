"""The same draws give the same picture as torchvision's functions on tensors, and as PIL's on 8-bit images.

Bounds for PIL, which rounds to 1/255 after every operation: mean under 1/255, 99.9th percentile under 4/255.
"""

from __future__ import annotations

import pytest
import torch

from kontrast.views import POLICIES, Draws, Views, keys
from kontrast.views import color as colors
from kontrast.views.blur import blur
from kontrast.views.resample import planes, taps

RANDOM = [name for name in POLICIES if POLICIES.build(name)[0].crop_scale is not None]


def close_to_pil(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    difference = (ours - theirs).abs().flatten() * 255
    assert difference.mean() < 1
    assert difference.kthvalue(int(0.999 * len(difference))).values < 4


def resized(images: torch.Tensor, box: tuple[int, ...], size: int, interpolation: str) -> torch.Tensor:
    """[n, C, size, size] in [0, 1] by our resampling."""
    n = len(images)
    top, left, height, width = (torch.full((n,), float(x)) for x in box)
    vertical = taps(top, height, top, top + height, images.shape[2], size, interpolation)
    horizontal = taps(left, width, left, left + width, images.shape[3], size, interpolation)
    return torch.stack(planes(images.float() / 255, vertical, horizontal), 1).clamp(0, 1)


@pytest.mark.parametrize("source, size", [((32, 32), 32), ((50, 44), 24), ((20, 30), 33), ((97, 64), 16)])
@pytest.mark.parametrize("name", RANDOM)
def test_whole_policies(bench, name, source, size):
    count = 6
    policy_channels = 1 if POLICIES.build(name)[0].colors == 1 else 3
    images = bench.pictures(count, max(source))[:, :policy_channels, : source[0], : source[1]].contiguous()
    views = Views(name, 2, size)
    image_keys = keys(0, 0, torch.arange(count))
    made = views(images, image_keys)
    drawn = views.draw(image_keys, torch.tensor([source] * count))
    for v in range(2):
        for b in range(count):
            theirs = bench.through_torchvision(images[b], Draws(*(f[v, b] for f in drawn)), views.policies[v], size)
            torch.testing.assert_close(made[v, b], theirs, atol=1e-3, rtol=0)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    "box, size",
    [((3, 5, 40, 30), 64), ((3, 5, 40, 30), 20), ((0, 0, 90, 90), 7), ((10, 0, 1, 80), 32), ((8, 9, 32, 32), 32)],
)
def test_crop_as_pil_and_as_tensors(bench, box, size, interpolation):
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as tv

    mode = InterpolationMode(interpolation)
    images = bench.pictures(3, 90)
    ours = resized(images, box, size, interpolation)
    theirs = tv.resized_crop(images.float() / 255, *box, [size, size], mode, antialias=True).clamp(0, 1)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    pil = [tv.to_tensor(tv.resized_crop(tv.to_pil_image(image), *box, [size, size], mode)) for image in images]
    close_to_pil(ours, torch.stack(pil))


@pytest.mark.parametrize("factor", [0.2, 0.9, 1.0, 1.8])
@pytest.mark.parametrize(
    "operation, name", [(0, "adjust_brightness"), (1, "adjust_contrast"), (2, "adjust_saturation")]
)
def test_blends_as_pil(bench, operation, name, factor):
    from torchvision.transforms import functional as tv

    images = bench.pictures(4, 40)
    factors = torch.ones(4, 3)
    factors[:, operation] = factor
    ours = colors.blend(list((images.float() / 255).unbind(1)), torch.full((4,), operation), factors)
    theirs = [tv.to_tensor(getattr(tv, name)(tv.to_pil_image(image), factor)) for image in images]
    close_to_pil(torch.stack(ours, 1), torch.stack(theirs))


@pytest.mark.parametrize("turn", [-0.5, -0.3, 0.0, 0.05, 0.4])
def test_hue_as_tensors(bench, turn):
    """Also for gray, black, white and pure colors, where hue has ties or is undefined."""
    from torchvision.transforms import functional as tv

    corners = torch.cartesian_prod(*[torch.tensor([0.0, 0.5, 1.0])] * 3).T.reshape(3, 3, 9)
    pictures = bench.pictures(2, 27).float() / 255
    pictures[0, :, :3, :9] = corners
    ours = torch.stack(colors.turn_hue(list(pictures.unbind(1)), torch.full((2,), turn)), 1)
    torch.testing.assert_close(ours, tv.adjust_hue(pictures, turn), atol=1e-4, rtol=0)


def test_jitter_in_every_order(bench):
    """All 24 orders in one batch, each view its own."""
    from torchvision.transforms import functional as tv

    from kontrast.views.draws import ORDERS

    pictures = bench.pictures(24, 16).float() / 255
    factors = torch.linspace(0.3, 1.7, 72).reshape(24, 3)
    turn = torch.linspace(-0.4, 0.4, 24)
    ours = torch.stack(colors.jitter([p.clone() for p in pictures.unbind(1)], factors, turn, torch.tensor(ORDERS)), 1)
    steps = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue)
    for b, order in enumerate(ORDERS):
        x = pictures[b]
        for operation in order:
            x = steps[operation](x, float(factors[b, operation] if operation < 3 else turn[b]))
        torch.testing.assert_close(ours[b], x, atol=1e-4, rtol=0)


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0, 2.0])
def test_blur_as_tensors_and_as_pil(bench, sigma):
    from PIL import ImageFilter
    from torchvision.transforms import functional as tv

    images = bench.pictures(3, 40)
    ours = torch.stack(blur(list((images.float() / 255).unbind(1)), torch.full((3,), sigma), 8), 1)
    torch.testing.assert_close(
        ours, tv.gaussian_blur(images.float() / 255, [17, 17], [sigma, sigma]), atol=1e-4, rtol=0
    )
    pil = [tv.to_tensor(tv.to_pil_image(image).filter(ImageFilter.GaussianBlur(sigma))) for image in images]
    inner = slice(8, -8)  # PIL repeats the edge where torchvision reflects it
    close_to_pil(ours[:, :, inner, inner], torch.stack(pil)[:, :, inner, inner])


def test_gray_and_solarize_as_pil(bench):
    from PIL import ImageOps
    from torchvision.transforms import functional as tv

    images = bench.pictures(3, 40)
    pictures = list((images.float() / 255).unbind(1))
    pil = [tv.to_pil_image(image) for image in images]
    close_to_pil(
        torch.stack(colors.to_gray(pictures), 1), torch.stack([tv.to_tensor(tv.to_grayscale(p, 3)) for p in pil])
    )
    ours = torch.stack(colors.solarize(pictures), 1)
    torch.testing.assert_close(ours, torch.stack([tv.to_tensor(ImageOps.solarize(p, 128)) for p in pil]))


@pytest.mark.parametrize("source", [(48, 64), (33, 33), (100, 41)])
@pytest.mark.parametrize("name, resize", [("evaluate", 28), ("evaluate-imagenet", 32)])
def test_evaluation_is_resize_and_center_crop(bench, name, resize, source):
    from torchvision.transforms import v2

    images = bench.pictures(2, 100)[:, :, : source[0], : source[1]].contiguous()
    views = Views(name, 1, 28)
    steps = [v2.ToDtype(torch.float32, scale=True), v2.Resize(resize, antialias=True), v2.CenterCrop(28)]
    theirs = v2.Compose([*steps, v2.Normalize(list(views.policies[0].mean), list(views.policies[0].std))])(images)
    torch.testing.assert_close(views(images, keys(0, 0, torch.arange(2)))[0], theirs, atol=1e-4, rtol=0)


def test_one_channel_is_jittered_as_torchvision_does(bench):
    images = bench.pictures(8, 30)[:, :1].contiguous()
    views = Views("dcl", 2, 24)
    image_keys = keys(0, 0, torch.arange(8))
    drawn = views.draw(image_keys, torch.full((8, 2), 30))
    made = views(images, image_keys)
    policy = views.policies[0].override({"mean": views.policies[0].mean[:1], "std": views.policies[0].std[:1]})
    for v in range(2):
        for b in range(8):
            theirs = bench.through_torchvision(images[b], Draws(*(f[v, b] for f in drawn)), policy, 24)
            torch.testing.assert_close(made[v, b], theirs, atol=1e-3, rtol=0)
