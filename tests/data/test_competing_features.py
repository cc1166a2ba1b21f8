"""RandBit and digit overlays depend on the index only, are uniform, and are placed as in the paper."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kontrast.config.recipe import DataSettings
from kontrast.config.recipe_files import resolve
from kontrast.data import ImageSet, open_data
from kontrast.data.competing_features import binary_channels, bits_of, overlay_digits, random_bits
from kontrast.errors import DataError, UsageError
from kontrast.training.build import build_views, evaluation_view
from kontrast.training.splits import open_split
from kontrast.views import Views, keys

ARTEFACTS = Path(__file__).parents[2] / "artefacts"


def black(count: int, side: int = 32) -> ImageSet:
    return ImageSet(images=torch.zeros(count, 3, side, side, dtype=torch.uint8), names=[str(i) for i in range(count)])


def test_bits_are_constant_channels_that_depend_on_the_index():
    images = random_bits(black(40), 5, seed=3)
    batch = images[0:40]
    assert batch.shape == (40, 8, 32, 32) and images.channels == 8
    assert set(batch[:, 3:].unique().tolist()) == {0, 255}
    assert (batch[:, 3:] == batch[:, 3:, :1, :1]).all()
    part = images.subset([7, 3])
    assert torch.equal(part[0:2], batch[[7, 3]])
    assert torch.equal(batch[:, 3:, 0, 0] // 255, bits_of(torch.arange(40), 5, seed=3))
    assert not torch.equal(bits_of(torch.arange(40), 5, seed=3), bits_of(torch.arange(40), 5, seed=4))


@pytest.mark.parametrize(("bits", "expected"), [(5, 32), (10, 1024), (15, 25643), (20, 48827)])
def test_there_are_as_many_distinct_values_as_with_uniform_draws(bits, expected):
    """2^n (1 - (1 - 2^-n)^N) distinct values are expected among N = 50,000 images."""
    drawn = bits_of(torch.arange(50_000), bits).long() @ (2 ** torch.arange(bits))
    assert abs(len(drawn.unique()) - expected) <= 0.01 * expected


def test_nine_copies_of_a_digit_are_at_the_offsets_of_the_paper():
    scans = torch.full((4, 28, 28), 200, dtype=torch.uint8)
    images = overlay_digits(black(6, 224), 4, digits=(scans, torch.arange(4)))
    marks = torch.zeros(224, 224, dtype=torch.bool)
    for top in (33, 100, 168):
        for left in (33, 100, 168):
            marks[top : top + 28, left : left + 28] = True
    assert torch.equal(images.images[0, 0] == 200, marks)
    assert torch.equal(images.factors["overlay_class"], images.factors["overlay"])


def test_an_overlay_is_a_maximum_and_depends_on_the_index():
    base = black(50)
    base.images.fill_(90)
    images = overlay_digits(base, 16, seed=1)
    assert images.images.min() == 90 and base.images.max() == 90
    again = overlay_digits(base.subset([5, 11]), 16, seed=1)
    assert torch.equal(again.images, images.images[[5, 11]])
    assert len(images.factors["overlay"].unique()) > 8
    with pytest.raises(UsageError, match=r"overlay_digits is .* allowed: 1 to"):
        overlay_digits(base, 0)
    with pytest.raises(DataError, match="8 pixels or more: these have 7 x 7"):
        overlay_digits(black(4, 7), 16)


def test_binary_channels_have_k_bits():
    images = binary_channels(512, 4, size=8)
    assert images.images.shape == (512, 4, 8, 8)
    assert len(images.images[:, :, 0, 0].unique(dim=0)) == 16


def test_write_a_picture_of_the_competing_features():
    """Top: the embedded set. Middle: with overlaid digits. Bottom: the channels of RandBit beside their image."""
    base = open_data("digits", "test").subset(range(16))
    rows = [torch.cat(list(base.images), dim=2), torch.cat(list(overlay_digits(base, 64).images), dim=2)]
    bits = random_bits(base, 6)[0:16]
    rows += [torch.cat(list(bits[:, channel : channel + 1].expand(-1, 3, -1, -1)), dim=2) for channel in range(3, 9)]
    sheet = torch.cat(rows, dim=1).permute(1, 2, 0).numpy()
    ARTEFACTS.mkdir(exist_ok=True)
    Image.fromarray(sheet).resize((sheet.shape[1] * 2, sheet.shape[0] * 2), 0).save(
        ARTEFACTS / "competing-features.png"
    )
    assert np.asarray(Image.open(ARTEFACTS / "competing-features.png")).std() > 20


def test_overlays_need_images_of_one_size_and_the_error_says_how_to_get_them(tmp_path):
    for number, side in enumerate((40, 48, 56)):
        Image.new("RGB", (side, side)).save(tmp_path / f"{number}.png")
    with pytest.raises(DataError, match=r"one size: .*data\.size=N"):
        overlay_digits(open_data(tmp_path), 2)
    assert overlay_digits(open_data(tmp_path, size=40), 2).images.shape == (3, 3, 40, 40)


def test_test_images_get_any_digit():
    """As in the paper, the number of digits is limited for training images only."""
    settings = DataSettings(source="digits", overlay_digits=3)
    assert len(open_split(settings, "train").factors["overlay"].unique()) == 3
    assert len(open_split(settings, "test").factors["overlay"].unique()) > 100


def test_a_test_image_does_not_get_the_digit_of_the_train_image_with_its_index():
    """Folders are sorted by class, so a common digit would give the class away."""
    train, test = black(400), dataclasses.replace(black(400), split="test")
    bits = [random_bits(part, 20).factors["bits"] for part in (train, test)]
    assert 0.45 < (bits[0] == bits[1]).double().mean() < 0.55
    scans = torch.zeros(8, 28, 28, dtype=torch.uint8), torch.arange(8)
    worn = [overlay_digits(part, 8, digits=scans).factors["overlay"] for part in (train, test)]
    assert 0.05 < (worn[0] == worn[1]).double().mean() < 0.2


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("planes", [1, 2, 5])
def test_views_leave_added_channels_unchanged(channels, planes):
    """This includes a gray image with two added channels, which looks like a color image."""
    images = torch.randint(0, 256, (6, channels, 24, 24), dtype=torch.uint8)
    bits = 255 * torch.randint(0, 2, (6, planes), dtype=torch.uint8)
    joined = torch.cat([images, bits[:, :, None, None].expand(-1, -1, 24, 24)], 1)
    recipe = resolve("cifar10/simclr", [f"data.random_bits={planes}"])
    for views in (build_views(recipe, torch.float32), evaluation_view(recipe)):
        made = views(joined, keys(0, 0, torch.arange(6)))
        expected = (bits / 255)[None, :, :, None, None].expand_as(made[:, :, channels:])
        assert torch.equal(made[:, :, channels:], expected)
        assert not torch.equal(made[:, :, :channels], expected[:, :, :1].expand_as(made[:, :, :channels]))


def test_numbers_of_channels_must_be_integers():
    for given in ({"colours": 3.0}, {"colours": 2}, {"planes": -1}, {"planes": 1.0}):
        with pytest.raises(UsageError, match="allowed"):
            Views("moco-v2", count=2, size=16, **given)
