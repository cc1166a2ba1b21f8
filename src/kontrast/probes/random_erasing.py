"""Random erasing: a box of an image becomes noise.

B images.  images [B,C,h,w], normalized.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

LEAST_AREA, MOST_AREA = 0.02, 1 / 3  # of the image
LEAST_ASPECT = 0.3  # height / width is between this and its inverse, uniform in the logarithm
ATTEMPTS = 10  # to draw a box that fits into the image, which otherwise stays as it is


def erase_boxes(images: Tensor, probability: float, draws: np.random.Generator) -> Tensor:
    """Replace a box of some images by standard normal noise, drawn for every pixel.

    Args:
        images: the batch.
        probability: of each image to lose a box.
        draws: the source of randomness.

    Shape:
        - images: [B,C,h,w]
        - output: [B,C,h,w]

    Example:
        >>> images = torch.zeros(2, 3, 8, 8)
        >>> bool(erase_boxes(images, 1.0, np.random.default_rng(0)).any()), bool(images.any())
        (True, False)
    """
    if not probability:
        return images
    erased = images.clone()
    for number in np.flatnonzero(draws.random(len(images)) < probability):
        box = draw_box(images.shape[-2], images.shape[-1], draws)
        noise = torch.from_numpy(draws.standard_normal(erased[number][box].shape))
        erased[number][box] = noise.to(images)
    return erased


def draw_box(height: int, width: int, draws: np.random.Generator) -> tuple[slice, ...]:
    """Draw the place of a box in an image; it is empty if no box fitted."""
    for _ in range(ATTEMPTS):
        area = draws.uniform(LEAST_AREA, MOST_AREA) * height * width
        aspect = math.exp(draws.uniform(math.log(LEAST_ASPECT), -math.log(LEAST_ASPECT)))
        tall, wide = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < tall < height and 0 < wide < width:
            top, left = int(draws.integers(height - tall + 1)), int(draws.integers(width - wide + 1))
            return slice(None), slice(top, top + tall), slice(left, left + wide)
    return (slice(0, 0),)
