"""SGD, LARS and AdamW on torch's own fused and foreach kernels.

torch.optim's classes are not used: constructing one imports torch's compiler, which takes seconds that a CPU run
does not have. The kernels are the same; the learning rate is a 0-dim tensor that captured CUDA graphs read, and
nothing here waits for the device. `step(found_inf)` leaves everything untouched where the 0-dim float `found_inf`
is 1, so that a NaN gradient does no harm even inside a captured graph.

p parameter, g gradient, b momentum, wd weight decay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from kontrast.errors import CheckpointError, UsageError
from kontrast.registry import Registry
from kontrast.sharding import copy_whole, in_shards, like, local, whole

OPTIMIZERS = Registry("optimizer")


class Optimizer:
    """Named parameters in groups by weight decay and type; state as a flat dict of tensors, ready for safetensors."""

    slots: tuple[str, ...] = ()

    def __init__(self, model: nn.Module, lr: float, weight_decay: float, exclude_1d: bool):
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not named:
            raise UsageError("the model has no parameter to train")
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not 0 <= value < float("inf"):
                raise UsageError(f"{name} = {value}: give a number that is not negative")
        self.parameters = named
        self.weight_decay = {n: 0.0 if exclude_1d and p.ndim <= 1 else weight_decay for n, p in named.items()}
        self.state = {s: {n: torch.zeros_like(local(p)) for n, p in named.items()} for s in self.slots}
        self.lr = torch.tensor(float(lr), device=next(iter(named.values())).device)

    def set_lr(self, lr: float) -> None:
        # What float32 can't hold is infinite here, and noticed by the step's check; torch itself would raise.
        self.lr.fill_(lr if lr <= torch.finfo(self.lr.dtype).max else float("inf"))

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.parameters.values():
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()

    def groups(self) -> Iterator[tuple[list[str], float, list[Tensor], list[Tensor]]]:
        """Names, weight decay, parameters and gradients of each group that one kernel can update."""
        split: dict[tuple, dict[str, Tensor]] = {}
        for n, p in self.parameters.items():
            if p.grad is not None:
                split.setdefault((self.group(n), p.dtype, p.device), {})[n] = p.grad
        for gradients in split.values():
            names = list(gradients)
            ps = [local(self.parameters[n]) for n in names]
            gs = [local(g) for g in gradients.values()]
            yield names, self.weight_decay[names[0]], ps, [alike(p, g) for p, g in zip(ps, gs)]

    def group(self, name: str) -> object:
        return self.weight_decay[name]

    def slot(self, slot: str, names: list[str]) -> list[Tensor]:
        tensors = self.state[slot]
        for n in names:
            tensors[n] = alike(local(self.parameters[n]), tensors[n])
        return [tensors[n] for n in names]

    def step(self, found_inf: Tensor | None = None) -> None:
        raise NotImplementedError

    def in_shards(self) -> dict[str, Tensor]:
        """State by name, each tensor in shards where its parameter is."""
        tensors = [(slot, n, t) for slot, tensors in self.state.items() for n, t in tensors.items()]
        return {f"{slot}.{n}": like(self.parameters[n], t) for slot, n, t in tensors}

    def state_dict(self) -> dict[str, Tensor]:
        return {name: whole(tensor) for name, tensor in self.in_shards().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        mine = self.in_shards()
        odd = sorted(mine.keys() ^ state.keys())
        if odd:
            raise CheckpointError(f"the optimizer's state differs from the checkpoint's, first at {odd[0]!r}")
        for name, tensor in mine.items():
            if tensor.shape != state[name].shape:
                shapes = f"{tuple(state[name].shape)} in the checkpoint, {tuple(tensor.shape)} here"
                raise CheckpointError(f"optimizer state {name!r} is {shapes}")
            copy_whole(tensor, state[name])


def alike(reference: Tensor, tensor: Tensor) -> Tensor:
    """The tensor laid out in memory as the reference is: torch's fused CPU kernels read storage in order and don't
    look at strides, so a channels-last parameter with a contiguous gradient would be updated wrongly."""
    if tensor.stride() == reference.stride():
        return tensor
    return torch.empty_like(reference).copy_(tensor)


@OPTIMIZERS.register("sgd")
class SGD(Optimizer):
    """b <- momentum b + g + wd p;  p <- p - lr b (with nesterov: lr (g + wd p + momentum b))."""

    slots = ("momentum",)

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        exclude_1d: bool = False,
    ):
        super().__init__(model, lr, weight_decay, exclude_1d)
        if not 0 <= momentum < 1:
            raise UsageError(f"momentum = {momentum}: give a number from 0 to below 1")
        if nesterov and not momentum:
            raise UsageError("nesterov = true needs a momentum above 0")
        self.momentum, self.nesterov = momentum, nesterov

    @torch.no_grad()
    def step(self, found_inf: Tensor | None = None) -> None:
        for names, decay, ps, gs in self.groups():
            self.fused(names, decay, ps, gs, found_inf)

    def fused(self, names: list[str], decay: float, ps: list, gs: list, found_inf: Tensor | None) -> None:
        torch._fused_sgd_(
            ps,
            gs,
            self.slot("momentum", names) if self.momentum else [],  # the kernel insists
            weight_decay=decay,
            momentum=self.momentum,
            lr=self.lr,
            dampening=0.0,
            nesterov=self.nesterov,
            maximize=False,
            is_first_step=False,
            found_inf=found_inf,
        )


@OPTIMIZERS.register("lars")
class LARS(SGD):
    """Layer-wise adaptive rates (You et al. 2017), as MoCo v3 has it; 1-D parameters follow SGD without decay.

        g <- g + wd p;  g <- g trust |p|/|g|;  b <- momentum b + g;  p <- p - lr b

    lr_inside: the TensorFlow form b <- momentum b + lr g, p <- p - b, which differs while lr changes.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        lr_inside: bool = False,
        exclude_1d: bool = True,
    ):
        super().__init__(model, lr, momentum, weight_decay, exclude_1d=exclude_1d)
        if any(in_shards(p) for p in self.parameters.values()):
            raise UsageError("LARS needs the norm of whole layers: with training.parallel = 'fsdp' use adamw or sgd")
        self.plain = {n for n, p in self.parameters.items() if exclude_1d and p.ndim <= 1}
        self.trust, self.lr_inside = trust, lr_inside

    def group(self, name: str) -> object:
        return name in self.plain

    @torch.no_grad()
    def step(self, found_inf: Tensor | None = None) -> None:
        for names, decay, ps, gs in self.groups():
            if names[0] in self.plain and not self.lr_inside:
                self.fused(names, decay, ps, gs, found_inf)
            else:
                self.update(names, decay, ps, gs, found_inf)

    def update(self, names: list[str], decay: float, ps: list, gs: list, found_inf: Tensor | None) -> None:
        keep = self.lr.new_ones(()) if found_inf is None else 1 - found_inf.reshape(())
        if found_inf is not None:
            gs = [torch.where(keep > 0, g, 0.0) for g in gs]
        if names[0] not in self.plain:
            gs = list(torch._foreach_add(gs, ps, alpha=decay))
            size_p, size_g = torch.stack(torch._foreach_norm(ps)), torch.stack(torch._foreach_norm(gs))
            ratio = torch.where((size_p > 0) & (size_g > 0), self.trust * size_p / size_g, 1.0)
            gs = list(torch._foreach_mul(gs, list(ratio.unbind())))
        b = self.slot("momentum", names)
        torch._foreach_mul_(b, self.momentum * keep + (1 - keep))
        torch._foreach_add_(b, torch._foreach_mul(gs, keep * self.lr if self.lr_inside else keep))
        torch._foreach_sub_(ps, torch._foreach_mul(b, keep if self.lr_inside else keep * self.lr))


