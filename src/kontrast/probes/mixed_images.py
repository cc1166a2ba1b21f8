"""Mixup and cutmix: batches of mixed images with mixed labels.

B images, C classes.  images [B,...,h,w], labels [B] -> targets [B,C], probabilities of the classes.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot


def mix_images(
    images: Tensor, labels: Tensor, classes: int, mixup: float, cutmix: float, draws: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Mix each image of a batch with another one, and return the images and the probabilities of their classes.

    Args:
        images: the batch.
        labels: the labels of its images.
        classes: the number of classes C.
        mixup: alpha of the share of each image, drawn from Beta(alpha, alpha); 0 for no mixup.
        cutmix: alpha of the share of the area that is not replaced by a box of the other image; 0 for no cutmix. With
            both, one of them is drawn for the batch.
        draws: the source of randomness.

    Shape:
        - images: [B,...,h,w], labels: [B]
        - output: [B,...,h,w] and [B,C]

    Example:
        >>> images, labels = torch.eye(2)[:, None], torch.tensor([0, 1])
        >>> mix_images(images, labels, 2, 0.0, 0.0, np.random.default_rng(0))[1]
        tensor([[1., 0.],
                [0., 1.]])
    """
    targets = one_hot(labels, classes).to(images.dtype)
    if not mixup and not cutmix:
        return images, targets
    order = torch.from_numpy(draws.permutation(len(images))).to(images.device)
    cut = bool(cutmix) and (not mixup or draws.random() < 0.5)
    alpha = cutmix if cut else mixup
    share = float(draws.beta(alpha, alpha))
    if cut:
        images, share = paste_boxes(images, images[order], share, draws)
    else:
        images = share * images + (1 - share) * images[order]
    return images, share * targets + (1 - share) * targets[order]


def paste_boxes(images: Tensor, others: Tensor, share: float, draws: np.random.Generator) -> tuple[Tensor, float]:
    """Replace a box of about 1 - share of the area at a random place; return the share that was really kept.

    The box has the shape of the image, and a part of it outside of the image is cut off.
    """
    height, width = images.shape[-2:]
    tall, wide = (round(side * math.sqrt(1 - share)) for side in (height, width))
    down, across = int(draws.integers(height)), int(draws.integers(width))
    top, bottom = max(0, down - tall // 2), min(height, down + (tall + 1) // 2)
    left, right = max(0, across - wide // 2), min(width, across + (wide + 1) // 2)
    mixed = images.clone()
    mixed[..., top:bottom, left:right] = others[..., top:bottom, left:right]
    return mixed, 1 - (bottom - top) * (right - left) / (height * width)
