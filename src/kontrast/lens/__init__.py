"""Measure what a representation is like: alignment, uniformity, entropy, multiplier, rank, histograms and maps.

The functions here take features as tensors. The package itself is the verb that applies them to a run or to a file of
embeddings: `kontrast.lens(run)`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

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
    "alignment",
    "class_cosines",
    "conditional_entropy",
    "coupling",
    "coupling_multiplier",
    "dimension_variance",
    "effective_rank",
    "negative_weights",
    "normality",
    "positive_statistics",
    "positive_weights",
    "random_projections",
    "spectrum",
    "uniformity",
]


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
        """Measure what the representation of a run, or the vectors in an embeddings file, are like.

        Args:
            target: A run folder or `Run`, or an embeddings file (.npy or .parquet).
            images: How many images, or rows of the file, to look at.
            augmentations: How many augmented views of each image to make.
            labels: For an embeddings file only: a CSV file with the columns name,label.
            device: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N".
            say: Receives each line of progress. Default: print.

        Returns:
            A `LensResult`, which prints as a table of numbers; lens.json is written beside the target.

        Example:
            >>> import kontrast, numpy, pathlib, tempfile
            >>> file = pathlib.Path(tempfile.mkdtemp(), "vectors.npy")
            >>> numpy.save(file, numpy.random.default_rng(0).normal(size=(64, 8)).astype("float32"))
            >>> result = kontrast.lens(file)
        """
        from kontrast.runs.lens import lens

        return lens(target, images=images, augmentations=augmentations, labels=labels, device=device, say=say)


sys.modules[__name__].__class__ = CallableRoom
