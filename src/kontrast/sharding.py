"""Parameters sharded over the ranks (FSDP2), for encoders that are too large for one device.

A sharded parameter is a DTensor: `local` is the part on this rank. `whole` gathers all of it, and every rank must call
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def shard(module: nn.Module) -> None:
    """Shard the module's parameters over all ranks: each transformer block by itself, then the rest."""
    import torch.distributed as ranks
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(next(module.parameters()).device.type, (ranks.get_world_size(),))
    # Reshard after every forward pass, also the root: a teacher has no backward pass that would do it, and its average
    # would be written to a temporary copy.
    stacks = [m for name, m in module.named_modules() if name.rpartition(".")[2] in ("blocks", "layers")]
    blocks = [block for stack in stacks if isinstance(stack, nn.Sequential | nn.ModuleList) for block in stack]
    for part in (*blocks, module):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)


def is_transformer(encoder: nn.Module) -> bool:
    return any(isinstance(m, nn.MultiheadAttention) or "Attention" in type(m).__name__ for m in encoder.modules())


def is_sharded(module: nn.Module) -> bool:
    return any(in_shards(p) for p in module.parameters())


def in_shards(tensor: Tensor) -> TypeGuard[DTensor]:
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharing its memory. A plain tensor is returned as it is."""
    return tensor.to_local() if in_shards(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor. Every rank must call this; a plain tensor is returned as it is."""
    return tensor.full_tensor() if in_shards(tensor) else tensor


def like(reference: Tensor, part: Tensor) -> Tensor:
    """Combine this rank's part, for example of an optimizer's state, into a tensor sharded like the reference."""
    if not in_shards(reference) or part.shape != local(reference).shape:
        return part
    from torch.distributed.tensor import DTensor

    mesh, places = reference.device_mesh, reference.placements
    return DTensor.from_local(
        part, mesh, places, run_check=False, shape=reference.shape, stride=torch.empty(reference.shape).stride()
    )


def sum_over_ranks(x: Tensor) -> Tensor:
    """Add up numbers of all ranks, for example the squared norms of the shards of a tensor."""
    import torch.distributed as ranks

    x = x.clone()
    ranks.all_reduce(x)
    return x


def copy_whole(target: Tensor, source: Tensor) -> None:
    """Copy a whole tensor, which every rank has, into a tensor or into this rank's part of it."""
    if in_shards(target):
        from torch.distributed.tensor import distribute_tensor

        source = source.to(local(target).device)
        source = local(distribute_tensor(source, target.device_mesh, target.placements, src_data_rank=None))
    local(target).copy_(source)


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with whole tensors."""
    return {name: whole(tensor) for name, tensor in module.state_dict().items()}


@torch.no_grad()
def load_whole(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a state dict of whole tensors, also into a sharded module."""
    if not is_sharded(module):
        module.load_state_dict(state)
        return
    for name, tensor in module.state_dict().items():
        copy_whole(tensor, state[name])
