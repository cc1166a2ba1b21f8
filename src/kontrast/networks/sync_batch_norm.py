"""Batch norm over the joined batch of all ranks: torch's own on CUDA, and one for CPU ranks, where torch has none.

N rows of this rank, R ranks, C channels. The CPU one is exact: statistics and gradients equal those of one process.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as ranks
from torch import Tensor, nn

from kontrast.networks.catalog import Module
from kontrast.networks.split_batch_norm import follow


class SumOverRanks(torch.autograd.Function):
    """The sum over ranks; every rank's loss depends on it, so gradients are summed over ranks too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        ranks.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        ranks.all_reduce(gradient)
        return gradient


class JoinedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm by the mean and variance of the joined batch, in two passes (no difference of large squares)."""

    running_var: Tensor  # these two are there where running_mean is
    num_batches_tracked: Tensor

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.ndim}")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not ranks.is_initialized() or ranks.get_world_size() == 1:
            return super().forward(input)
        over = [d for d in range(input.ndim) if d != 1]
        shape = [1, -1] + [1] * (input.ndim - 2)
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        rows = x.new_full((1,), x.numel() / x.shape[1])
        total = SumOverRanks.apply(torch.cat([x.sum(over), rows]))
        count = total[-1].detach()
        mean = total[:-1] / count
        centred = x - mean.reshape(shape)
        variance = SumOverRanks.apply(centred.square().sum(over)) / count
        self.remember(mean.detach(), variance.detach() * count / (count - 1))
        y = centred * (variance + self.eps).rsqrt().reshape(shape)
        if self.affine:
            y = y * self.weight.reshape(shape) + self.bias.reshape(shape)
        return y.to(input.dtype)

    @torch.no_grad()
    def remember(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is not None:
            self.num_batches_tracked.add_(1)
            for running, found in ((self.running_mean, mean), (self.running_var, variance)):
                running.lerp_(found.to(running.dtype), follow(self))


def synchronize_batch_norm(module: Module) -> Module:
    """The module with batch norm over all ranks: torch's SyncBatchNorm where its parameters are on CUDA."""
    if any(p.is_cuda for p in module.parameters()):
        return nn.SyncBatchNorm.convert_sync_batchnorm(module)
    return convert_joined_batch_norm(module)


def convert_joined_batch_norm(module: Module) -> Module:
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        new: Any = JoinedBatchNorm(
            module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats
        )
        new.weight, new.bias, new.training = module.weight, module.bias, module.training
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            setattr(new, name, getattr(module, name))
        return new
    for name, child in list(module.named_children()):
        module.add_module(name, convert_joined_batch_norm(child))
    return module
