"""What split and synchronized batch norm share: running statistics, and replacing a network's batch norms."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from kontrast.networks.catalog import Module

BatchNorm = nn.modules.batchnorm._BatchNorm


class AnyBatchNorm(BatchNorm):
    """Batch norm for inputs of two or more dimensions."""

    running_var: Tensor  # this and the next are there whenever running_mean is
    num_batches_tracked: Tensor

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.ndim >= 2, input.shape

    def update_running(self, means: Tensor, variances: Tensor) -> None:
        """Move the running statistics toward those of each batch in turn, both [batches, channels]."""
        if self.running_mean is None:
            return
        kind, count = self.running_mean.dtype, len(means)
        self.num_batches_tracked.add_(count)
        for i, (mean, variance) in enumerate(zip(means.to(kind), variances.to(kind)), 1):
            share: Any = self.momentum
            if share is None:  # torch's running statistics are then the average of all batches
                share = (self.num_batches_tracked - (count - i)).to(kind).reciprocal()
            self.running_mean.lerp_(mean, share)
            self.running_var.lerp_(variance, share)


def replace_batch_norm(module: Module, kind: type[AnyBatchNorm]) -> Module:
    """Replace every batch norm in the module by one of another kind with the same parameters and buffers."""
    if isinstance(module, BatchNorm):
        new: Any = kind(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
        for name in ("training", "weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            setattr(new, name, getattr(module, name))
        return new
    for name, child in list(module.named_children()):
        module.add_module(name, replace_batch_norm(child, kind))
    return module


def smallest_batch(module: nn.Module) -> int:
    """Return the fewest images that a training step needs: two per split of a batch norm, one without batch norm.

    Example:
        >>> smallest_batch(nn.BatchNorm1d(3)), smallest_batch(nn.Linear(3, 3))
        (2, 1)
    """
    needs = [2 * getattr(m, "splits", 1) for m in module.modules() if isinstance(m, BatchNorm)]
    return max(needs, default=1)
