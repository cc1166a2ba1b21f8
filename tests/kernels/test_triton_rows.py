"""The Triton kernels, run on the CPU by Triton's interpreter."""

from pathlib import Path

import pytest
import torch

from kontrast.kernels import row_statistics

from support.interpreter import assert_tests_pass_interpreted

LONG = [pytest.param(cases, marks=pytest.mark.slow) for cases in ("two_way", "nearest")]


@pytest.mark.parametrize("cases", ["rows", "views", *LONG])
def test_in_the_interpreter(cases):
    assert_tests_pass_interpreted(Path(__file__).parents[1] / "support" / f"interpreted_{cases}.py")


def test_float64_is_refused():
    with pytest.raises(ValueError, match=r"implementation is 'triton'.*float64"):
        row_statistics(torch.zeros(4, 4, dtype=torch.float64), None, scale=1.0, implementation="triton")
