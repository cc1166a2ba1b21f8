"""SGD, LARS, AdamW and Adam on torch's own fused and foreach kernels.

p parameter, g gradient, b momentum, wd weight decay.

torch.optim's classes are not used because constructing one imports torch's compiler, which takes seconds. The kernels
are the same, and nothing here waits for the device, so that a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kontrast.errors import CheckpointError, UsageError
from kontrast.registry import Registry
from kontrast.sharding import copy_whole, in_shards, like, local, sum_over_ranks, whole

OPTIMIZERS = Registry("optimizer")


class Optimizer:
    """Base class: updates the trainable parameters of a module in place.

    Parameters are grouped by weight decay, learning rate, dtype and device; one kernel updates a group. The state is a
    flat dict of tensors that safetensors can write.

    Args:
        model: the module whose parameters with `requires_grad` are trained.
        lr: the first learning rate. `set_lr` changes it in a 0-dim float32 tensor that captured CUDA graphs read.
            Assign a Python float to `lr` for a rate in double precision, without graphs.
        weight_decay: multiplies the parameters in the update, except for single numbers such as a learned temperature.
        exclude_1d: no weight decay for biases and norm layers.
    """

    slots: tuple[str, ...] = ()
    lr: Tensor | float

    def __init__(self, model: nn.Module, lr: float, weight_decay: float, exclude_1d: bool):
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not named:
            raise UsageError("the model has no parameter to train")
        self.parameters = named
        self.weight_decay = {n: 0.0 if p.ndim <= int(exclude_1d) else weight_decay for n, p in named.items()}
        self.state = {s: {n: torch.zeros_like(local(p)) for n, p in named.items()} for s in self.slots}
        self.lr = torch.tensor(float(lr), device=next(iter(named.values())).device)
        self.part_lr: dict[str, Tensor] = {}  # by the prefix of the names of parameters
        self.decay_share: Tensor | None = None

    def set_lr(self, lr: float, part: str = "") -> None:
        """Write the learning rate into its tensor, of all parameters or of one part that has its own rate.

        A rate too large for float32 becomes infinite, not an error: the training step then reports that its numbers are
        not finite.

        Args:
            lr: the learning rate.
            part: how the names of the part's parameters begin, for example "predictor."; default: all other ones.
        """
        assert isinstance(self.lr, Tensor)
        if part and part not in self.part_lr:
            self.part_lr[part] = self.lr.clone()
        rate = self.part_lr[part] if part else self.lr
        rate.fill_(lr if lr <= torch.finfo(rate.dtype).max else float("inf"))

    def lr_of(self, name: str) -> Tensor | float:
        """Return the learning rate of a parameter."""
        return next((rate for part, rate in self.part_lr.items() if name.startswith(part)), self.lr)

    def set_decay_share(self, share: float) -> None:
        """Multiply the weight decay by a number from now on, which captured CUDA graphs read."""
        if self.decay_share is None:
            self.decay_share = torch.ones((), device=next(iter(self.parameters.values())).device)
        self.decay_share.fill_(share)

    def add_decay(self, ps: list[Tensor], gs: list[Tensor], decay: float) -> list[Tensor]:
        """Return gradients plus weight decay."""
        if self.decay_share is None:
            return list(torch._foreach_add(gs, ps, alpha=decay))
        return list(torch._foreach_add(gs, torch._foreach_mul(ps, decay * self.decay_share)))

    def zero_grad(self) -> None:
        for p in self.parameters.values():
            p.grad = None

    def groups(self) -> Iterator[tuple[list[str], float, list[Tensor], list[Tensor]]]:
        """Yield the names, weight decay, parameters and gradients of each group that one kernel can update."""
        split: dict[tuple, dict[str, Tensor]] = {}
        for n, p in self.parameters.items():
            if p.grad is not None:
                rate = next((part for part in self.part_lr if n.startswith(part)), "")
                split.setdefault((self.group_key(n), rate, p.dtype, p.device), {})[n] = p.grad
        for gradients in split.values():
            names = list(gradients)
            ps = [local(self.parameters[n]) for n in names]
            gs = [match_layout(p, local(g)) for p, g in zip(ps, gradients.values())]
            yield names, self.weight_decay[names[0]], ps, gs

    def group_key(self, name: str) -> object:
        return self.weight_decay[name]

    def slot_tensors(self, slot: str, names: list[str]) -> list[Tensor]:
        """Return the state tensors of the named parameters, in their memory layout."""
        tensors = self.state[slot]
        for n in names:
            tensors[n] = match_layout(local(self.parameters[n]), tensors[n])
        return [tensors[n] for n in names]

    def step(self, found_inf: Tensor | None = None) -> None:
        """Update the parameters by their gradients.

        Args:
            found_inf: a float flag with one element on the device; 1 leaves parameters and state unchanged, so that a
                NaN gradient does no harm even inside a captured graph. Default: always update.
        """
        raise NotImplementedError

    def sharded_state(self) -> dict[str, Tensor]:
        """Return the state by name, each tensor sharded like its parameter."""
        tensors = [(slot, n, t) for slot, tensors in self.state.items() for n, t in tensors.items()]
        return {f"{slot}.{n}": like(self.parameters[n], t) for slot, n, t in tensors}

    def state_dict(self) -> dict[str, Tensor]:
        return {name: whole(tensor) for name, tensor in self.sharded_state().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        mine = self.sharded_state()
        for n in sorted(mine.keys() | state.keys()):
            shape, expected = (tuple(tensors[n].shape) if n in tensors else None for tensors in (state, mine))
            if shape != expected:
                raise CheckpointError(f"the checkpoint's optimizer state has {n} of shape {shape}, expected {expected}")
            copy_whole(mine[n], state[n])


def match_layout(reference: Tensor, tensor: Tensor) -> Tensor:
    """Return the tensor with the reference's memory layout. torch's fused CPU kernels read storage in order and ignore
    strides: a channels-last parameter with a contiguous gradient would be updated wrongly."""
    if tensor.stride() == reference.stride():
        return tensor
    return torch.empty_like(reference).copy_(tensor)


@OPTIMIZERS.register("sgd")
class SGD(Optimizer):
    """SGD with momentum: b <- momentum b + g + wd p;  p <- p - lr b (with nesterov: lr (g + wd p + momentum b))."""

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
        assert momentum or not nesterov, "nesterov needs a momentum above 0"
        self.momentum, self.nesterov = momentum, nesterov

    @torch.no_grad()
    def step(self, found_inf: Tensor | None = None) -> None:
        for names, decay, ps, gs in self.groups():
            self.update_fused(names, decay, ps, gs, found_inf)

    def update_fused(self, names: list[str], decay: float, ps: list, gs: list, found_inf: Tensor | None) -> None:
        buffers = self.slot_tensors("momentum", names) if self.momentum else []  # the kernel wants none
        if decay and self.decay_share is not None:  # the kernel takes a number, which a captured graph could not change
            gs, decay = self.add_decay(ps, gs, decay), 0.0
        lr = self.lr_of(names[0])
        fixed: Any = {"dampening": 0.0, "maximize": False, "is_first_step": False, "found_inf": found_inf}
        torch._fused_sgd_(
            ps, gs, buffers, weight_decay=decay, momentum=self.momentum, lr=lr, nesterov=self.nesterov, **fixed
        )


@OPTIMIZERS.register("lars")
class LARS(SGD):
    """LARS, layer-wise adaptive rates (You et al. 2017), in MoCo v3's form.

        g <- g + wd p;  g <- g trust |p|/|g|;  b <- momentum b + g;  p <- p - lr b

    Single numbers, and with `exclude_1d` biases and norms, follow plain SGD. With `lr_inside` it has TensorFlow's form
    b <- momentum b + lr g, p <- p - b, which differs while lr changes.
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
            raise UsageError("LARS needs the norm of whole layers: use adamw or sgd with training.parallel = 'fsdp'")
        self.plain = {n for n, p in self.parameters.items() if p.ndim <= int(exclude_1d)}
        self.trust, self.lr_inside = trust, lr_inside

    def group_key(self, name: str) -> object:
        return name in self.plain

    @torch.no_grad()
    def step(self, found_inf: Tensor | None = None) -> None:
        for names, decay, ps, gs in self.groups():
            plain = names[0] in self.plain
            if not self.lr_inside and (plain or found_inf is None):
                self.update_fused(names, 0.0, ps, gs if plain else self.adapt(ps, gs, decay), found_inf)
            else:
                self.update_unless(found_inf, names, decay, ps, gs)

    def adapt(self, ps: list[Tensor], gs: list[Tensor], decay: float) -> list[Tensor]:
        """Return trust |p|/|g| g for each g = gradient + decay p, or g itself if one of the norms is zero."""
        gs = self.add_decay(ps, gs, decay)
        norm_p, norm_g = torch.stack(torch._foreach_norm(ps)), torch.stack(torch._foreach_norm(gs))
        ratio = torch.where((norm_p > 0) & (norm_g > 0), self.trust * norm_p / norm_g, 1.0)
        return list(torch._foreach_mul(gs, list(ratio.unbind())))

    def update_unless(self, found_inf: Tensor | None, names: list[str], decay: float, ps: list, gs: list) -> None:
        """Update by foreach kernels: the fused one has no form for `lr_inside`."""
        keep = ps[0].new_ones((), dtype=torch.float32) if found_inf is None else 1 - found_inf.reshape(())
        if found_inf is not None:
            gs = [torch.where(keep > 0, g, 0.0) for g in gs]
        if names[0] not in self.plain:
            gs = self.adapt(ps, gs, decay)
        b, lr = self.slot_tensors("momentum", names), self.lr_of(names[0])
        torch._foreach_mul_(b, self.momentum * keep + (1 - keep))
        torch._foreach_add_(b, torch._foreach_mul(gs, keep * lr if self.lr_inside else keep))
        torch._foreach_sub_(ps, torch._foreach_mul(b, keep if self.lr_inside else keep * lr))


