"""Views of images of any depth and number of channels, by the definition in torch."""

from __future__ import annotations

import pytest
import torch

from kontrast.errors import UsageError
from kontrast.views import Policy, Views, keys
from kontrast.views.composite import Composite

from support.deep_pictures import bands

B, C = 3, 5
IMAGES = torch.stack([torch.from_numpy(bands(C, seed=i).astype("float32")) for i in range(B)])
KEYS = keys(0, 0, torch.arange(B))
RANGE = {"low": (100.0,) * C, "high": (4000.0,) * C}


def test_every_channel_is_cropped_flipped_and_blurred_alike():
    """Each of five channels is what it would be alone."""
    policy = Policy(crop_scale=(0.3, 1.0), blur=1.0, **RANGE)
    together = Views(policy, 2, 16)(IMAGES, KEYS)
    assert together.shape == (2, B, C, 16, 16)
    for c in range(C):
        alone = Policy(crop_scale=(0.3, 1.0), blur=1.0, low=(100.0,), high=(4000.0,))
        torch.testing.assert_close(Views(alone, 2, 16)(IMAGES[:, c : c + 1], KEYS), together[:, :, c : c + 1])


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float32])
def test_16_bit_colors_look_like_8_bit_colors(dtype):
    picture = torch.randint(0, 256, (B, 3, 20, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    plain = Views("simclr", 2, 16)(picture, KEYS)
    deep = Views("simclr", 2, 16, low=(0.0,), high=(65_535.0,))((picture.int() * 257).to(dtype), KEYS)
    torch.testing.assert_close(deep, plain, atol=2e-6, rtol=0)


def test_values_outside_of_the_range_are_clamped():
    view = Views("evaluate", 1, 20, low=(1000.0,), high=(2000.0,), mean=(0.0,), std=(1.0,))
    wild = torch.full((1, C, 20, 20), 5000.0)
    wild[:, :, :10] = -7.0
    unit = view(wild, KEYS[:1])[0]
    assert unit.min() == 0 and unit.max() == 1


def test_only_brightness_and_contrast_change_five_channels():
    """Saturation, hue and grayscale have no effect; contrast moves values away from the mean of all channels."""
    still = {"crop_scale": None, "flip": 0.0, **RANGE}
    plain = Views(Policy(**still), 1, 16)(IMAGES, KEYS)
    torch.testing.assert_close(Views(Policy(jitter=(0, 0, 0.9, 0.5), gray=1.0, **still), 1, 16)(IMAGES, KEYS), plain)
    views = Views(Policy(jitter=(0.0, 0.5, 0.0, 0.0), **still), 1, 16)
    factor = views.draw(KEYS, torch.tensor([[20, 24]] * B)).contrast[0][:, None, None, None]
    mean = plain[0].mean((1, 2, 3), keepdim=True)
    torch.testing.assert_close(views(IMAGES, KEYS)[0], (factor * plain[0] + (1 - factor) * mean).clamp(0, 1))


def test_clear_errors():
    with pytest.raises(UsageError, match=r"uint8 images .*views.low and views.high allow others.*got torch.float32"):
        Views("simclr", 2, 16)(IMAGES, KEYS)
    with pytest.raises(UsageError, match="low has 5 numbers, the images have 3 channels"):
        Views("evaluate", 1, 16, **RANGE)(IMAGES[:, :3], KEYS)
    with pytest.raises(UsageError, match=r"must be below high .* in every channel"):
        Policy(low=(0.0, 1.0), high=(1.0, 1.0))
    with pytest.raises(UsageError, match="give both, or neither"):
        Policy(low=(0.0,))
    with pytest.raises(UsageError, match=r"8-bit pictures of one or three channels, not torch.float32.*implementation"):
        Views("evaluate", 1, 16, implementation="triton", **RANGE)(IMAGES, KEYS)


def test_composites():
    """The chosen bands as red, green and blue, from 1, with the range of values stretched to black and white."""
    image = IMAGES[0]
    picture = Composite(Policy(**RANGE), (5, 1, 2))(image)
    expected = ((image[[4, 0, 1]] - 100) / 3900 * 255).round().clamp(0, 255).to(torch.uint8)
    assert torch.equal(picture, expected)
    assert len(Composite(Policy(**RANGE))(image)) == 3 and len(Composite(Policy(**RANGE))(image[:2])) == 1
    photo = torch.randint(0, 256, (3, 4, 4), dtype=torch.uint8)
    assert torch.equal(Composite(Policy())(photo), photo)
