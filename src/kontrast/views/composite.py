"""Show images of any depth and number of channels: three bands as red, green and blue, their values stretched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kontrast.views.policies import Policy


@dataclass(frozen=True)
class Composite:
    """Turns an image [C,h,w] of a set into a picture uint8 [3,h,w] or [1,h,w] that a screen can show.

    Args:
        policy: the views' policy, whose `low` and `high` become black and white; without them, 8-bit values stay.
        bands: the channels that become red, green and blue, or the one that is shown in gray, counted from 1. Default:
            the first three, or the first if there are fewer.

    Example:
        >>> policy = Policy(low=(0.0,), high=(1000.0,))
        >>> Composite(policy, [3, 2, 1])(torch.full((5, 4, 4), 500.0))[:, 0, 0]
        tensor([128, 128, 128], dtype=torch.uint8)
    """

    policy: Policy
    bands: Sequence[int] = ()

    def __call__(self, image: Tensor) -> Tensor:
        chosen = self.chosen(len(image))
        picture = image[chosen]
        if self.policy.low is None or self.policy.high is None:
            return picture
        low, high = (
            torch.tensor([v[band % len(v)] for band in chosen], dtype=torch.float32)[:, None, None]
            for v in (self.policy.low, self.policy.high)
        )
        return ((picture.float() - low) / (high - low) * 255).round().clamp(0, 255).to(torch.uint8)

    def chosen(self, channels: int) -> list[int]:
        """The places of the channels that are shown, of an image of so many."""
        if self.bands and max(self.bands) <= channels:
            return [band - 1 for band in self.bands]
        return [0, 1, 2] if channels >= 3 else [0]


class ShownImages:
    """The images of a set as a screen can show them, each made when it is asked for.

    Args:
        images: the images, indexed by whole numbers.
        composite: makes a picture of each.
    """

    def __init__(self, images: Any, composite: Composite):
        self.images, self.composite = images, composite

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return self.composite(self.images[index])
