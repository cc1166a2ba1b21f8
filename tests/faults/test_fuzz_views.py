"""Views with any policy, of images of any size: finite, and a function of the key only."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from kontrast.views import Views, keys

from support.fuzzing import amounts, fuzz

CHANCE = st.floats(0, 1)


@pytest.mark.fault(14)
@amounts(40, 1_500)
def test_views_of_any_policy_depend_only_on_the_key(cases, tally):
    """With any parameters and images from 1 pixel on, pixels are in range and don't depend on the other images."""

    def attempt(
        height, width, size, scale, ratio, jitter, chances, sigma, kernel, solarize, seed, interpolation
    ) -> None:
        low, high = sorted(scale)
        views = Views(
            "simclr-cifar", count=2, size=size, crop_scale=[low, high], crop_ratio=sorted(ratio), jitter=jitter,
            jitter_p=chances[0], gray=chances[1], flip=chances[2], blur=chances[3], blur_sigma=sorted(sigma),
            blur_kernel=kernel, solarize=solarize, interpolation=interpolation, mean=[0.0], std=[1.0],
        )  # fmt: skip
        images = torch.randint(
            0, 256, (4, 3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
        key = keys(seed, 3, torch.arange(4) + seed)
        made = views(images, key)
        assert made.shape == (2, 4, 3, size, size) and bool(torch.isfinite(made).all())
        assert float(made.min()) >= -1e-3 and float(made.max()) <= 1 + 1e-3
        torch.testing.assert_close(views(images[[2]], key[[2]])[:, 0], made[:, 2], rtol=1e-5, atol=1e-5)

    drawn = {
        "height": st.integers(1, 40),
        "width": st.integers(1, 40),
        "size": st.integers(1, 24),
        "scale": st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)),
        "ratio": st.tuples(st.floats(0.2, 5), st.floats(0.2, 5)),
        "jitter": st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.5)).map(list),
        "chances": st.tuples(CHANCE, CHANCE, CHANCE, CHANCE),
        "sigma": st.tuples(st.floats(0.05, 3), st.floats(0.05, 3)),
        "kernel": st.one_of(st.none(), st.integers(1, 23), st.floats(0.01, 0.9)),
        "solarize": CHANCE,
        "seed": st.integers(0, 2**40),
        "interpolation": st.sampled_from(["bilinear", "bicubic"]),
    }
    tally("fuzz cases", fuzz(cases, attempt, **drawn))
