"""What a representation is: numbers, histograms, maps and neighbours of frozen features."""

from kontrast.lens.measures import class_cosines, conditional_entropy, coupling
from kontrast.lens.normality import normality, random_projections
from kontrast.lens.pair_weights import negative_weights, positive_weights
from kontrast.lens.positive_spread import positive_statistics
from kontrast.lens.rank import dimension_variance, effective_rank, spectrum
from kontrast.objectives.metrics import alignment, coupling_multiplier, uniformity

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
