"""A device for tests that computes on the CPU, has no float64 and refuses to mix its tensors with those of the CPU.

It stands in for Apple's GPU, which no test machine has. A process must register it before its first backward pass, so
checks on it run in a process of their own: `python stand_in_device.py` runs all.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from kontrast.config.recipe_files import resolve
from kontrast.data import ImageSet
from kontrast.objectives import OBJECTIVES
from kontrast.training.build import build_learner, build_views, facts_of, optimizer_of
from kontrast.training.step import Step
from kontrast.training.step_schedule import Position, schedule_of
from kontrast.views import Views, keys

from support.objective_inputs import possible_inputs, small_objective

NAME = "standin"


class OnDevice(torch.Tensor):
    """A tensor on the device; `inside` is where its numbers are."""

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> OnDevice:
        assert inside.dtype != torch.float64, "a float64 tensor was made on a device that has none"
        made = torch.Tensor._make_wrapper_subclass(
            cls, inside.size(), strides=inside.stride(), storage_offset=inside.storage_offset(), dtype=inside.dtype,
            layout=inside.layout, device=torch.device(NAME, 0), requires_grad=inside.requires_grad,
        )  # fmt: skip
        made.inside = inside.detach()
        return made

    def __repr__(self) -> str:
        return f"OnDevice({self.inside!r})"

    def tolist(self) -> object:  # torch's own does not know tensors of other kinds
        return self.inside.tolist()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


def run(function, args, kwargs):
    """Run an operation on the tensors inside, and wrap what it returns, unless it moves a tensor to the CPU."""
    target = kwargs.get("device")
    leaves = pytree.tree_leaves((args, kwargs))
    mine = [x for x in leaves if isinstance(x, OnDevice)]
    moves = function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
    for x in leaves:
        if isinstance(x, torch.Tensor) and not isinstance(x, OnDevice) and mine and not moves:
            assert x.ndim == 0, f"{function} mixes a tensor of the CPU {list(x.shape)} with those of the device"
    here = torch.device(target).type == NAME if target is not None else bool(mine)
    unwrap = lambda x: x.inside if isinstance(x, OnDevice) else x  # noqa: E731
    args, kwargs = pytree.tree_map(unwrap, (args, kwargs))
    if target is not None:
        kwargs["device"] = torch.device("cpu")
    out = function(*args, **kwargs)
    if not function._schema.returns:
        return None
    if function._schema.is_mutable and mine:
        return mine[0] if isinstance(leaves[0], OnDevice) else leaves[0]
    return pytree.tree_map(lambda x: OnDevice(x) if here and isinstance(x, torch.Tensor) else x, out)


class Factory(torch.utils._python_dispatch.TorchDispatchMode):
    """Makes new tensors on the device, and moves others there."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        target = kwargs.get("device")
        if target is not None and torch.device(target).type == NAME:
            return run(function, args, kwargs)
        return function(*args, **kwargs)


class Module(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


@contextlib.contextmanager
def stand_in() -> Iterator[torch.device]:
    """Register the device, and let kontrast know that it has no float64."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    made = torch.tensor

    def tensor(*arguments, device=None, **named):  # it makes tensors without asking the device
        there = device is not None and torch.device(device).type == NAME
        return made(*arguments, **named).to(device) if there else made(*arguments, device=device, **named)

    without = mock.patch("kontrast.float64.WITHOUT_FLOAT64", {NAME})
    # Otherwise a module that moves would assign `.data`, which does not change what is inside a tensor.
    torch.__future__.set_swap_module_params_on_conversion(True)
    with without, mock.patch("torch.tensor", tensor), Factory():
        yield torch.device(NAME, 0)


def check_objective(name: str, device: torch.device) -> None:
    """Value and gradient are those of the CPU."""
    z = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    inputs = possible_inputs(name, z)[0]
    own = z.clone().requires_grad_()
    value = small_objective(name, z)(own, **inputs)
    value.backward()
    there = z.to(device).requires_grad_()
    moved = small_objective(name, z).to(device)(there, **{key: x.to(device) for key, x in inputs.items()})
    moved.backward()
    assert moved.device.type == NAME
    torch.testing.assert_close(moved.detach().cpu(), value.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(there.grad.cpu(), own.grad, rtol=1e-4, atol=1e-6)


def check_views(device: torch.device) -> None:
    """They are the same pictures."""
    images = torch.randint(0, 256, (3, 3, 24, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    views, drawn = Views("simclr", 2, 16, local_count=1, local_size=8), keys(0, 0, torch.arange(3))
    for sizes in (None, torch.tensor([[20, 24], [24, 18], [10, 9]])):
        expected = views(images, drawn, sizes)
        made = views(images.to(device), drawn.to(device), None if sizes is None else sizes.to(device))
        for mine, theirs in zip(made, expected):
            assert mine.device.type == NAME
            torch.testing.assert_close(mine.cpu(), theirs)


STEPS = 2
TRAININGS = {
    "nt-xent, sgd": ["quickstart"],
    "byol, lars": ["digits/byol", "training.optimizer=lars"],
    "swav, adamw": ["digits/swav", "training.optimizer=adamw", "prototypes.count=8"],
}
"""Recipes whose first steps are compared, with settings."""


def trained(recipe: list[str], device: torch.device) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers after some steps on noise, whose pixels all differ: a flat area has one
    activation, and if that is nearly zero, rounding decides about the gradient of the whole area."""
    small = ["encoder.width=16", "training.batch=8", "views.count=2", "training.warmup=0"]
    settings, generator = resolve(recipe[0], [*small, *recipe[1:]]), torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8, generator=generator)
    images = ImageSet(pixels, [str(i) for i in range(8)])
    torch.manual_seed(0)
    learner = build_learner(settings, device=device, **facts_of(images))
    step = Step(learner, optimizer_of(settings, learner), build_views(settings, torch.float32), device=device)
    for number in range(STEPS):
        position, index = Position(number, 10, 1), torch.arange(8)
        step(pixels.to(device), keys(0, number, index).to(device), schedule_of(settings, position))
    return {name: x.detach().cpu().clone() for name, x in learner.state_dict().items()}


def check_training(recipe: list[str], device: torch.device) -> None:
    """Steps of training end with the weights of the CPU."""
    expected = trained(recipe, torch.device("cpu"))
    for name, made in trained(recipe, device).items():
        torch.testing.assert_close(made, expected[name], rtol=1e-3, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def check_refusals(device: torch.device) -> None:
    """The device notices what these checks are for."""
    x = torch.ones(3).to(device)
    for wrong in (x.double, lambda: x + torch.ones(3)):
        try:
            wrong()
        except AssertionError:
            continue
        raise AssertionError("the device has float64, or mixes its tensors with those of the CPU")


def main() -> int:
    """Run all checks and print what fails."""
    torch.set_num_threads(1)
    failed = 0
    with stand_in() as device:
        checks: list[tuple[str, Callable[[], None]]] = [
            ("refusals", partial(check_refusals, device)),
            ("views", partial(check_views, device)),
            *((name, partial(check_objective, name, device)) for name in OBJECTIVES),
            *((name, partial(check_training, recipe, device)) for name, recipe in TRAININGS.items()),
        ]
        for name, check in checks:
            try:
                check()
            except Exception:
                print(f"{name} failed:\n{traceback.format_exc(limit=-4)[:2000]}")
                failed += 1
    print(f"{len(checks)} checks, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
