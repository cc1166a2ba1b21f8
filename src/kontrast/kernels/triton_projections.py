"""`projections.gaussian_and_prior` as one Triton kernel with a program per row, equal to float32's rounding.

b rows, d width.  Needs Triton, so it is imported only for a CUDA device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kontrast import counters
from kontrast.kernels.projections import PRIORS, first_state
from kontrast.kernels.triton_fast_launch import FastKernel

GOLDEN = tl.constexpr(counters.GOLDEN)
FIRST = tl.constexpr(counters.FIRST_FACTOR)
SECOND = tl.constexpr(counters.SECOND_FACTOR)
HYPERSPHERE, HYPERCUBE = tl.constexpr(PRIORS.index("hypersphere")), tl.constexpr(PRIORS.index("hypercube"))


@triton.jit
def finalize(state):
    """Triton's own copy of `counters.finalize_tensor`: a kernel is compiled from its source and can't call that."""
    state = (state ^ (state >> 30)) * FIRST
    state = (state ^ (state >> 27)) * SECOND
    return state ^ (state >> 31)


@triton.jit
def uniform(start, index):
    word = finalize(start + index.to(tl.uint64) * GOLDEN)
    return (word >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53


@triton.jit
def normal(start, index):
    """Return the normal numbers at the indices. Box-Muller makes a pair of an even index and the next one."""
    odd = index % 2
    radius = tl.sqrt(-2.0 * tl.log(1.0 - uniform(start, index - odd)))
    angle = 6.283185307179586 * uniform(start, index - odd + 1)
    return radius * tl.where(odd == 1, tl.sin(angle), tl.cos(angle))


@FastKernel
@triton.jit(do_not_specialize=["first", "d"])
def draw_kernel(step, gaussian, prior, first, d, PRIOR: tl.constexpr, LANES: tl.constexpr):
    """Write row n of the Gaussian matrix for n < d, and row n - d of the prior for the others."""
    start = finalize((tl.load(step) + first).to(tl.uint64, bitcast=True))
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    inside = column < d
    if row < d:
        index = row * d + column
        tl.store(gaussian + index, normal(start, index), inside)
    else:
        place = (row - d) * d + column
        index = (d.to(tl.int64) * d + 1) // 2 * 2 + place
        if PRIOR == HYPERCUBE:
            numbers = 2 * uniform(start, index) - 1
        else:
            numbers = normal(start, index)
        if PRIOR == HYPERSPHERE:
            numbers /= tl.sqrt(tl.sum(tl.where(inside, numbers * numbers, 0.0)))
        tl.store(prior + place, numbers.to(prior.dtype.element_ty), inside)


def triton_gaussian_and_prior(
    prior: str, b: int, d: int, seed: int, step: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Draw a Gaussian matrix [d,d], float64, and rows of the prior [b,d] in the given type."""
    gaussian = torch.empty(d, d, dtype=torch.float64, device=step.device)
    rows = torch.empty(b, d, dtype=dtype, device=step.device)
    lanes = triton.next_power_of_2(d)
    draw_kernel[(d + b,)](
        step, gaussian, rows, first_state(seed), d, PRIOR=PRIORS.index(prior), LANES=lanes,
        num_warps=min(8, max(1, lanes // 64)),
    )  # fmt: skip
    return gaussian, rows
