"""Augment held-out images in the same way each time, and project them: what LiDAR and the lens compare.

q views, B images, N images, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kontrast.config.recipe import Recipe
from kontrast.data import ImageSet
from kontrast.probes.extract import evaluation_mode
from kontrast.training.build import views_of
from kontrast.views import Views, keys

EPOCH = 1 << 40
"""The epoch of the random draws, which no training reaches: the encoder has not seen these augmentations."""
VIEWS_AT_ONCE = 1024


def draw_views(seed: int, images: ImageSet, views: Views, device: torch.device) -> Tensor:
    """Return augmentations [q,B,C,h,w]; those of one image don't depend on the others."""
    augmented: list[Any] = []  # tensors: these views have no local crops
    for positions, pixels, sizes in images.iter_chunks(torch.arange(len(images))):
        drawn = keys(seed, EPOCH, images.numbers(positions))
        sizes = None if sizes is None else sizes.to(device)
        augmented.append(views(pixels.to(device), drawn.to(device), sizes))
    return torch.cat(augmented, 1)


@torch.inference_mode()
def augmented_projections(
    network: nn.Module, recipe: Recipe, images: ImageSet, count: int, device: torch.device
) -> Tensor:
    """Return projections [q,N,D] of `count` augmentations of each image, in evaluation mode and float32."""
    views, rows = views_of(recipe, count), []
    with evaluation_mode(network), torch.autocast(device.type, enabled=False):
        for positions in torch.arange(len(images)).split(max(1, VIEWS_AT_ONCE // count)):
            x = draw_views(recipe.seed, images.subset(positions), views, device)
            rows.append(network(x.flatten(0, 1)).float().unflatten(0, x.shape[:2]).cpu())
    return torch.cat(rows, 1)
