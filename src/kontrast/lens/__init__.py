"""Measure what a representation is like: alignment, uniformity, entropy, multiplier, rank, histograms and maps.

The functions here take features as tensors. The package itself is the verb that applies them to a run or to a file of
embeddings: `kontrast.lens(run)`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

from kontrast.lens.label_free import alpha_req, lidar, rankme
from kontrast.lens.measures import class_cosines, conditional_entropy, coupling
from kontrast.lens.normality import normality, random_projections
from kontrast.lens.pair_weights import negative_weights, positive_weights
from kontrast.lens.positive_spread import positive_statistics
from kontrast.lens.rank import dimension_variance, effective_rank, spectrum
from kontrast.objectives.metrics import alignment, coupling_multiplier, uniformity

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from kontrast.runs.lens import LensResult

__all__ = [
    "alignment", "alpha_req", "class_cosines", "conditional_entropy", "coupling", "coupling_multiplier",
    "dimension_variance", "effective_rank", "lidar", "negative_weights", "normality", "positive_statistics",
    "positive_weights", "random_projections", "rankme", "spectrum", "uniformity",
]  # fmt: skip


class CallableRoom(ModuleType):
    """The type of this package, which can be called because `kontrast.lens` names both a room and a verb."""

    def __call__(
        self,
        target: str | os.PathLike[str],
        *,
        images: int = 1024,
        augmentations: int = 8,
        labels: str | os.PathLike[str] | None = None,
        device: str = "auto",
        say: Callable[[str], None] = print,
    ) -> LensResult:
        """Measure what a representation is like: alignment, uniformity, entropy, multiplier, rank, histograms, weights.

        Writes lens.json, with a plot for each, into the run folder, or into the folder FILE.lens beside an embeddings file.
        What needs augmentations or checkpoints (alignment, for example) is measured only for runs.

        Args:
            target: A run (folder or `kontrast.Run`), or an embeddings file (.npy, .parquet).
            images: How many images, or rows of the file, to measure at most; default: 1024.
            augmentations: How many augmentations of each image to compare; default: 8.
            labels: Only for an embeddings file: a CSV file with the columns name,label.
            device: "auto" (default), "cpu" or "cuda".
            say: Called with each warning; default: print.

        Returns:
            The numbers by name, the content of lens.json and its path.

        Example:
            >>> import kontrast
            >>> result = kontrast.lens("runs/digits", images=30, augmentations=2, device="cpu")
            >>> 1 <= result.numbers["effective rank"] <= 32
            True
        """  # noqa: E501 (the docstring of runs.lens.lens, word for word, which a test checks)
        from kontrast.runs.lens import lens

        return lens(target, images=images, augmentations=augmentations, labels=labels, device=device, say=say)


sys.modules[__name__].__class__ = CallableRoom
