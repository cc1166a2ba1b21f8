"""Make the labels imbalanced as the CACR paper's code does: linear or exponential proportions by class number.

Legend: C classes, n images of a class. With more than ten classes, tenths of the classes share a proportion
(CIFAR-100's deciles): level g = 10 i // C of ten; with ten or fewer, g = i of C.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from kontrast.data.image_set import ImageSet
from kontrast.errors import DataError


def counts(sizes: list[int], kind: str) -> list[int]:
    """How many images each class keeps: int(n (g+1)/G) or int(n e^(g+1-G)) at level g of G."""
    classes = len(sizes)
    levels = min(classes, 10)
    kept = []
    for i, n in enumerate(sizes):
        g = i if classes <= 10 else 10 * i // classes
        kept.append(n * (g + 1) // levels if kind == "linear" else int(n * math.exp(g + 1 - levels)))
    return kept


def imbalance(images: ImageSet, kind: str, seed: int = 2021) -> Tensor:
    """int64 positions of the images that are kept, class after class; scikit-learn's shuffle chooses within a class."""
    from sklearn.utils import shuffle

    if images.labels is None:
        raise DataError("data.imbalance needs labels: give class sub-folders, or a named set")
    array = images.labels.numpy()
    members = [np.flatnonzero(array == label) for label in range(int(array.max()) + 1)]
    kept = counts([len(m) for m in members], kind)
    chosen = [shuffle(m, random_state=seed)[:k] for m, k in zip(members, kept) if len(m)]
    return torch.from_numpy(np.concatenate(chosen).astype(np.int64))
