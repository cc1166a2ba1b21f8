"""The random draws: quality of the hash, distributions, torchvision's crops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from kontrast.errors import UsageError
from kontrast.views import POLICIES, Policy, draw, keys
from kontrast.views.draws import ATTEMPTS, ORDERS, SLOTS, bits

N = 20_000
FAIR = Policy(crop_scale=(0.08, 0.5), jitter=(0.4, 0.4, 0.4, 0.1), jitter_p=0.8, gray=0.2, blur=0.5, solarize=0.2)


def surprise(counts: torch.Tensor, expected: torch.Tensor | float) -> float:
    """Chi-square in standard deviations over its mean (degrees of freedom k - 1): under 5 unless something is wrong."""
    freedom = counts.numel() - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def uniform(values: torch.Tensor, low: float = 0.0, high: float = 1.0, bins: int = 50) -> float:
    assert values.min() >= low
    assert values.max() <= high
    return surprise(torch.histc(values.float(), bins, low, high), values.numel() / bins)


@pytest.fixture(scope="module")
def sequential():
    """Draws for indices 0, 1, 2, ...: as training uses them."""
    return draw([FAIR, FAIR], keys(0, 0, torch.arange(N)), torch.full((N, 2), 1000), 32)


def test_one_bit_of_an_input_changes_half_the_bits_of_a_key():
    base = torch.arange(2000)
    for bit in (0, 1, 5, 10):
        for changed in (keys(0, 0, base ^ (1 << bit)), keys(1 << bit, 0, base), keys(0, 1 << bit, base)):
            changes = (keys(0, 0, base) ^ changed)[:, None] >> torch.arange(64) & 1
            assert abs(changes.double().mean() - 0.5) < 0.01
            assert (changes.double().mean(0) - 0.5).abs().max() < 0.06


def test_keys_do_not_collide():
    made = torch.cat([keys(seed, epoch, torch.arange(20_000)) for seed in range(3) for epoch in range(3)])
    assert len(made.unique()) == len(made)


def test_keys_take_seed_and_epoch_as_tensors():
    indices = torch.arange(7)
    assert torch.equal(keys(3, 4, indices), keys(torch.tensor(3), torch.tensor(4), indices))
    assert torch.equal(keys(-1, 4, indices), keys(torch.tensor(-1), 4, indices))


@pytest.mark.parametrize("indices", [[1, 2], torch.arange(3, dtype=torch.int32), torch.rand(3)])
def test_indices_that_are_not_int64_are_an_error(indices):
    with pytest.raises(UsageError, match="int64"):
        keys(0, 0, indices)


def test_every_slot_is_uniform():
    drawn = bits(keys(0, 0, torch.arange(N)), torch.arange(2), torch.arange(SLOTS)).double() / 2**24
    worst = max(uniform(drawn[v, :, s]) for v in range(2) for s in range(SLOTS))
    assert worst < 5


@pytest.mark.parametrize("raw", [False, True])
def test_adjacent_draws_are_independent(raw):
    """Pairs of draws of adjacent slots, views, images and epochs fill a grid evenly, also with indices as keys."""
    plain = torch.arange(N)
    made = plain if raw else keys(0, 0, plain)
    drawn = bits(made, torch.arange(3), torch.arange(SLOTS))
    later = bits(plain + N if raw else keys(0, 1, plain), torch.arange(3), torch.arange(SLOTS))
    pairs = [(drawn[0, :, s], drawn[0, :, s + 1]) for s in range(SLOTS - 1)]
    pairs += [(drawn[0, :, s], drawn[1, :, s]) for s in range(SLOTS)]
    pairs += [(drawn[0, :-1, s], drawn[0, 1:, s]) for s in range(SLOTS)]
    pairs += [(drawn[0, :, s], later[0, :, s]) for s in range(SLOTS)]
    for one, other in pairs:
        grid = torch.bincount((one >> 20) * 16 + (other >> 20), minlength=256).double()
        assert surprise(grid, len(one) / 256) < 6


def test_area_and_ratio_of_crops(sequential):
    """If every attempt fits, the area is uniform and the ratio log-uniform."""
    area = sequential.height * sequential.width / 1000**2
    ratio = torch.log(sequential.width / sequential.height)
    inner = area[(area > 0.1) & (area < 0.48)]  # whole pixels blur the ends
    assert uniform(inner, 0.1, 0.48) < 5
    bound = math.log(4 / 3) - 0.005
    assert uniform(ratio[ratio.abs() < bound], -bound, bound) < 5


def test_position_of_crops(sequential):
    assert uniform((sequential.top + 0.5) / (1000 - sequential.height + 1), bins=20) < 5
    assert uniform((sequential.left + 0.5) / (1000 - sequential.width + 1), bins=20) < 5
    assert (sequential.top + sequential.height).max() <= 1000
    assert (sequential.left == 1000 - sequential.width).any(), "the last place is never drawn"


def test_fields_are_independent(sequential):
    """No two fields share a slot: every pair of them fills an 8 x 8 grid of quantiles evenly."""
    area, ratio = sequential.height * sequential.width, sequential.width / sequential.height
    places = (sequential.top / (1001 - sequential.height), sequential.left / (1001 - sequential.width))
    factors = (sequential.brightness, sequential.contrast, sequential.saturation, sequential.hue, sequential.sigma)
    fields = [field.flatten().double() for field in (area, ratio, *places, *factors, sequential.order)]
    ranks = [field.argsort().argsort() * 8 // len(field) for field in fields]
    for one, other in itertools.combinations(ranks, 2):
        assert surprise(torch.bincount(one * 8 + other, minlength=64).double(), len(one) / 64) < 6


def test_all_orders_are_equally_likely(sequential):
    operations = sequential.operations()
    assert (operations.sort(-1).values == torch.arange(4)).all()
    codes = (operations * torch.tensor([64, 16, 4, 1])).sum(-1).flatten()
    counts = torch.stack([(codes == int(a * 64 + b * 16 + c * 4 + d)).sum() for a, b, c, d in ORDERS]).double()
    assert surprise(counts, codes.numel() / 24) < 5


def test_probabilities_and_factors(sequential):
    for name, p in (("flip", 0.5), ("jitter", 0.8), ("gray", 0.2), ("blur", 0.5), ("solarize", 0.2)):
        share = getattr(sequential, name).double().mean()
        assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / (2 * N)), name
    for name, low, high in (
        ("brightness", 0.6, 1.4),
        ("contrast", 0.6, 1.4),
        ("saturation", 0.6, 1.4),
        ("hue", -0.1, 0.1),
        ("sigma", 0.1, 2),
    ):
        values = getattr(sequential, name).double()
        assert uniform((values - low) / (high - low) * 0.9999 + 0.00005) < 5, name


@pytest.mark.parametrize("shape", [(32, 32), (48, 30), (12, 60)])
def test_crops_are_distributed_as_torchvision_draws_them(shape):
    """Height, width and place against torchvision's own get_params, also if attempts fail."""
    transforms = pytest.importorskip("torchvision.transforms")
    count = 6000
    picture = torch.zeros(1, *shape)
    torch.manual_seed(0)
    policy = Policy()
    theirs = [
        transforms.RandomResizedCrop.get_params(picture, policy.crop_scale, policy.crop_ratio) for _ in range(count)
    ]
    theirs = torch.tensor(theirs, dtype=torch.float32)
    ours = draw([policy], keys(1, 2, torch.arange(count)), torch.tensor([shape] * count), 32)
    for i, field in enumerate(("top", "left", "height", "width")):
        edge = max(shape) + 1
        a = torch.bincount(theirs[:, i].long(), minlength=edge).double()
        b = torch.bincount(getattr(ours, field)[0].long(), minlength=edge).double()
        seen = a + b > 20
        both, freedom = (a + b)[seen], seen.sum() - 1
        chi = ((a - b)[seen] ** 2 / both).sum()
        assert (chi - freedom) / math.sqrt(2 * max(freedom, 1)) < 5, field


