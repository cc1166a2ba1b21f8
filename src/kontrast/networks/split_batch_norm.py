"""Batch norm over parts of a batch, and the shuffling that gives a key other partners than its query has.

N rows, S splits, R ranks. On one device this is what several devices do by themselves: each part has statistics of
its own. Without the shuffle a network can tell positives by the statistics they share (MoCo, section 3.3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as ranks
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from kontrast.counters import mix_tensor
from kontrast.errors import UsageError
from kontrast.networks.catalog import Module, whole


def follow(norm: Any, later: int = 0) -> float | Tensor:
    """How far running statistics go towards a batch's that `later` batches were counted after: torch's momentum, or
    where that is None what makes them the average of all batches."""
    if norm.momentum is not None:
        return norm.momentum
    return (norm.num_batches_tracked - later).to(norm.running_mean.dtype).reciprocal()


class SplitBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm whose training statistics are those of each of `splits` consecutive parts of each of `views`
    consecutive views of the batch. The running ones take the average of a view's parts, view after view, as one forward
    a view would. In evaluation it is plain batch norm. Any number of dimensions from two."""

    splits: int = 1
    views: int = 1
    running_var: Tensor  # these two are there where running_mean is
    num_batches_tracked: Tensor

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.ndim}")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        parts, count = self.splits * self.views, len(input) // self.views
        if count < 2 * self.splits:
            raise UsageError(f"a batch of {count} in {self.splits} splits: each split needs two images or more")
        if len(input) % parts:
            raise UsageError(f"a batch of {count} in {self.splits} splits: the splits must be of one size")
        return self.apart(input, parts)

    def apart(self, input: Tensor, parts: int) -> Tensor:
        """Each part's channels are made channels of their own, so that one batch norm serves all parts. Channels go
        last on the way, as they lie in memory; the output's do too."""
        last = input.movedim(1, -1)
        wide = torch.promote_types(input.dtype, torch.float32)
        mean, variance = input.new_zeros((2, parts * self.num_features), dtype=wide)
        weight, bias = (None if p is None else p.repeat(parts) for p in (self.weight, self.bias))
        rows = last.reshape(parts, -1, self.num_features).transpose(0, 1).flatten(1)
        rows = batch_norm(rows, mean, variance, weight, bias, True, 1.0, self.eps)
        self.remember(mean, variance)
        return rows.unflatten(1, (parts, -1)).transpose(0, 1).reshape(last.shape).movedim(-1, 1)

    def remember(self, mean: Tensor, variance: Tensor) -> None:
        """The running statistics after parts with these means and variances [views * splits * channels]."""
        if self.running_mean is None:
            return
        self.num_batches_tracked.add_(self.views)
        for running, found in ((self.running_mean, mean), (self.running_var, variance)):
            for later, view in zip(range(self.views)[::-1], found.view(self.views, self.splits, -1).mean(1)):
                running.lerp_(view.to(running.dtype), follow(self, later))


def convert_split_batch_norm(module: Module, splits: int) -> Module:
    """The module with every batch norm replaced by a split one that holds the same parameters and buffers."""
    whole("splits", splits)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        new: Any = SplitBatchNorm(
            module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats
        )
        new.splits, new.training = splits, module.training
        new.weight, new.bias = module.weight, module.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            setattr(new, name, getattr(module, name))
        return new
    for name, child in list(module.named_children()):
        module.add_module(name, convert_split_batch_norm(child, splits))
    return module


def smallest_batch(module: nn.Module) -> int:
    """The fewest images a training step needs: two where there is batch norm, two a split where it is split."""
    needs = [2 * getattr(m, "splits", 1) for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    return max(needs, default=1)


def permutation(count: int, key: Tensor) -> Tensor:
    """A permutation of `count` numbers [count] as a function of the int64 key alone (0-dim, on the wanted device):
    the same on every rank, after a restart and in a captured graph."""
    x = mix_tensor(mix_tensor(key) + torch.arange(count, device=key.device))
    return torch.argsort(x, stable=True)


def shuffle(images: Tensor, key: Tensor, views: int = 1) -> tuple[Tensor, Tensor]:
    """This rank's share of the joined batch in shuffled order, and the order [R N]; images [N,...] have no gradient.
    views: so many consecutive ones they are of, each of which the ranks hold together."""
    rows = torch.arange(len(images) * rank_count(), device=key.device)
    rows = rows.view(rank_count(), views, -1).transpose(0, 1).flatten()  # view by view, as one process has them
    order = rows[permutation(len(rows), key)]
    return take(joined(images), order, len(images)), order


def unshuffle(features: Tensor, order: Tensor) -> Tensor:
    """What was made of shuffled images, back in the images' own order and rank."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return take(joined(features), inverse, len(features))


def rank_count() -> int:
    return ranks.get_world_size() if ranks.is_available() and ranks.is_initialized() else 1


def joined(x: Tensor) -> Tensor:
    """Every rank's rows [R N,...], in the order of ranks."""
    if rank_count() == 1:
        return x
    assert not x.requires_grad, "only keys are shuffled, and keys have no gradient"
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(rank_count())]
    ranks.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def take(x: Tensor, order: Tensor, count: int) -> Tensor:
    start = (ranks.get_rank() if rank_count() > 1 else 0) * count
    return x[order[start : start + count]]
