"""Pascal VOC's average precision, of boxes, masks or keypoints.

The detections of a class are sorted by score over all images. Each one looks for the most similar object of its class
in its image: it is right if the similarity reaches the threshold and no better detection has taken the object, it
doesn't count if the object is ignored (difficult), and it is wrong otherwise. As in COCO's evaluation, one that is not
right doesn't count either if it lies in a crowd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kontrast.data.annotated.objects import Objects
from kontrast.detection.detections import Detections
from kontrast.detection.similarity import similarity
from kontrast.probes.classification_metrics import area_of_curve

THRESHOLDS = tuple(round(0.5 + 0.05 * i, 2) for i in range(10))
"""COCO's thresholds, over which AP is the mean."""


def average_precision(
    found: Sequence[Detections],
    truth: Sequence[Objects],
    *,
    task: str = "boxes",
    threshold: float = 0.5,
    points: str = "area",
    sigmas: tuple[float, ...] = (),
) -> dict[int, float]:
    """Return the average precision of each class that has an object, by label.

    Args:
        found: the detections of each image.
        truth: the objects of each image, with masks for the task "masks".
        task: what is compared: "boxes", "masks" or "keypoints".
        threshold: the similarity from which a detection is right, default 0.5.
        points: "area" under the curve (VOC from 2010 on) or the mean at "11" recalls (VOC 2007).
        sigmas: the deviations of keypoints.

    Example:
        >>> import torch
        >>> box, label = torch.tensor([[0.0, 0.0, 4.0, 4.0]]), torch.tensor([0])
        >>> truth = [Objects(box, label, torch.tensor([False]))]
        >>> average_precision([Detections(box + 1, label, torch.tensor([0.9]), 8, 8)], truth, threshold=0.3)
        {0: 1.0}
    """
    alike = [similarity(task, one, other, sigmas) for one, other in zip(found, truth, strict=True)]
    return precision_at(found, truth, alike, threshold, points)


def voc_scores(
    found: Sequence[Detections], truth: Sequence[Objects], *, task: str = "boxes", sigmas: tuple[float, ...] = ()
) -> dict[str, Any]:
    """Return AP (the mean over thresholds from 0.5 to 0.95), AP50 and AP75, each the mean over classes, in 0..1.

    Example:
        >>> import torch
        >>> box, label = torch.tensor([[0.0, 0.0, 4.0, 4.0]]), torch.tensor([0])
        >>> truth = [Objects(box, label, torch.tensor([False]))]
        >>> voc_scores([Detections(box, label, torch.tensor([0.9]), 8, 8)], truth)["AP"]
        1.0
    """
    alike = [similarity(task, one, other, sigmas) for one, other in zip(found, truth, strict=True)]
    by_class = {t: precision_at(found, truth, alike, t, "area") for t in THRESHOLDS}
    means = {t: float(np.mean(list(values.values()))) if values else 0.0 for t, values in by_class.items()}
    scores: dict[str, Any] = {"AP": float(np.mean(list(means.values()))), "AP50": means[0.5], "AP75": means[0.75]}
    eleven = precision_at(found, truth, alike, 0.5, "11")
    scores["AP50 (11 points)"] = float(np.mean(list(eleven.values()))) if eleven else 0.0
    return {**scores, "classes": by_class[0.5]}


def precision_at(
    found: Sequence[Detections], truth: Sequence[Objects], alike: Sequence[Tensor], threshold: float, points: str
) -> dict[int, float]:
    """Return the average precision by label, given the similarities [D,G] of each image."""
    labels = sorted({int(x) for one in truth for x in one.labels[~one.ignored]})
    return {label: _class_precision(label, found, truth, alike, threshold, points) for label in labels}


def _class_precision(
    label: int,
    found: Sequence[Detections],
    truth: Sequence[Objects],
    alike: Sequence[Tensor],
    threshold: float,
    points: str,
) -> float:
    scores: list[float] = []
    places: list[tuple[int, int]] = []
    for image, one in enumerate(found):
        for row in (one.labels == label).nonzero()[:, 0].tolist():
            scores.append(float(one.scores[row]))
            places.append((image, row))
    columns = [(one.labels == label).nonzero()[:, 0] for one in truth]
    objects = sum(int((~one.ignored[rows]).sum()) for one, rows in zip(truth, columns))
    taken: set[tuple[int, int]] = set()
    right = []
    for at in np.argsort(-np.array(scores), kind="stable"):
        image, row = places[at]
        candidates = columns[image]
        values, crowds = alike[image][row, candidates], truth[image].crowds
        inside = torch.zeros_like(values, dtype=torch.bool) if crowds is None else crowds[candidates]
        objects_alone = torch.where(inside, -1.0, values)
        best = int(objects_alone.argmax()) if len(candidates) else -1
        reached = best >= 0 and bool(objects_alone[best] >= threshold)
        if reached and truth[image].ignored[candidates[best]]:
            continue
        if reached and (image, best) not in taken:
            taken.add((image, best))
            right.append(True)
        elif not bool((values[inside] >= threshold).any()):
            right.append(False)
    return area_of_curve(np.array(right, dtype=bool), objects, points)