@pytest.mark.parametrize(
    "shape, box",
    [((1000, 10), (493, 0, 13, 10)), ((10, 1000), (0, 493, 10, 13)), ((1, 1), (0, 0, 1, 1)), ((1, 9), (0, 4, 1, 1))],
)
def test_the_fallback_is_the_center(shape, box):
    """No attempt of this area fits: the largest centered box of an allowed ratio."""
    drawn = draw([Policy(crop_scale=(1.0, 1.0))], keys(0, 0, torch.arange(5)), torch.tensor([shape] * 5), 32)
    for i, expected in enumerate(box):
        assert (drawn[i] == expected).all()


def test_ten_attempts():
    """A box of 94% of a square fits with ratios near one alone: the share of fallbacks shows the number of attempts."""
    policy = Policy(crop_scale=(0.94, 0.94))
    drawn = draw([policy], keys(0, 0, torch.arange(N)), torch.full((N, 2), 1000), 32)
    fallback = ((drawn.height == 1000) & (drawn.width == 1000)).double().mean()
    fits = math.log(1 / 0.94) / math.log(4 / 3)  # both sides at most 1000
    assert abs(fallback - (1 - fits) ** ATTEMPTS) < 0.01


@pytest.mark.parametrize("name", POLICIES)
def test_draws_depend_on_the_views_number(name):
    policies = (POLICIES.build(name) * 4)[:4]
    made = keys(0, 0, torch.arange(64))
    sizes = torch.full((64, 2), 100)
    together = draw(policies, made, sizes, 32)
    for v in range(4):
        alone = draw(policies[v : v + 1], made, sizes, 32, first_view=v)
        for one, other in zip(together, alone):
            assert torch.equal(one[v], other[0])
    assert not torch.equal(together.brightness[0], together.brightness[1]) or not any(policies[0].jitter)