@OPTIMIZERS.register("adamw")
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    slots = ("average", "square")
    kernel: Any = staticmethod(torch._fused_adamw_)

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
            # A list, because one 0-dim tensor for all would be read by the host, which waits and forbids capture.
            one = steps[0].new_ones(()) if found_inf is None else 1 - found_inf.reshape(())
            torch._foreach_add_(steps, [one] * len(steps))
            moments = [self.slot_tensors(slot, names) for slot in self.slots]
            if decay and self.decay_share is not None:
                gs, decay = self.decayed(names, ps, gs, decay, one), 0.0
            rule = {"lr": self.lr_of(names[0]), "beta1": self.betas[0], "beta2": self.betas[1], "eps": self.eps}
            fixed = {"amsgrad": False, "maximize": False, "found_inf": found_inf}
            self.kernel(ps, gs, *moments, [], steps, weight_decay=decay, **rule, **fixed)

    def decayed(self, names: list[str], ps: list[Tensor], gs: list[Tensor], decay: float, one: Tensor) -> list[Tensor]:
        """Apply a weight decay that changes to the parameters, if `one` is 1, and return the gradients."""
        assert self.decay_share is not None
        torch._foreach_mul_(ps, torch.where(one > 0, 1 - self.lr_of(names[0]) * decay * self.decay_share, 1.0))
        return gs


