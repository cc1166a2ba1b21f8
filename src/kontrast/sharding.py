"""Parameters in shards over the ranks (FSDP2), for encoders too large to lie on each rank whole.

A sharded parameter is a DTensor: `local` is the rank's own part of it, `whole` all of it, for which every rank asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from kontrast.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def shard(module: nn.Module) -> None:
    """Spread the module's parameters over all ranks, transformer block by transformer block and then the rest."""
    import torch.distributed as ranks
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(next(module.parameters()).device.type, (ranks.get_world_size(),))
    # Resharded after every forward, the root too: a teacher has no backward that would do it, and would be averaged
    # in a copy that is thrown away.
    for block in transformer_blocks(module):
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(module, mesh=mesh, reshard_after_forward=True)


def transformer_blocks(module: nn.Module) -> list[nn.Module]:
    stacks = [m for name, m in module.named_modules() if name.rpartition(".")[2] in ("blocks", "layers")]
    return [block for stack in stacks if isinstance(stack, nn.Sequential | nn.ModuleList) for block in stack]


def check_shardable(encoder: nn.Module, name: str) -> None:
    if not any(isinstance(m, nn.MultiheadAttention) or "Attention" in type(m).__name__ for m in encoder.modules()):
        raise UsageError(f"training.parallel = 'fsdp' is for transformers, and {name} is none: use 'ddp'")


def is_sharded(module: nn.Module) -> bool:
    return any(in_shards(p) for p in module.parameters())


def in_shards(tensor: Tensor) -> TypeGuard[DTensor]:
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory; of a plain tensor, the tensor."""
    return tensor.to_local() if in_shards(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if in_shards(tensor) else tensor


def like(reference: Tensor, part: Tensor) -> Tensor:
    """A rank's part (an optimizer's state) as a tensor in shards as the reference is."""
    if not in_shards(reference) or part.shape != local(reference).shape:
        return part
    from torch.distributed.tensor import DTensor

    mesh, places = reference.device_mesh, reference.placements
    return DTensor.from_local(
        part, mesh, places, run_check=False, shape=reference.shape, stride=torch.empty(reference.shape).stride()
    )


def copy_whole(target: Tensor, source: Tensor) -> None:
    """Fill a tensor, or this rank's part of it, from a whole one that every rank holds."""
    if in_shards(target):
        from torch.distributed.tensor import distribute_tensor

        source = source.to(local(target).device)
        source = local(distribute_tensor(source, target.device_mesh, target.placements, src_data_rank=None))
    local(target).copy_(source)


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """The state dict with whole tensors."""
    return {name: whole(tensor) for name, tensor in module.state_dict().items()}


@torch.no_grad()
def load_whole(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """`load_state_dict` from whole tensors, into shards too."""
    if not is_sharded(module):
        module.load_state_dict(state)
        return
    mine = module.state_dict()
    if mine.keys() != state.keys() or any(mine[n].shape != t.shape for n, t in state.items()):
        raise RuntimeError("the state does not fit the module")
    for name, tensor in mine.items():
        copy_whole(tensor, state[name])
