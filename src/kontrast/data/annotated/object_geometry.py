"""Geometric transforms of an image together with its boxes, masks and keypoints.

Each takes an image [C,H,W] and its objects and returns both. Objects that a crop removes are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from kontrast.data.annotated.objects import Objects

Annotated = tuple[Tensor, Objects]


def flip(image: Tensor, objects: Objects, mirrored: Sequence[int] | None = None) -> Annotated:
    """Mirror an image, so that left becomes right.

    Args:
        image: the image [C,H,W].
        objects: its objects.
        mirrored: the keypoint that takes the place of each one, so that a left ear stays a left ear. Default: the same.

    Example:
        >>> objects = Objects(torch.tensor([[0.0, 0.0, 2.0, 1.0]]), torch.tensor([0]), torch.tensor([False]))
        >>> flip(torch.zeros(3, 4, 10), objects)[1].boxes.tolist()
        [[8.0, 0.0, 10.0, 1.0]]
    """
    width = image.shape[2]
    left, top, right, bottom = objects.boxes.unbind(1)
    boxes = torch.stack([width - right, top, width - left, bottom], dim=1)
    points = objects.keypoints
    if points is not None:
        x = torch.where(points[:, :, 2] > 0, width - points[:, :, 0], points[:, :, 0])
        points = torch.cat([x[:, :, None], points[:, :, 1:]], dim=2)
        points = points if mirrored is None else points[:, list(mirrored)]
    masks = None if objects.masks is None else objects.masks.flip(2)
    return image.flip(2), dataclasses.replace(objects, boxes=boxes, masks=masks, keypoints=points)


def resize(image: Tensor, objects: Objects, height: int, width: int) -> Annotated:
    """Resize an image with antialiasing; a pixel of a mask is that of the nearest place before.

    Example:
        >>> objects = Objects(torch.tensor([[0.0, 0.0, 2.0, 1.0]]), torch.tensor([0]), torch.tensor([False]))
        >>> resize(torch.zeros(3, 4, 10), objects, 8, 30)[1].boxes.tolist()
        [[0.0, 0.0, 6.0, 2.0]]
    """
    down, across = height / image.shape[1], width / image.shape[2]
    resized = interpolate(image[None].float(), (height, width), mode="bilinear", antialias=True)[0]
    resized = resized if image.is_floating_point() else resized.round().clamp(0, 255).to(image.dtype)
    points, masks = objects.keypoints, objects.masks
    if points is not None:
        points = points * torch.tensor([across, down, 1.0])
    if masks is not None:
        masks = interpolate(masks[None].float(), (height, width), mode="nearest-exact")[0].bool()
    boxes = objects.boxes * torch.tensor([across, down, across, down])
    return resized, dataclasses.replace(objects, boxes=boxes, masks=masks, keypoints=points, stated=None)


def crop(
    image: Tensor, objects: Objects, top: int, left: int, height: int, width: int, least: float = 0.0
) -> Annotated:
    """Cut a window out of an image; boxes are cut to it, and keypoints outside of it are no longer annotated.

    Args:
        image: the image [C,H,W].
        objects: its objects.
        top: the first row of the window, which lies within the image.
        left: its first column.
        height: its rows.
        width: its columns.
        least: objects that keep no more than this share of their box are left out; 0 for those that keep nothing.

    Example:
        >>> objects = Objects(torch.tensor([[0.0, 0.0, 4.0, 4.0]]), torch.tensor([0]), torch.tensor([False]))
        >>> crop(torch.zeros(3, 4, 10), objects, 1, 2, 3, 3)[1].boxes.tolist()
        [[0.0, 0.0, 2.0, 3.0]]
    """
    window = image[:, top : top + height, left : left + width]
    moved = objects.boxes - torch.tensor([left, top, left, top])
    limits = torch.tensor([width, height, width, height])
    boxes = torch.minimum(moved.clamp(min=0), limits)
    kept = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    points, masks = objects.keypoints, objects.masks
    if masks is not None:
        masks = masks[:, top : top + height, left : left + width]
    if points is not None:
        points = points - torch.tensor([left, top, 0.0])
        inside = (points[:, :, :2] >= 0).all(2) & (points[:, :, 0] <= width) & (points[:, :, 1] <= height)
        points = torch.where((inside & (points[:, :, 2] > 0))[:, :, None], points, 0.0)
    found = dataclasses.replace(objects, boxes=boxes, masks=masks, keypoints=points, stated=None)
    seen = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1]) & (kept > least * objects.areas())
    if masks is not None:  # the window may show a corner of the box in which the object has no pixel
        seen &= masks.flatten(1).any(1)
    return window, found.take(seen)
