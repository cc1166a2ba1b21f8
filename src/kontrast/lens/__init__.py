"""What a representation is: numbers, histograms, maps and neighbours of frozen features."""

from kontrast.lens.embeddings import Embeddings, read_embeddings
from kontrast.lens.gaussian import normality, random_projections
from kontrast.lens.near_duplicates import duplicates
from kontrast.lens.numbers import class_cosines, conditional_entropy, coupling
from kontrast.lens.positives import positive_statistics
from kontrast.lens.spectrum import dimension_variance, effective_rank, spectrum
from kontrast.lens.weights import negative_weights, positive_weights
from kontrast.objectives.metrics import alignment, coupling_multiplier, uniformity

__all__ = [
    "Embeddings",
    "alignment",
    "class_cosines",
    "conditional_entropy",
    "coupling",
    "coupling_multiplier",
    "dimension_variance",
    "duplicates",
    "effective_rank",
    "negative_weights",
    "normality",
    "positive_statistics",
    "positive_weights",
    "random_projections",
    "read_embeddings",
    "spectrum",
    "uniformity",
]
