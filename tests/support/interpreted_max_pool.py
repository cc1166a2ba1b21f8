"""The max pooling kernels against torch's in Triton's interpreter; test_max_pool.py runs this file."""

import math

import pytest
import torch

from support.max_pool_cases import CASES, assert_equals_torch

SMALL = [case for case in CASES if math.prod(CASES[case][0]) < 1000] + ["ties", "not a number"]
"""The interpreter takes seconds for the larger ones, which run on a GPU."""


@pytest.mark.parametrize("case", SMALL)
def test_the_kernels_equal_torchs_max_pooling(case):
    from kontrast.networks.max_pool import forward, gradient

    torch.manual_seed(0)
    assert_equals_torch(case, "cpu", forward, gradient)
