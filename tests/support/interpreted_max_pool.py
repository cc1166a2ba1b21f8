"""The max pooling kernels against torch's in Triton's interpreter; test_max_pool.py runs this file."""

import pytest
import torch

from support.max_pool_cases import CASES, assert_equals_torch


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_equal_torchs_max_pooling(case):
    from kontrast.networks.max_pool import forward, gradient

    torch.manual_seed(0)
    assert_equals_torch(case, "cpu", forward, gradient)
