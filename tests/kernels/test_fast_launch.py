"""Launching compiled kernels by key: which arguments choose another variant, and what the variant is called with."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from kontrast.kernels import triton_fast_launch
from kontrast.kernels.triton_fast_launch import FastKernel


class MadeKernel:
    """Stands in for a `triton.jit` kernel (x, count, length, slope, BLOCK) whose `length` is not specialized."""

    arg_names = ("x", "count", "length", "slope", "BLOCK")

    def __init__(self):
        specialized = {"x", "count", "slope"}
        self.params = [
            SimpleNamespace(is_constexpr=name == "BLOCK", do_not_specialize=name not in specialized)
            for name in self.arg_names
        ]
        self.compiled, self.launched = 0, []
        self.ran = lambda: None

    def __getitem__(self, grid):
        def compile_and_launch(*arguments, **constants):
            self.compiled += 1
            self.ran()
            return {(*grid, 1, 1)[:3]: lambda *values: (self.launched.append(values), self.ran())}

        return compile_and_launch


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(triton_fast_launch, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # the device of CPU tensors
    kernel = MadeKernel()
    return kernel, FastKernel(kernel)


def test_it_launches_on_the_device_of_its_tensors(made, monkeypatch):
    """Triton itself launches on the current device, which may be another one."""
    kernel, fast = made
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    current, during = [0], []

    @contextlib.contextmanager
    def device(index):
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(kernel, "ran", lambda: during.append(current[-1]), raising=False)
    for _ in range(2):  # compiled, and known
        fast[(4,)](torch.zeros(8), 8, 8, 0.5, BLOCK=16)
    assert during == [-1, -1] and current == [0] and kernel.compiled == 1


def test_a_known_variant_is_launched_with_addresses_and_constants_in_the_kernels_order(made):
    kernel, fast = made
    x = torch.zeros(8)
    for slope in (0.5, 0.25):  # numbers with a fraction are never specialized
        fast[(4,)](x, 8, 8, slope, num_warps=4, BLOCK=16)
    assert kernel.compiled == 1
    assert kernel.launched == [(x.data_ptr(), 8, 8, 0.25, 16)]


@pytest.mark.parametrize(
    ("change", "compiled"),
    [
        ({"x": torch.zeros(8, dtype=torch.float64)}, 2),
        ({"x": torch.zeros(9)[1:]}, 2),  # not aligned to 16 bytes
        ({"x": torch.nn.Parameter(torch.zeros(8))}, 2),
        ({"count": 9}, 2),
        ({"length": 9}, 1),
        ({"slope": 1}, 2),  # a whole number has another type
        ({"BLOCK": 32}, 2),
        ({"num_warps": 8}, 2),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else str(value),
)
def test_another_variant_is_compiled_for_what_triton_specializes(made, change, compiled):
    kernel, fast = made
    usual = {"x": torch.zeros(8), "count": 8, "length": 8, "slope": 0.5, "BLOCK": 16, "num_warps": 4}
    for given in (usual, usual | change):
        positional = [given[name] for name in ("x", "count", "length", "slope")]
        fast[(4,)](*positional, BLOCK=given["BLOCK"], num_warps=given["num_warps"])
    assert kernel.compiled == compiled


def test_each_device_has_its_own_variant(made, monkeypatch):
    kernel, fast = made
    for device in (0, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        monkeypatch.setattr(torch.Tensor, "get_device", lambda _, device=device: device)
        fast[(4,)](torch.zeros(8), 8, 8, 0.5, BLOCK=16)
    assert kernel.compiled == 2
