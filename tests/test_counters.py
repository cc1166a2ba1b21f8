"""SplitMix64 in numpy and in torch gives the published numbers, and both give the same bits."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import torch

from kontrast.counters import GOLDEN, finalize_tensor, mix, mix_tensor, signed

FROM_STATE_ZERO = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_the_published_first_numbers():
    states = [GOLDEN * i % 2**64 for i in range(3)]
    assert mix(np.array(states, dtype=np.uint64)).tolist() == FROM_STATE_ZERO
    advanced = torch.tensor([signed(state + GOLDEN) for state in states])
    assert [x % 2**64 for x in finalize_tensor(advanced).tolist()] == FROM_STATE_ZERO


def test_numpy_and_torch_agree_at_the_edges_of_int64():
    values = [0, 1, -1, 123456789012345, -(2**63), 2**63 - 1]
    from_torch = [x % 2**64 for x in mix_tensor(torch.tensor(values)).tolist()]
    assert from_torch == mix(np.array([v % 2**64 for v in values], dtype=np.uint64)).tolist()


def test_the_module_does_not_import_torch():
    code = "import sys, kontrast.counters; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
