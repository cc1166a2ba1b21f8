"""How alike detections and annotated objects are: intersection over union of boxes and masks, COCO's OKS of keypoints.

D detections, G annotated objects, P keypoints.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kontrast.data.annotated.objects import Objects
from kontrast.detection.detections import Detections

TASKS = ("boxes", "masks", "keypoints")


def similarity(task: str, found: Detections, truth: Objects, sigmas: tuple[float, ...] = ()) -> Tensor:
    """Return the similarity of each detection to each object, float64 [D,G], from 0 to 1.

    That to a crowd is the share of the detection that lies inside of it, as in COCO's evaluation.

    Args:
        task: "boxes", "masks" or "keypoints".
        found: the detections of an image.
        truth: its objects, with masks for the task "masks".
        sigmas: the deviations of the P keypoints.
    """
    if not len(found) or not len(truth):
        return torch.zeros(len(found), len(truth), dtype=torch.float64)
    if task == "boxes":
        return box_overlap(found.boxes, truth.boxes, truth.crowds)
    if task == "masks":
        assert truth.masks is not None
        one, other = (masks.flatten(1).double() for masks in (found.decoded_masks(), truth.masks))
        both = one @ other.T
        return both / _compared_area(one.sum(1), other.sum(1), both, truth.crowds).clamp(min=1)
    return keypoint_similarity(found, truth, sigmas)


def _compared_area(one: Tensor, other: Tensor, both: Tensor, crowds: Tensor | None) -> Tensor:
    """Return the area of the union of detections and objects [D,G]; for crowds, that of the detection."""
    union = one[:, None] + other - both
    return union if crowds is None else torch.where(crowds, one[:, None], union)


def box_overlap(one: Tensor, other: Tensor, crowds: Tensor | None = None) -> Tensor:
    """Return the intersection over union of boxes [D,4] and [G,4] in float64: [D,G]; for crowds [G], over the first.

    Example:
        >>> box_overlap(torch.tensor([[0, 0, 2, 2]]), torch.tensor([[1, 0, 3, 2]]))
        tensor([[0.3333]], dtype=torch.float64)
    """
    one, other = one.double(), other.double()
    corner = torch.maximum(one[:, None, :2], other[:, :2]), torch.minimum(one[:, None, 2:], other[:, 2:])
    both = (corner[1] - corner[0]).clamp(min=0).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (one, other)]
    return both / _compared_area(areas[0], areas[1], both, crowds).clamp(min=1e-12)


def keypoint_similarity(found: Detections, truth: Objects, sigmas: tuple[float, ...]) -> Tensor:
    """Return COCO's object keypoint similarity [D,G].

    OKS = mean over annotated keypoints of exp(-distance^2 / (2 area (2 sigma)^2))

    If an object has no annotated keypoint, the mean is over all keypoints of the detection, with their distances to
    the box of the object enlarged by its width and height on each side.
    """
    assert found.keypoints is not None and truth.keypoints is not None
    annotated = (truth.keypoints[:, :, 2] > 0).double()
    places, boxes = found.keypoints[:, None, :, :2].double(), truth.boxes.double()
    distance = (places - truth.keypoints[:, :, :2].double()).square().sum(3)
    low, high, sides = boxes[:, None, :2], boxes[:, None, 2:], (boxes[:, 2:] - boxes[:, :2])[:, None]
    outside = (low - sides - places).clamp(min=0) + (places - high - sides).clamp(min=0)
    nothing = annotated.sum(1) == 0
    distance = torch.where(nothing[:, None], outside.square().sum(3), distance)
    annotated[nothing] = 1
    areas = truth.areas() if truth.stated is None else truth.stated
    spread = (2 * torch.tensor(sigmas, dtype=torch.float64)).square() * 2 * areas.double()[:, None]
    return (torch.exp(-distance / spread) * annotated).sum(2) / annotated.sum(1)
