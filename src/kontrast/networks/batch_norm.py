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
        self.num_batches_tracked.add_(len(means))
        for running, found in ((self.running_mean, means), (self.running_var, variances)):
            for later, batch in zip(range(len(found))[::-1], found):
                running.lerp_(batch.to(running.dtype), self.running_share(later))

    def running_share(self, later: int) -> float | Tensor:
        """Return the share of a batch that `later` batches came after: torch's momentum or, if that is None, the one
        that makes the running statistics the average of all batches."""
        if self.momentum is not None:
            return self.momentum
        assert self.running_mean is not None
        return (self.num_batches_tracked - later).to(self.running_mean.dtype).reciprocal()


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
