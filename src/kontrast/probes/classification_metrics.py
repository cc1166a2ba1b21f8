"""Scores of classifications other than plain accuracy, as ELEVATER's sets ask for them.

T test images, C classes. Predicted scores [T,C] -> a number from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kontrast.errors import DataError


def accuracy(scores: Tensor, labels: Tensor) -> float:
    """Return the share of images whose label [T] has the highest score.

    Example:
        >>> accuracy(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]))
        0.5
    """
    return float((scores.argmax(1) == labels).double().mean())


def mean_per_class(scores: Tensor, labels: Tensor) -> float:
    """Return the mean over classes with images of the accuracy on the images of each class.

    Example:
        >>> mean_per_class(torch.tensor([[0.9, 0.1]] * 4), torch.tensor([0, 0, 0, 1]))
        0.5
    """
    right = (scores.argmax(1) == labels).double()
    return float(torch.stack([right[labels == label].mean() for label in labels.unique()]).mean())


def mean_average_precision(scores: Tensor, labels: Tensor) -> float:
    """Return VOC 2007's mean over classes with images of the average precision at 11 recalls.

    Args:
        scores: one score per class and image [T,C]; only their order within a class counts, so they are not passed
            through a softmax, which would mix the classes.
        labels: 1 for each class that an image has, else 0 [T,C].

    Example:
        >>> mean_average_precision(torch.tensor([[0.9], [0.1]]), torch.tensor([[1], [0]]))
        1.0
    """
    found = [
        area_of_curve((labels[:, c] > 0).numpy()[np.argsort(-scores[:, c].numpy(), kind="stable")], n, "11")
        for c in range(labels.shape[1])
        if (n := int((labels[:, c] > 0).sum()))
    ]
    if not found:
        raise DataError("no test image has a label: there is no mean average precision")
    return float(np.mean(found))


def roc_auc(scores: Tensor, labels: Tensor) -> float:
    """Return the area under the ROC curve of two classes: how often an image of class 1 scores above one of class 0.

    Example:
        >>> roc_auc(torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 1.5]]), torch.tensor([0, 1, 1]))
        1.0
    """
    from scipy.stats import rankdata

    if scores.shape[1] != 2 or len(labels.unique()) != 2:
        raise DataError(f"ROC AUC needs two classes with test images, not {scores.shape[1]}: choose another metric")
    ranks, ones = rankdata((scores[:, 1] - scores[:, 0]).double().numpy()), (labels == 1).numpy()
    count = int(ones.sum())
    return float((ranks[ones].sum() - count * (count + 1) / 2) / (count * (len(ones) - count)))


def area_of_curve(right: np.ndarray, objects: int, points: str = "area") -> float:
    """Return the average precision of detections, or images, in the order of their scores.

    Args:
        right: whether each one is right [D].
        objects: how many there are to be found.
        points: "area" under the curve of precision by recall, or the mean at "11" recalls.

    Example:
        >>> area_of_curve(np.array([True, False, True]), 4)
        0.41666666666666663
    """
    hits = np.cumsum(right)
    recall, precision = hits / objects, hits / np.arange(1, len(right) + 1)
    if points == "11":
        levels = np.linspace(0, 1, 11)
        return float(np.mean([precision[recall >= level - 1e-12].max(initial=0) for level in levels]))
    best = np.maximum.accumulate(precision[::-1])[::-1]  # the best precision at this recall or a higher one
    return float((np.diff(recall, prepend=0) * best).sum())


CLASSIFICATION_METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "accuracy": accuracy,
    "mean-per-class": mean_per_class,
    "map": mean_average_precision,
    "roc-auc": roc_auc,
}
