r"""Many processes as one: the joined batch, with exact gradients.

R ranks each hold a share of the batch. The convention, which every objective keeps:

    value       on every rank, the loss of the joined batch
    gradient    of each rank's z: R times the gradient of that loss, d(sum of the ranks' losses)/dz

DistributedDataParallel averages parameter gradients over ranks, so the factor R cancels and the step is exactly the
step of one process on the joined batch. Each function below is the true derivative of what it computes under that rule.
Every rank brings the same number of images. Where torch.distributed is not initialised, or holds one rank, nothing is
communicated.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def active() -> bool:
    return dist.is_available() and dist.is_initialized()


def world() -> int:
    """How many ranks share the batch; 1 without torch.distributed."""
    return dist.get_world_size() if active() else 1


def rank() -> int:
    return dist.get_rank() if active() else 0


def image_ids(count: int, device: torch.device) -> Tensor:
    """Ids of this rank's images, unique over ranks: [count]."""
    return torch.arange(rank() * count, (rank() + 1) * count, device=device)


def gather(x: Tensor, dim: int = 0) -> Tensor:
    """Every rank's x, joined along `dim` in the order of ranks, with gradient."""
    return x if world() == 1 else _Gather.apply(x, dim)


def total(x: Tensor) -> Tensor:
    """The sum of x over ranks, with gradient."""
    return x if world() == 1 else _Total.apply(x)


def mean(x: Tensor) -> Tensor:
    """The mean of each rank's own loss over ranks: the joined value; the gradient stays with the rank's own loss."""
    return x if world() == 1 else _Mean.apply(x)


def refuse_second_derivative() -> None:
    """Messages between ranks have no graph: what is differentiated again would silently lack them."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("a loss over several ranks has no second derivative: leave create_graph, or use one process")


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim, ctx.size = dim, x.shape[dim]
        own = x.movedim(dim, 0).contiguous()
        everyone = own.new_empty((world() * own.shape[0], *own.shape[1:]))
        dist.all_gather_into_tensor(everyone, own)
        return everyone.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivative()
        # Summed in float32 at least: a sum of bf16 gradients in bf16 would lose what one process keeps.
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        grad = grads[0].movedim(ctx.dim, 0).to(wide).contiguous()
        if dist.get_backend() == "nccl":
            own = grad.new_empty((ctx.size, *grad.shape[1:]))
            dist.reduce_scatter_tensor(own, grad)
        else:
            grad = grad.clone()
            dist.all_reduce(grad)
            own = grad[rank() * ctx.size : (rank() + 1) * ctx.size]
        return own.to(grads[0].dtype).movedim(0, ctx.dim), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        refuse_second_derivative()
        grad = grads[0].clone()
        dist.all_reduce(grad)
        return grad


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x / world()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def is_main() -> bool:
    """Whether this rank writes: only the first does."""
    return rank() == 0


def greatest(x: Tensor) -> Tensor:
    """The greatest of each element over ranks, without gradient."""
    if world() > 1:
        x = x.clone()
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x


def any_rank(flag: bool) -> bool:
    """Whether the flag is raised on any rank; every rank gets the same answer."""
    return flag if world() == 1 else bool(greatest(torch.tensor(float(flag), device=_device())).item())


def broadcast(value: str) -> str:
    """The first rank's text, on every rank."""
    if world() == 1:
        return value
    return gather_texts(value)[0]


def gather_texts(value: str) -> list[str]:
    """Every rank's text, in the order of ranks; carried as bytes, nothing is pickled."""
    if world() == 1:
        return [value]
    data = value.encode("utf-8", "surrogateescape")
    sizes = gather(torch.tensor([len(data)], device=_device())).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=_device())
    padded[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    rows = gather(padded[None]).cpu()
    return [bytes(row[:size].tolist()).decode("utf-8", "surrogateescape") for row, size in zip(rows, sizes)]


def _device() -> torch.device:
    """Where collectives take their tensors from."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


START_SECONDS, TRAINING_SECONDS, ALONE_SECONDS = 300.0, 120.0, 3600.0
"""How long a rank waits for the others: until the first step is done, from then on, and while the first rank works
alone (an evaluation). KONTRAST_RANK_TIMEOUT sets the second."""
SIGN_IN_SECONDS = 3.0


def wait_at_most(seconds: float) -> None:
    """From now on a collective that takes longer than this fails: a rank that hangs is noticed."""
    if world() > 1:
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        set_timeout(timedelta(seconds=seconds))


def training_seconds() -> float:
    try:
        return max(1.0, float(os.environ["KONTRAST_RANK_TIMEOUT"]))
    except (KeyError, ValueError):
        return TRAINING_SECONDS


def missing_ranks(error: BaseException) -> list[int] | None:
    """Where an error is a collective's that failed: the ranks that do not sign in any more. None for other errors."""
    words = str(error).lower()
    if world() == 1 or not (isinstance(error, dist.DistError) or "gloo" in words or "nccl" in words):
        return None
    store, everyone = dist.distributed_c10d._get_default_store(), range(world())
    try:
        store.set(f"sign-in-{rank()}", "here")
        due = time.monotonic() + SIGN_IN_SECONDS
        missing = list(everyone)
        while missing and time.monotonic() < due:
            missing = [r for r in missing if not store.check([f"sign-in-{r}"])]
            time.sleep(0.05)
        return missing
    except RuntimeError:
        return [0]  # the store itself is gone: the first rank keeps it where torchrun does not


def initialize(timeout_seconds: float = START_SECONDS) -> torch.device:
    """Join the ranks that torchrun started and say which device is this rank's; without torchrun nothing starts."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "WORLD_SIZE" not in os.environ or active():
        return device
    timeout = timedelta(seconds=timeout_seconds)
    store, number, size = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    # A restarted rank would read the attempt before's addresses from torchrun's store, so each attempt has its own.
    store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=number,
        world_size=size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    return device


def finalize() -> None:
    """Leave the process group, where there is one."""
    if active():
        dist.destroy_process_group()
