"""Statistics of the affinity matrix: the definition (dense), tiled torch for any device, Triton for CUDA."""

from kontrast.kernels.mean_vectors import mean_vectors
from kontrast.kernels.nearest_keys import nearest_keys
from kontrast.kernels.row_statistics import RowStatistics, merge, row_statistics
from kontrast.kernels.sinkhorn import sinkhorn_potentials
from kontrast.kernels.softplus_sums import softplus_sums
from kontrast.kernels.two_way_statistics import two_way_statistics

__all__ = [
    "RowStatistics", "mean_vectors", "merge", "nearest_keys", "row_statistics", "sinkhorn_potentials", "softplus_sums",
    "two_way_statistics",
]  # fmt: skip
