"""The kernels of max pooling against torch's, under Triton's interpreter: run by test_max_pool.py."""

import pytest
import torch

from support.max_pool_cases import CASES, agree


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_are_torchs_max_pooling(case):
    from kontrast.networks.max_pool import forward, gradient

    torch.manual_seed(0)
    agree(case, "cpu", forward, gradient)
