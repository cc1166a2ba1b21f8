"""Max pooling: torch's on the CPU, and our kernels in compiled programs on a GPU, which must equal it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from kontrast.networks.max_pool import MaxPool, forward, gradient

from support.interpreter import assert_tests_pass_interpreted
from support.max_pool_cases import CASES, assert_equals_torch


@pytest.mark.slow
def test_the_kernels_in_tritons_interpreter():
    assert_tests_pass_interpreted(Path(__file__).parents[1] / "support" / "interpreted_max_pool.py")


def test_on_the_cpu_it_equals_torchs():
    x = torch.randn(2, 3, 9, 9)
    assert torch.equal(MaxPool(3, 2)(x), nn.MaxPool2d(3, 2)(x))


@pytest.mark.gpu
@pytest.mark.parametrize("case", sorted(CASES.keys() - {"minus infinity"}))
def test_the_kernels_on_the_device_equal_torchs(case):
    """Except for windows of minus infinity, whose gradient torch places differently on each device."""
    assert_equals_torch(case, "cuda", forward, gradient)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_it_equals_torchs(dtype):
    """In a network of convolutions, with gradients: the compiler chooses the memory layouts."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), MaxPool(3, 2), nn.Conv2d(16, 8, 3), MaxPool(3, 2, 1)]
    network = nn.Sequential(*layers).cuda().to(dtype, memory_format=torch.channels_last)
    x = torch.randn(4, 3, 32, 32, device="cuda", dtype=dtype).to(memory_format=torch.channels_last)
    found = []
    for run in (network, torch.compile(network)):
        network.zero_grad()
        y = run(x)
        y.float().square().sum().backward()
        found.append([y.detach(), *(p.grad.clone() for p in network.parameters())])
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for plain, compiled in zip(*found):
        assert (plain - compiled).norm() <= tolerance * plain.norm()
