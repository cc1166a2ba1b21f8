"""What a detector finds in one image."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kontrast.data.annotated.mask_codes import mask_of_runs, run_lengths


@dataclass(frozen=True)
class Detections:
    """The detections in one image, on the CPU.

    Args:
        boxes: float32 [K,4], left, top, right and bottom in pixels of the image as it was read.
        labels: int64 [K], from 0.
        scores: float32 [K], from 0 to 1.
        height: the height of the image.
        width: its width.
        masks: the run lengths of K masks, or None; decoded masks of a whole set would not fit into memory.
        keypoints: float32 [K,P,3], x, y and 1, or None.

    Example:
        >>> one = Detections(torch.tensor([[0.0, 0.0, 2.0, 2.0]]), torch.tensor([3]), torch.tensor([0.9]), 4, 4)
        >>> len(one)
        1
    """

    boxes: Tensor
    labels: Tensor
    scores: Tensor
    height: int
    width: int
    masks: list[list[int]] | None = None
    keypoints: Tensor | None = None

    def __len__(self) -> int:
        return len(self.boxes)

    def decoded_masks(self) -> Tensor:
        """Return the masks, bool [K,H,W]."""
        size = self.height, self.width
        empty = torch.zeros(0, *size, dtype=torch.bool)
        return torch.stack([torch.from_numpy(mask_of_runs(m, *size).copy()) for m in self.masks or ()] or [*empty])


def detections_of(output: dict[str, Tensor], height: int, width: int) -> Detections:
    """Return what torchvision's detectors return for one image, whose labels count from 1, as `Detections`."""
    masks = None
    if "masks" in output:  # probabilities [K,1,H,W]
        masks = [run_lengths((mask[0] >= 0.5).numpy()) for mask in output["masks"].cpu()]
    keypoints = output["keypoints"].cpu() if "keypoints" in output else None
    labels = output["labels"].cpu() - 1
    return Detections(output["boxes"].cpu(), labels, output["scores"].cpu(), height, width, masks, keypoints)
