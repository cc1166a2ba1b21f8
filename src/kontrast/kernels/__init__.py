"""Row statistics of the affinity matrix: the definition (dense), tiled torch for any device, Triton for CUDA."""

from kontrast.kernels.row_statistics import RowStatistics, merge, row_statistics

__all__ = ["RowStatistics", "merge", "row_statistics"]
