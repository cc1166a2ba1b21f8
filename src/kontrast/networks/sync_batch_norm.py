"""Batch norm over the joined batch of all ranks: torch's own on CUDA, and one for CPU ranks, where torch has none.

N rows of this rank, R ranks, C channels. The CPU version is exact: statistics and gradients equal those of one process.
"""

from __future__ import annotations

import torch
import torch.distributed as ranks
from torch import Tensor, nn

from kontrast.networks.batch_norm import AnyBatchNorm, replace_batch_norm
from kontrast.networks.catalog import Module


class JoinedBatchNorm(AnyBatchNorm):
    """Batch norm by the mean and variance of the joined batch, in two passes to avoid differences of large squares."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not ranks.is_initialized() or ranks.get_world_size() == 1:
            return super().forward(input)
        from torch.distributed.nn.functional import all_reduce  # every rank's loss depends on it: so does its gradient

        over = [d for d in range(input.ndim) if d != 1]
        shape = [1, -1] + [1] * (input.ndim - 2)
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        rows = x.new_full((1,), x.numel() / x.shape[1])
        total = all_reduce(torch.cat([x.sum(over), rows]))
        count = total[-1].detach()
        mean = total[:-1] / count
        centered = x - mean.reshape(shape)
        variance = all_reduce(centered.square().sum(over)) / count
        with torch.no_grad():
            self.update_running(mean[None], (variance * count / (count - 1))[None])
        y = centered * (variance + self.eps).rsqrt().reshape(shape)
        if self.affine:
            y = y * self.weight.reshape(shape) + self.bias.reshape(shape)
        return y.to(input.dtype)


def synchronize_batch_norm(module: Module) -> Module:
    """Replace every batch norm in a module by one over all ranks: torch's SyncBatchNorm on CUDA, ours on the CPU.

    Args:
        module: the network; it is changed in place.

    Example:
        >>> type(synchronize_batch_norm(nn.Sequential(nn.BatchNorm1d(3)))[0]).__name__
        'JoinedBatchNorm'
    """
    if any(p.is_cuda for p in module.parameters()):
        return nn.SyncBatchNorm.convert_sync_batchnorm(module)
    return replace_batch_norm(module, JoinedBatchNorm)
