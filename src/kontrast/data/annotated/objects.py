"""The annotated objects of one image.

Legend: K objects, P keypoints per object, H x W pixels. A pixel in row r and column c covers the square from (c, r) to
(c+1, r+1), so a box around one pixel has the width 1, and coordinates are pixels from the upper left corner.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Objects:
    """Boxes, classes and, where they are annotated, masks and keypoints of the objects of one image.

    Args:
        boxes: float32 [K,4], left, top, right and bottom.
        labels: int64 [K], from 0.
        ignored: bool [K], crowds of COCO and difficult objects of VOC: never trained on, neither hit nor miss in tests.
        masks: bool [K,H,W], or None if there are none or they were not asked for.
        keypoints: float32 [K,P,3], x, y and 0 (not annotated), 1 (hidden) or 2 (visible); None if there are none.
        stated: float32 [K], the areas that the annotations state, by which COCO sorts objects into sizes; else None.
        crowds: bool [K], which of the ignored ones are crowds of COCO: a detection inside one does not count unless it
            finds another object. None if there are none; VOC compares a difficult object like any other.

    Example:
        >>> one = Objects(torch.tensor([[2.0, 3.0, 6.0, 9.0]]), torch.tensor([0]), torch.tensor([False]))
        >>> len(one), one.areas().tolist()
        (1, [24.0])
    """

    boxes: Tensor
    labels: Tensor
    ignored: Tensor
    masks: Tensor | None = None
    keypoints: Tensor | None = None
    stated: Tensor | None = None
    crowds: Tensor | None = None

    def __len__(self) -> int:
        return len(self.boxes)

    def areas(self) -> Tensor:
        """Return the areas of the boxes [K]."""
        return (self.boxes[:, 2] - self.boxes[:, 0]) * (self.boxes[:, 3] - self.boxes[:, 1])

    def take(self, rows: Tensor) -> Objects:
        """Return the objects of these rows, given as positions or as booleans [K]."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        taken: dict[str, Any] = {name: None if value is None else value[rows] for name, value in values.items()}
        return Objects(**taken)


def no_objects(points: int = 0) -> Objects:
    """Return the objects of an image that has none; `points` is the number of keypoints of the set's objects."""
    keypoints = torch.zeros(0, points, 3) if points else None
    return Objects(
        torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool), None, keypoints
    )


def boxes_of_masks(masks: Tensor) -> Tensor:
    """Return the smallest boxes [K,4] that contain all pixels of masks [K,H,W], none of which is empty.

    Example:
        >>> boxes_of_masks(torch.tensor([[[False, True, True], [False, True, False]]])).tolist()
        [[1.0, 0.0, 3.0, 2.0]]
    """
    rows, columns = masks.any(2).int(), masks.any(1).int()
    left, top = columns.argmax(1), rows.argmax(1)
    right, bottom = masks.shape[2] - columns.flip(1).argmax(1), masks.shape[1] - rows.flip(1).argmax(1)
    return torch.stack([left, top, right, bottom], dim=1).float()
