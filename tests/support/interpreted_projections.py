"""SWD's draws in Triton equal those in torch, in Triton's interpreter; test_projections.py runs this file."""

import pytest
import torch

from kontrast.kernels.projections import PRIORS, gaussian_and_prior

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize(("b", "d", "seed", "step"), [(6, 4, 0, 0), (5, 3, 7, 1), (2, 17, 2**40, 10**6), (2, 1, 1, 5)])
def test_equal_to_torch(prior, b, d, seed, step):
    from kontrast.kernels.triton_projections import triton_gaussian_and_prior

    counter = torch.tensor(step)
    expected = gaussian_and_prior(prior, b, d, seed, counter)
    found = triton_gaussian_and_prior(prior, b, d, seed, counter, torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    rounded = triton_gaussian_and_prior(prior, b, d, seed, counter, torch.float32)[1]
    torch.testing.assert_close(rounded, expected[1].float())
