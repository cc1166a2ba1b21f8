"""One optimization step: images to views, views to loss, loss to weights. On CUDA all of it is one captured graph.

Nothing in the step waits for the device: the learning rate and the momentum are scalars on the device, terms are summed
on the device, and a loss or gradient that is not finite sets a flag that freezes the weights until the host checks it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from kontrast import distributed
from kontrast.optim.optimizers import Optimizer, clip_gradients
from kontrast.sharding import is_sharded, local
from kontrast.training.learner import Learner, Outcome
from kontrast.training.step_schedule import Schedule

EAGER_STEPS = 3  # steps before capture, real ones, in which compilation and lazy allocations happen


class Step:
    """Take training steps.

    Args:
        learner: the networks and the objective.
        optimizer: of the learner's parameters.
        views: makes views [V,B,C,h,w], and local crops if there are any, from images, keys and sizes.
        device: where the step runs.
        precision: the type that the networks compute in.
        compile: compile the networks: "whole", "blocks" or not at all ("").
        accumulate: parts that a batch is computed in.
        clip: the largest norm of the gradient; 0 for no limit.
        clip_each: limit the norm of each parameter's gradient separately.
        skipping: undo a step whose loss or gradient is not finite; otherwise the weights stay frozen after it.
        say: receives messages for people.
    """

    def __init__(
        self,
        learner: Learner,
        optimizer: Optimizer,
        views: Callable[..., Tensor | tuple[Tensor, Tensor]],
        *,
        device: torch.device,
        precision: torch.dtype = torch.float32,
        compile: str | bool = "",
        accumulate: int = 1,
        clip: float = 0.0,
        clip_each: bool = False,
        skipping: bool = False,
        say: Callable[[str], None] = print,
    ):
        self.learner, self.optimizer, self.views = learner, optimizer, views
        self.device, self.precision, self.accumulate, self.say = device, precision, accumulate, say
        self.clip, self.clip_each, self.skipping = clip, clip_each, skipping
        self.sharded = is_sharded(learner)
        if compile and not self.sharded:
            learner.compile_networks(blocks=compile == "blocks")
        elif compile:
            say("the networks are not compiled: their parameters are sharded")
        self.loss_parameters = learner.loss_parameters()
        distributed.copy_from_first_rank([p.data for p in self.loss_parameters.values()])
        alone = distributed.world() == 1 or self.sharded  # sharded modules reduce their gradients themselves
        self.module: nn.Module = learner if alone else data_parallel(learner, device)
        self.momentum = torch.ones((), device=device)
        self.failed = torch.zeros(1, device=device)
        self.steps_to_failure = torch.zeros(1, device=device)
        self.names: list[str] = []
        self.sums = torch.zeros(0, device=device)
        self.count = 0
        self.capturing = device.type == "cuda" and distributed.world() == 1
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: dict[str, Tensor] = {}
        self._taken = 0
        self.frozen, self.storing = False, True

    def __call__(self, images: Tensor, keys: Tensor, schedule: Schedule, **of_images: Tensor | None) -> None:
        """Take one step. The terms of the loss stay on the device until `flush`.

        Args:
            images: uint8 [B,C,H,W].
            keys: int64 [B], which seed the views of each image.
            schedule: the scheduled numbers of this step.
            **of_images: `sizes` int64 [B,2], height and width of each image if images are padded; `indices` int64 [B],
                the number of each image in its data set; `labels` int64 [B]; `tokens` int32 [B,L] of a caption of
                each image. None stands for an input that isn't there.
        """
        self.follow(schedule)
        inputs = {"images": images, "keys": keys, **{name: x for name, x in of_images.items() if x is not None}}
        if not self.capturing or self._taken < EAGER_STEPS:
            self._take(**inputs)
        else:
            self._replay(inputs)
        self._taken += 1
        self.count += 1

    def follow(self, schedule: Schedule) -> None:
        """Write the numbers where a captured graph reads them; a graph that does something else is dropped."""
        self.optimizer.set_lr(schedule.lr)
        for part, lr in schedule.part_lr.items():
            self.optimizer.set_lr(lr, part)
        if schedule.decay_share is not None:
            self.optimizer.set_decay_share(schedule.decay_share)
        self.momentum.fill_(schedule.momentum)
        if (self.frozen, self.storing) != (schedule.frozen, schedule.storing):
            self.frozen, self.storing, self._graph = schedule.frozen, schedule.storing, None

    def _replay(self, inputs: dict[str, Tensor]) -> None:
        shapes = {name: x.shape for name, x in inputs.items()}
        if self._graph is not None and shapes != {name: x.shape for name, x in self._inputs.items()}:
            self._graph = None  # images of other sizes, padded to another shape, need another graph
        if self._graph is None and not self._capture(inputs):
            self._take(**inputs)
            return
        for name, theirs in inputs.items():
            self._inputs[name].copy_(theirs, non_blocking=True)
        assert self._graph is not None
        self._graph.replay()

    def _capture(self, inputs: dict[str, Tensor]) -> bool:
        self._inputs = {name: x.clone() for name, x in inputs.items()}
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad()
        torch.cuda.synchronize(self.device)
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._take(**self._inputs)
        except Exception as error:
            self.capturing = False
            reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
            self.say(f"the step runs without a CUDA graph: {reason}")
            torch.cuda.synchronize(self.device)
            return False
        self._graph = graph
        return True

    @property
    def captured(self) -> bool:
        """Whether the step runs as a CUDA graph."""
        return self._graph is not None

    def _take(self, images: Tensor, keys: Tensor, sizes: Tensor | None = None, **of_images: Tensor) -> None:
        self.optimizer.zero_grad()
        saved = [t.clone() for t in self.state_to_roll_back()] if self.skipping else []
        made = self.views(images, keys, sizes)
        views, crops = made if isinstance(made, tuple) else (made, None)
        with torch.autocast(self.device.type, dtype=self.precision, enabled=self.precision != torch.float32):
            outcome = self._forward_backward(views, crops, of_images)
        for name, parameter in self.loss_parameters.items():
            if self.frozen and name.startswith("prototypes."):
                parameter.grad = None
        distributed.average_gradients(list(self.loss_parameters.values()))
        loss = torch.stack([t.detach().float() for t in outcome.terms.values()])
        self._check_finite(loss)
        if self.clip:
            clip_gradients(self.optimizer.parameters.values(), self.clip, self.clip_each)
        self.optimizer.step(found_inf=self.failed)
        if outcome.bank_rows is not None and self.storing:
            assert self.learner.bank is not None
            self.learner.bank.enqueue(outcome.bank_rows)
        for tensor, before in zip(self.state_to_roll_back(), saved):
            tensor.copy_(torch.where(self.failed > 0, before, tensor).view_as(tensor))
        self.learner.steps += 1
        if not self.names:
            self.names, self.sums = list(outcome.terms), torch.zeros_like(loss)
        self.sums += torch.where(self.failed > 0, 0, loss) if self.skipping else loss

    def state_to_roll_back(self) -> list[Tensor]:
        """Return what changes before a step is known to be finite: batch statistics, the bank, the teacher."""
        teachers = [t for t in (self.learner.teacher, self.learner.teacher_prototypes) if t is not None]
        return [*self.learner.buffers(), *(local(p) for teacher in teachers for p in teacher.parameters())]

    def _forward_backward(self, views: Tensor, crops: Tensor | None, of_images: dict[str, Any]) -> Outcome:
        if self.accumulate > 1:
            return self._in_parts(views, crops, of_images)
        outcome: Outcome = self.module(views, crops, self.momentum, **of_images)
        with torch.autocast(self.device.type, enabled=False):
            outcome.terms.total.backward()
        return outcome

    def _in_parts(self, views: Tensor, crops: Tensor | None, of_images: dict[str, Any]) -> Outcome:
        """Compute the exact loss of the whole batch in parts, with the memory of one part (gradient caching).

        First the projections of all parts, without gradient, and the loss; then each part again, with its share of the
        gradient of the loss. Batch norm sees one part at a time.
        """
        learner, parts = self.learner, self.accumulate
        of_images = dict(of_images)
        tokens = of_images.pop("tokens", None)
        nothing: list[Any] = [None] * parts
        columns = ((views, 1), (crops, 1), (tokens, 0))
        split = list(zip(*(nothing if x is None else x.chunk(parts, dim) for x, dim in columns)))
        with torch.no_grad(), restored_buffers(learner.student, learner.predictor):
            keys = learner.teacher_keys(views, self.momentum, parts, tokens)
            queries, own_keys = [], []
            for images, small, texts in split:
                projections = learner.projections(images, small, texts)
                queries.append(learner.predict(projections))
                own_keys.append(learner.own_keys(projections))
        z = torch.cat(queries, 1).requires_grad_()
        outcome = learner.compute_loss(z, torch.cat(own_keys, 1) if learner.stop_gradient else keys, **of_images)
        with torch.autocast(self.device.type, enabled=False):
            outcome.terms.total.backward()
        assert z.grad is not None
        for number, ((images, small, texts), gradient) in enumerate(zip(split, z.grad.chunk(parts, 1)), 1):
            more = number < parts  # ranks reduce their gradients once per step, with the last part
            with self.module.no_sync() if more and isinstance(self.module, DDP) else contextlib.nullcontext():
                again = self.module(images, small, with_loss=False, tokens=texts)
                with torch.autocast(self.device.type, enabled=False):
                    again.backward(gradient.to(again.dtype))
        return outcome

    def _check_finite(self, loss: Tensor) -> None:
        """Set the flag on all ranks if the loss or a gradient is not finite on any of them."""
        gradients = [local(p.grad) for p in self.optimizer.parameters.values() if p.grad is not None]
        size = torch.stack([n.float() for n in torch._foreach_norm(gradients)]).sum() + loss.sum()
        bad = distributed.greatest((~torch.isfinite(size)).float().view(1))
        torch.maximum(torch.zeros_like(bad) if self.skipping else self.failed, bad, out=self.failed)
        self.steps_to_failure += 1 - self.failed

    def check(self) -> int | None:
        """Return None, or after how many good steps of this process the first one failed. Waits for the device."""
        return int(self.steps_to_failure.item()) if self.failed.item() else None

    def undo(self) -> None:
        """Forget all steps; what was compiled or captured stays."""
        self.sums.zero_()
        self.failed.zero_()
        self.steps_to_failure.zero_()
        self.count = 0
        for parameter in self.optimizer.parameters.values():
            if self._graph is None:
                parameter.grad = None

    def forget(self) -> None:
        """Don't count the step that failed."""
        self.failed.zero_()
        self.count -= 1

    def flush(self) -> dict[str, float]:
        """Return the means of the terms since the last flush. Waits for the device."""
        means = (self.sums / max(self.count, 1)).tolist()
        self.sums.zero_()
        self.count = 0
        return dict(zip(self.names, means))


def data_parallel(learner: Learner, device: torch.device) -> nn.Module:
    """Return the learner with gradients averaged over ranks; buffers are not broadcast.

    Prototypes and parameters of the objective are left out: `Step` averages their gradients itself, because a loss of a
    batch in parts, or of sharded networks, is computed outside of DDP's forward.
    """
    DDP._set_params_and_buffers_to_ignore_for_model(learner, list(learner.loss_parameters()))
    with warnings.catch_warnings():
        # Newer torch renamed the argument broadcast_buffers and changed its meaning at the start; both will do.
        warnings.simplefilter("ignore", FutureWarning)
        devices = [device.index] if device.type == "cuda" else None
        return DDP(learner, device_ids=devices, broadcast_buffers=False)


@contextlib.contextmanager
def restored_buffers(*modules: nn.Module | None):
    """Restore batch-norm statistics afterwards: the first of two passes over the same images must not count."""
    buffers = [b for m in modules if m is not None for b in m.buffers()]
    saved = [b.clone() for b in buffers]
    yield
    for buffer, old in zip(buffers, saved):
        buffer.copy_(old)
