r"""Collectives with exact gradients, so that several processes train like one process on the joined batch.

Each of R ranks has a share of the batch, with the same number of images. Every objective follows one convention:

    value       on every rank, the loss of the joined batch
    gradient    of each rank's z: R times the gradient of that loss, d(sum of the ranks' losses)/dz

DistributedDataParallel averages parameter gradients over ranks, so the factor R cancels and the step is exactly that of
one process on the joined batch. Under this convention, each function below has its true derivative. Nothing is sent if
torch.distributed is not initialized or has one rank.

The loss of a contrastive objective sends at most one gather of its keys [W,B,D] and one mean of its terms forward, and
one reduction of the gradient of the keys backward. If it contrasts z with a teacher's keys and with itself, both travel
together. Some objectives need a little more, which tests/test_distributed.py counts:

    with labels                         the labels [B] forward
    align-uniform, cacr with rbf        a statistic per anchor [V,B] forward, its gradient backward: the log of a mean
    dclw                                the similarities of positives [V,B] forward, for weights over all images
    sim-affinity, sim-whitening         a number per pair of views forward and backward, for the norm of A - A^T
    nnclr                               its keys are the predictions z, and the teacher's keys too without a bank
    sogclr, isogclr                     the index and estimates of each image [2,B] or [4,B] forward
    swav, dino with sinkhorn            no keys: sums [W,K] or [K] over samples forward, once per iteration
    dino                                no keys: the mean [D] of the teacher's rows forward, for the center
    barlow-twins, vicreg, w-mse,        no keys: sums [V,D] and [V,D,D] of views or pairs of views, forward and backward
    sim-trace, sim-whitening
    zero-cl                             z and keys [V+W,B,D] for its instances, and the sums above for its features
    lejepa                              no keys: sums of cosines and sines [2,V,S,K], forward and backward
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def active() -> bool:
    return dist.is_available() and dist.is_initialized()


def world() -> int:
    """Return the number of ranks; 1 without torch.distributed."""
    return dist.get_world_size() if active() else 1


def rank() -> int:
    return dist.get_rank() if active() else 0


def gather(x: Tensor, dim: int = 0) -> Tensor:
    """Concatenate the x of all ranks along `dim`, in the order of ranks, with gradient."""
    return x if world() == 1 else _Gather.apply(x, dim)


def total(x: Tensor) -> Tensor:
    """Sum x over ranks, with gradient."""
    return x if world() == 1 else _Total.apply(x)


def mean(x: Tensor) -> Tensor:
    """Average the losses of all ranks; the gradient is that of this rank's own loss."""
    return x if world() == 1 else _Mean.apply(x)


def refuse_second_derivative() -> None:
    """Raise if a gradient will be differentiated again: it would silently lack the messages between ranks."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("a loss over several ranks has no second derivative: avoid create_graph, or use one process")


@torch.no_grad()
def average_gradients(parameters: Sequence[Tensor]) -> None:
    """Average the gradients of parameters over ranks in place, in one message: what DDP does for a network."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if world() == 1 or not gradients:
        return
    joined = mean(torch.cat([gradient.flatten() for gradient in gradients]))
    for gradient, average in zip(gradients, joined.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(average.view_as(gradient))


@torch.no_grad()
def copy_from_first_rank(tensors: Sequence[Tensor]) -> None:
    """Overwrite tensors with those of the first rank."""
    if world() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, src=0)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim, ctx.size = dim, x.shape[dim]
        local = x.movedim(dim, 0).contiguous()
        everyone = local.new_empty((world() * local.shape[0], *local.shape[1:]))
        dist.all_gather_into_tensor(everyone, local)
        return everyone.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivative()
        # In float32 at least: a sum of bf16 gradients in bf16 would lose digits that one process keeps.
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        grad = grads[0].movedim(ctx.dim, 0).to(wide).contiguous()
        if dist.get_backend() == "nccl":
            local = grad.new_empty((ctx.size, *grad.shape[1:]))
            dist.reduce_scatter_tensor(local, grad)
        else:
            grad = grad.clone()
            dist.all_reduce(grad)
            local = grad[rank() * ctx.size : (rank() + 1) * ctx.size]
        return local.to(grads[0].dtype).movedim(0, ctx.dim), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        refuse_second_derivative()
        return _Total.forward(ctx, grads[0])


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _Total.forward(ctx, x) / world()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def is_main() -> bool:
    """Return whether this is the first rank, the only one that writes files."""
    return rank() == 0


def greatest(x: Tensor) -> Tensor:
    """Return the maximum of each element over ranks, without gradient."""
    if world() > 1:
        x = x.clone()
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x


def any_rank(flag: bool) -> bool:
    """Return whether the flag is true on any rank."""
    return flag if world() == 1 else bool(greatest(torch.tensor(float(flag), device=_device())).item())


def broadcast(value: str) -> str:
    """Return the first rank's text on every rank."""
    return gather_texts(value)[0]


def gather_texts(value: str) -> list[str]:
    """Return the texts of all ranks, in the order of ranks. They are sent as bytes, without pickle."""
    if world() == 1:
        return [value]
    data = value.encode("utf-8", "surrogateescape")
    sizes = gather(torch.tensor([len(data)], device=_device())).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=_device())
    padded[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    rows = gather(padded[None]).cpu()
    return [bytes(row[:size].tolist()).decode("utf-8", "surrogateescape") for row, size in zip(rows, sizes)]


def _device() -> torch.device:
    """Return the device on which collectives need their tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


START_SECONDS, TRAINING_SECONDS, ALONE_SECONDS = 300.0, 120.0, 3600.0
"""How long a rank waits for the others: until the end of the first step, after it, and while the first rank works alone
(in an evaluation). KONTRAST_RANK_TIMEOUT overrides the second."""
SIGN_IN_SECONDS = 3.0


def wait_at_most(seconds: float) -> None:
    """Let collectives fail after this many seconds, so that a hanging rank is noticed."""
    if world() > 1:
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        set_timeout(timedelta(seconds=seconds))


def training_seconds() -> float:
    """Return the timeout of collectives during training."""
    try:
        return max(1.0, float(os.environ["KONTRAST_RANK_TIMEOUT"]))
    except (KeyError, ValueError):
        return TRAINING_SECONDS


def missing_ranks(error: BaseException) -> list[int] | None:
    """Return the ranks that no longer answer, if the error is that of a collective; None for other errors."""
    message = str(error).lower()
    if world() == 1 or not (isinstance(error, dist.DistError) or "gloo" in message or "nccl" in message):
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
        return [0]  # the store is gone, and without torchrun the first rank hosts it


def launcher() -> list[str]:
    """Return how a command line begins that starts as many ranks as there are; empty for a single process."""
    if world() == 1:
        return []
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world()))
    nodes = ["--nnodes", str(world() // local)] if world() > local else []
    return ["torchrun", *nodes, "--nproc-per-node", str(local), "-m"]


def initialize(timeout_seconds: float = START_SECONDS) -> torch.device:
    """Join the ranks that torchrun started, if any, and return the device of this rank."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "WORLD_SIZE" not in os.environ or active():
        return device
    timeout = timedelta(seconds=timeout_seconds)
    store, number, size = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    # Each attempt has its own prefix, or a restarted rank would read the previous attempt's addresses.
    store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    ranks: dict[str, Any] = {"store": store, "rank": number, "world_size": size, "timeout": timeout}
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device, **ranks)
    else:
        dist.init_process_group("gloo", **ranks)
    return device


def finalize() -> None:
    """Leave the process group, if there is one."""
    if active():
        dist.destroy_process_group()
