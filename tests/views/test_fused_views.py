"""The fused kernels equal the definition: through Triton's interpreter on any machine, and on a CUDA device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kontrast.views import Views, keys

from support.fused_cases import CASES, count_differing_draws, defined_and_fused

TOLERANCE = 1e-3  # for normalized views: the buffers between passes have 15 bits


@pytest.fixture(scope="module")
def interpreted():
    """Largest difference by case, from another process: Triton reads the variable when kernels are defined."""
    pytest.importorskip("triton")
    script = Path(__file__).parents[1] / "support" / "fused_cases.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_interpreted_draws_are_the_same_bits(interpreted):
    assert set(interpreted["draws"].values()) == {0}, interpreted["draws"]


@pytest.mark.parametrize("case", CASES)
def test_interpreted_views_equal_the_definition(interpreted, case):
    assert interpreted[case] < (TOLERANCE if "dtype" not in CASES[case][-1] else 4 * TOLERANCE)


@pytest.mark.gpu
def test_draws_on_the_device_are_the_same_bits():
    differing = count_differing_draws("cuda", 5000)
    assert set(differing.values()) == {0}, differing


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_views_on_the_device_equal_the_definition(case):
    defined, fused = defined_and_fused(case, "cuda", 16)
    assert (defined - fused).abs().max() < (TOLERANCE if "dtype" not in CASES[case][-1] else 4 * TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("policy, size", [("cacr-cifar", 32), ("moco-v3", 96)])
def test_views_in_a_captured_graph(policy, size):
    """A graph captured once and replayed on other images and keys gives the same views as no graph."""
    views = Views(policy, 2, size)
    images = torch.randint(0, 256, (8, 3, 64, 64), dtype=torch.uint8, device="cuda")
    indices = torch.arange(8, device="cuda")
    epoch = torch.zeros((), dtype=torch.int64, device="cuda")
    static = torch.zeros_like(images)
    views(static, keys(0, epoch, indices))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = views(static, keys(0, epoch, indices))
    static.copy_(images)
    epoch.fill_(7)
    made.fill_(float("nan"))
    graph.replay()
    assert torch.equal(made, views(images, keys(0, 7, indices)))
