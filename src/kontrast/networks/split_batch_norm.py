"""Batch norm over parts of a batch, and the shuffling that gives a key other partners than its query has.

N rows, S splits, R ranks. On one device this is what several devices do by themselves: each part has statistics of
its own. Without the shuffle a network can tell positives by the statistics they share (MoCo, section 3.3).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as ranks
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from kontrast.networks.catalogue import whole
from kontrast.registry import UsageError


class SplitBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm whose training statistics are those of each of `splits` consecutive parts of each of `views`
    consecutive views of the batch. The running ones take the average of a view's parts, view after view, as one forward
    a view would. In evaluation it is plain batch norm. Any number of dimensions from two."""

    splits: int = 1
    views: int = 1

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.ndim}")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        if len(input) < 2 * self.splits * self.views:
            count = len(input) // self.views
            raise UsageError(f"a batch of {count} in {self.splits} splits: each split needs two images or more")
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(self.views)
        return torch.cat([y for view in input.tensor_split(self.views) for y in self.parts(view)])

    def parts(self, view: Tensor) -> Iterator[Tensor]:
        for left, part in zip(range(self.splits - 1, -1, -1), view.tensor_split(self.splits)):
            # Running statistics are updated part by part with rates that end in the parts' plain average.
            rate = (self.momentum / self.splits) / (1 - self.momentum * left / self.splits)
            yield batch_norm(part, self.running_mean, self.running_var, self.weight, self.bias, True, rate, self.eps)


def convert_split_batch_norm(module: nn.Module, splits: int) -> nn.Module:
    """The module with every batch norm replaced by a split one that holds the same parameters and buffers."""
    whole("splits", splits)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        new = SplitBatchNorm(
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
    x = mix(mix(key) + torch.arange(count, device=key.device))
    return torch.argsort(x, stable=True)


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 with wrap-around; the masks make the right shifts logical."""
    x = x + -0x61C8864680B583EB
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def shuffle(images: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's share of the joined batch in shuffled order, and the order [R N]; images [N,...] have no gradient."""
    order = permutation(len(images) * rank_count(), key)
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
