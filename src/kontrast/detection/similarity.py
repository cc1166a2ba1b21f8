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

    Args:
        task: "boxes", "masks" or "keypoints".
        found: the detections of an image.
        truth: its objects, with masks for the task "masks".
        sigmas: the deviations of the P keypoints.
    """
    if not len(found) or not len(truth):
        return torch.zeros(len(found), len(truth), dtype=torch.float64)
    if task == "boxes":
        return box_overlap(found.boxes, truth.boxes)
    if task == "masks":
        assert truth.masks is not None
        one, other = (masks.flatten(1).double() for masks in (found.decoded_masks(), truth.masks))
        both = one @ other.T
        return both / (one.sum(1)[:, None] + other.sum(1) - both).clamp(min=1)
    return keypoint_similarity(found, truth, sigmas)


def box_overlap(one: Tensor, other: Tensor) -> Tensor:
    """Return the intersection over union of boxes [D,4] and [G,4] in float64: [D,G].

    Example:
        >>> box_overlap(torch.tensor([[0, 0, 2, 2]]), torch.tensor([[1, 0, 3, 2]]))
        tensor([[0.3333]], dtype=torch.float64)
    """
    one, other = one.double(), other.double()
    corner = torch.maximum(one[:, None, :2], other[:, :2]), torch.minimum(one[:, None, 2:], other[:, 2:])
    both = (corner[1] - corner[0]).clamp(min=0).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (one, other)]
    return both / (areas[0][:, None] + areas[1] - both).clamp(min=1e-12)


def keypoint_similarity(found: Detections, truth: Objects, sigmas: tuple[float, ...]) -> Tensor:
    """Return COCO's object keypoint similarity [D,G]; 0 for objects without annotated keypoints.

    OKS = mean over annotated keypoints of exp(-distance^2 / (2 area (2 sigma)^2))
    """
    assert found.keypoints is not None and truth.keypoints is not None
    annotated = (truth.keypoints[:, :, 2] > 0).double()
    distance = (found.keypoints[:, None, :, :2].double() - truth.keypoints[:, :, :2].double()).square().sum(3)
    areas = truth.areas() if truth.stated is None else truth.stated
    spread = (2 * torch.tensor(sigmas, dtype=torch.float64)).square() * 2 * areas.double()[:, None]
    return (torch.exp(-distance / spread) * annotated).sum(2) / annotated.sum(1).clamp(min=1)