@OPTIMIZERS.register("adamw")
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    slots = ("average", "square")
    kernel = staticmethod(torch._fused_adamw_)

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        exclude_1d: bool = False,
    ):
        super().__init__(model, lr, weight_decay, exclude_1d)
        self.betas, self.eps = tuple(betas), eps
        self.state["steps"] = {n: torch.zeros((), device=p.device) for n, p in self.parameters.items()}

    @torch.no_grad()
    def step(self, found_inf: Tensor | None = None) -> None:
        for names, decay, ps, gs in self.groups():
            steps = [self.state["steps"][n] for n in names]
            # A list, not one 0-dim tensor for all: that form reads the number, which waits and forbids capture.
            one = self.lr.new_ones(()) if found_inf is None else 1 - found_inf.reshape(())
            torch._foreach_add_(steps, [one] * len(steps))
            self.kernel(
                ps,
                gs,
                self.slot("average", names),
                self.slot("square", names),
                [],
                steps,
                lr=self.lr,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=decay,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
                found_inf=found_inf,
            )


@OPTIMIZERS.register("adam")
class Adam(AdamW):
    """Adam with weight decay added to the gradient (Kingma and Ba 2015)."""

    kernel = staticmethod(torch._fused_adam_)


def build_optimizer(
    model: nn.Module,
    name: str = "sgd",
    lr: float = 0.1,
    momentum: float | None = None,
    weight_decay: float = 0.0,
    **arguments: object,
) -> Optimizer:
    """An optimizer by name over the model's parameters that want a gradient; None leaves the optimizer's default."""
    given = {"momentum": momentum, **arguments}
    given = {k: v for k, v in given.items() if v is not None}
    return OPTIMIZERS.build(name, model=model, lr=lr, weight_decay=weight_decay, **given)
