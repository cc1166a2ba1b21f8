"""The Triton kernels, run on the CPU by Triton's interpreter."""

from pathlib import Path

import pytest
import torch

from kontrast.kernels import row_statistics

from support.interpreter import assert_tests_pass_interpreted


def interpreted(cases: str) -> Path:
    return Path(__file__).parents[1] / "support" / f"interpreted_{cases}.py"


def test_in_the_interpreter():
    """Each kernel and each variant of it at least once, at odd shapes."""
    assert_tests_pass_interpreted(interpreted("rows"), interpreted("views"))


@pytest.mark.slow
@pytest.mark.parametrize("cases", ["rows", "views", "two_way", "nearest"])
def test_more_cases_in_the_interpreter(cases):
    assert_tests_pass_interpreted(interpreted(cases), marks="slow" if cases in ("rows", "views") else "")


def test_float64_is_refused():
    with pytest.raises(ValueError, match=r"implementation is 'triton'.*float64"):
        row_statistics(torch.zeros(4, 4, dtype=torch.float64), None, scale=1.0, implementation="triton")
