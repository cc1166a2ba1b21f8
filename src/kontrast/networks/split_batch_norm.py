"""Batch norm over parts of a batch, and the shuffling that gives a key other partners than its query has.

N rows, S splits, R ranks. On one device, this is what several devices do without synchronization: each part is
normalized by its own statistics. Without the shuffle, a network can recognize positives by the statistics they share
(MoCo, section 3.3).
"""

from __future__ import annotations

import torch
import torch.distributed as ranks
from torch import Tensor
from torch.nn.functional import batch_norm

from kontrast.counters import mix_tensor
from kontrast.errors import UsageError
from kontrast.networks.batch_norm import AnyBatchNorm, replace_batch_norm
from kontrast.networks.catalog import Module
from kontrast.networks.checks import check_whole


class SplitBatchNorm(AnyBatchNorm):
    """Batch norm that normalizes each part of a training batch by the part's own statistics.

    The batch consists of `views` consecutive views, and each view of `splits` consecutive parts. The running statistics
    take the average over the parts of a view, view after view, as one forward pass per view would. In evaluation mode
    it is plain batch norm. `convert_split_batch_norm` puts it into a network.

    Example:
        >>> norm = SplitBatchNorm(3)
        >>> norm.splits = 2
        >>> norm(torch.arange(12.0).view(4, 3)).view(2, 2, 3).mean(1).abs().max() < 1e-6
        tensor(True)
    """

    splits: int = 1
    views: int = 1

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        parts, count = self.splits * self.views, len(input) // self.views
        if count < 2 * self.splits or len(input) % parts:
            raise UsageError(f"a batch of {count} in {self.splits} splits: give equal splits of at least two images")
        return self.normalize_parts(input, parts)

    def normalize_parts(self, input: Tensor, parts: int) -> Tensor:
        """Turn the channels of each part into channels of their own, so that one batch norm serves all parts.

        Channels are moved last on the way, as they are in memory; so are the output's.
        """
        last = input.movedim(1, -1)
        wide = torch.promote_types(input.dtype, torch.float32)
        mean, variance = input.new_zeros((2, parts * self.num_features), dtype=wide)
        weight, bias = (None if p is None else p.repeat(parts) for p in (self.weight, self.bias))
        rows = last.reshape(parts, -1, self.num_features).transpose(0, 1).flatten(1)
        rows = batch_norm(rows, mean, variance, weight, bias, True, 1.0, self.eps)
        self.update_running(*(s.view(self.views, self.splits, -1).mean(1) for s in (mean, variance)))
        return rows.unflatten(1, (parts, -1)).transpose(0, 1).reshape(last.shape).movedim(-1, 1)


def convert_split_batch_norm(module: Module, splits: int) -> Module:
    """Replace every batch norm in a module by a split one with the same parameters and buffers.

    Args:
        module: the network; it is changed in place.
        splits: parts per batch.

    Example:
        >>> from torch import nn
        >>> convert_split_batch_norm(nn.Sequential(nn.BatchNorm1d(3)), splits=4)[0].splits
        4
    """
    check_whole("splits", splits)
    module = replace_batch_norm(module, SplitBatchNorm)
    for norm in module.modules():
        if isinstance(norm, SplitBatchNorm):
            norm.splits = splits
    return module


def permutation(count: int, key: Tensor) -> Tensor:
    """Return a permutation of `count` numbers [count] that depends only on the 0-dim int64 key, on the key's device: it
    is the same on every rank, after a restart and in a captured graph."""
    x = mix_tensor(mix_tensor(key) + torch.arange(count, device=key.device))
    return torch.argsort(x, stable=True)


def shuffle(images: Tensor, key: Tensor, views: int = 1) -> tuple[Tensor, Tensor]:
    """Shuffle the batch over all ranks, so that a key is normalized with other images than its query.

    Args:
        images: this rank's images [N,...], without gradient.
        key: 0-dim int64 tensor that determines the order.
        views: number of consecutive views in `images`.

    Returns:
        This rank's share [N,...] of the shuffled batch, and the order [R N] for `unshuffle`.

    Example:
        >>> images, order = shuffle(torch.arange(6), torch.tensor(1))
        >>> unshuffle(images, order)
        tensor([0, 1, 2, 3, 4, 5])
    """
    rows = torch.arange(len(images) * rank_count(), device=key.device)
    rows = rows.view(rank_count(), views, -1).transpose(0, 1).flatten()  # view by view, as in one process
    order = rows[permutation(len(rows), key)]
    return own_share(gather_ranks(images), order, len(images)), order


def unshuffle(features: Tensor, order: Tensor) -> Tensor:
    """Return features [N,...] of shuffled images in the original order of the images, on their original ranks.

    Args:
        features: this rank's features of the shuffled images.
        order: the order that `shuffle` returned.

    Example:
        >>> unshuffle(torch.tensor([30, 10, 20]), order=torch.tensor([2, 0, 1]))
        tensor([10, 20, 30])
    """
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return own_share(gather_ranks(features), inverse, len(features))


def rank_count() -> int:
    return ranks.get_world_size() if ranks.is_available() and ranks.is_initialized() else 1


def gather_ranks(x: Tensor) -> Tensor:
    """Return every rank's rows [R N,...], in the order of ranks."""
    if rank_count() == 1:
        return x
    assert not x.requires_grad, "only keys are shuffled, and keys have no gradient"
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(rank_count())]
    ranks.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def own_share(x: Tensor, order: Tensor, count: int) -> Tensor:
    """Return this rank's `count` rows of x in the given order."""
    start = (ranks.get_rank() if rank_count() > 1 else 0) * count
    return x[order[start : start + count]]