@OPTIMIZERS.register("adam")
class Adam(AdamW):
    """Adam with weight decay added to the gradient (Kingma and Ba 2015)."""

    kernel: Any = staticmethod(torch._fused_adam_)

    def decayed(self, names: list[str], ps: list[Tensor], gs: list[Tensor], decay: float, one: Tensor) -> list[Tensor]:
        return self.add_decay(ps, gs, decay)


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], most: float, each: bool = False) -> None:
    """Scale gradients down in place if their norm is larger than `most`, without waiting for the device.

    Args:
        parameters: those with a gradient count.
        most: the largest norm.
        each: limit the norm of each parameter's gradient (DINO) instead of the norm of all together.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    parts = [local(g) for g in gradients]
    squares = torch.stack([norm.float() for norm in torch._foreach_norm(parts)]).square()
    if any(in_shards(g) for g in gradients):
        sharded = torch.tensor([in_shards(g) for g in gradients], device=squares.device)
        squares = torch.where(sharded, sum_over_ranks(squares), squares)
    norms = (squares if each else squares.sum().expand_as(squares)).sqrt()
    torch._foreach_mul_(parts, list((most / (norms + 1e-6)).clamp(max=1).unbind()))


def build_optimizer(
    model: nn.Module,
    name: str = "sgd",
    lr: float = 0.1,
    momentum: float | None = None,
    weight_decay: float = 0.0,
    **arguments: object,
) -> Optimizer:
    """Build the optimizer of a name for the trainable parameters of a module.

    Args:
        model: the module to train.
        name: "sgd", "lars", "adamw" or "adam", or a registered name.
        lr: the first learning rate.
        momentum: momentum of "sgd" and "lars". Default: the optimizer's own, 0.9.
        weight_decay: weight decay.
        **arguments: further arguments of the optimizer, such as `nesterov`, `betas` or `exclude_1d`.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> optimizer = build_optimizer(layer, "sgd", lr=0.1, momentum=0.9)
        >>> layer(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
    """
    if momentum is not None:
        arguments["momentum"] = momentum
    return OPTIMIZERS.build(name, model=model, lr=lr, weight_decay=weight_decay, **arguments)
