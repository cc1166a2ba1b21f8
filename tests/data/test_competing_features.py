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
from kontrast.data import Feeder, ImageSet, open_data
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
    assert torch.equal(images.images[0][0] == 200, marks)
    assert torch.equal(images.factors["overlay_class"], images.factors["overlay"])


def test_an_overlay_is_a_maximum_and_depends_on_the_index():
    base = black(50)
    base.images.fill_(90)
    images = overlay_digits(base, 16, seed=1)
    assert images[0:50].min() == 90 and images[0:50].max() > 200 and base.images.max() == 90
    again = overlay_digits(base.subset([5, 11]), 16, seed=1)
    assert torch.equal(again[0:2], images[torch.tensor([5, 11])])
    assert torch.equal(images.subset([5, 11])[0:2], again[0:2])
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
    rows = [torch.cat(list(base.images), dim=2), torch.cat(list(overlay_digits(base, 64)[0:16]), dim=2)]
    bits = random_bits(base, 6)[0:16]
    rows += [torch.cat(list(bits[:, channel : channel + 1].expand(-1, 3, -1, -1)), dim=2) for channel in range(3, 9)]
    sheet = torch.cat(rows, dim=1).permute(1, 2, 0).numpy()
    ARTEFACTS.mkdir(exist_ok=True)
    Image.fromarray(sheet).resize((sheet.shape[1] * 2, sheet.shape[0] * 2), 0).save(
        ARTEFACTS / "competing-features.png"
    )
    assert np.asarray(Image.open(ARTEFACTS / "competing-features.png")).std() > 20


def drawn_by_hand(picture: torch.Tensor, scan: torch.Tensor) -> torch.Tensor:
    """The paper's construction, at the picture's own size."""
    height, width = picture.shape[1:]
    side = max(8, round(min(height, width) / 8))
    small = torch.nn.functional.interpolate(scan[None, None].float(), (side, side), mode="bilinear", antialias=True)
    expected = picture.clone()
    for top in (int(height * share) for share in (0.15, 0.45, 0.75)):
        for left in (int(width * share) for share in (0.15, 0.45, 0.75)):
            place = expected[:, top : top + side, left : left + side]
            place.copy_(torch.maximum(place, small[0].round().to(torch.uint8)))
    return expected


@pytest.mark.parametrize("pack", [True, False], ids=["decoded", "decoded for every batch"])
def test_pictures_of_several_sizes_get_their_digits_when_they_are_read(pack, tmp_path):
    """DigitOnImageNet. Each copy is as large as its picture demands, and padding stays black."""
    shapes = [(64, 80), (40, 40), (120, 72), (56, 48)]
    for number, (height, width) in enumerate(shapes):
        pixels = np.random.default_rng(number).integers(1, 120, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    scans = torch.randint(1, 256, (3, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    plain = open_data(tmp_path, pack=pack)
    images = overlay_digits(plain, 3, digits=(scans, torch.arange(3)))
    expected = [drawn_by_hand(plain[i], scans[images.factors["overlay"][i]]) for i in range(4)]
    order = torch.tensor([2, 0, 3])
    batch, sizes = images.batch(order)
    for row, size, number in zip(batch, sizes.tolist(), order.tolist()):
        assert size == list(shapes[number])
        assert torch.equal(row[:, : size[0], : size[1]], expected[number]), "a batch"
        assert not row[:, size[0] :].any() and not row[:, :, size[1] :].any(), "padding"
        assert torch.equal(images[number], expected[number]), "one picture"
    chunks = [pixels for _, pixels, _ in images.subset([1]).iter_chunks(torch.arange(1))]
    assert torch.equal(chunks[0][0], expected[1])
    for made in Feeder(images, batch=4, seed=1).batches(0):
        for row, size, number in zip(made.images, made.sizes.tolist(), made.indices.tolist()):
            assert torch.equal(row[:, : size[0], : size[1]], expected[number]), "a batch of the feeder"
    both = random_bits(images, 2)
    assert torch.equal(both.batch(order)[0][:, :3], batch) and both.ragged


def test_an_overlay_does_not_copy_the_images():
    base = black(64)
    images = random_bits(overlay_digits(base, 16), 3)
    assert images.base.data_ptr() == base.images.data_ptr()
    on = next(iter(Feeder(images, batch=8, seed=2).batches(0)))
    assert torch.equal(on.images, images[on.indices]) and on.images.shape == (8, 6, 32, 32)


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
    for given in ({"colours": 3.0}, {"colours": 0}, {"planes": -1}, {"planes": 1.0}):
        with pytest.raises(UsageError, match="allowed"):
            Views("moco-v2", count=2, size=16, **given)
