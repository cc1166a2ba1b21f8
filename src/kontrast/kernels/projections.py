r"""Sliced Wasserstein distance of a batch to a prior, and its random draws.

b rows, d width.  states [b,d], prior [b,d], directions [d,d] with orthonormal columns.

A draw depends on (seed, step) alone, by integer arithmetic on the device: all ranks draw the same numbers, a captured
graph draws new ones after its step tensor has changed, and a resumed run continues the sequence. Of the numbers of a
step, the directions take the first d^2, rounded up to an even number, and the prior takes those that follow.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from kontrast.counters import GOLDEN, finalize_tensor, signed
from kontrast.float64 import where_float64_is
from kontrast.kernels.dense import in_torch_func

PRIORS = ("hypersphere", "hypercube", "normal")
SHIFT = 1e-14


def uniform(count: int, seed: int, step: Tensor) -> Tensor:
    """Return `count` float64 numbers in [0,1), each a hash of its index, the step and the seed."""
    index = torch.arange(count, dtype=torch.int64, device=step.device)
    word = finalize_tensor(finalize_tensor(step + first_state(seed)) + index * signed(GOLDEN))
    return ((word >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def first_state(seed: int) -> int:
    """Return the state of the hash at step 0, an int64."""
    return signed(GOLDEN * (seed + 1))


def to_normal(numbers: Tensor) -> Tensor:
    """Turn pairs of uniform numbers [2n] into pairs of standard normal ones, by the Box-Muller transform."""
    length, turn = numbers.view(-1, 2).unbind(1)
    radius, angle = torch.sqrt(-2 * torch.log1p(-length)), 2 * math.pi * turn
    return (radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)).flatten()


def gaussian_and_prior(prior: str, b: int, d: int, seed: int, step: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a Gaussian matrix [d,d] and rows of the prior [b,d], float64.

    The prior is uniform on the unit sphere, uniform in the cube (-1,1)^d, or standard normal.
    """
    start = d * d + d * d % 2
    numbers = uniform(start + b * d + b * d % 2, seed, step)
    if prior == "hypercube":
        return to_normal(numbers[:start])[: d * d].view(d, d), 2 * numbers[start:][: b * d].view(b, d) - 1
    numbers = to_normal(numbers)
    rows = numbers[start:][: b * d].view(b, d)
    if prior == "hypersphere":
        rows = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return numbers[: d * d].view(d, d), rows


def directions_and_prior(
    prior: str, b: int, d: int, seed: int, step: Tensor, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Draw a random orthogonal matrix [d,d], uniform over rotations, and rows of the prior [b,d]."""
    gaussian, rows = draw(prior, b, d, seed, where_float64_is(step), dtype)
    return orthogonalize(gaussian).to(dtype).to(step.device), rows.to(dtype).to(step.device)


def unit_directions(count: int, d: int, seed: int, step: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draw independent directions [count,d], uniform on the unit sphere: the rows of that prior."""
    return draw("hypersphere", count, d, seed, where_float64_is(step), dtype)[1].to(dtype).to(step.device)


def draw(prior: str, b: int, d: int, seed: int, step: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Draw a Gaussian matrix [d,d] and rows of the prior [b,d], on a GPU by one kernel."""
    if step.is_cuda and not torch.compiler.is_compiling() and not in_torch_func():
        from kontrast.kernels.triton_projections import triton_gaussian_and_prior

        return triton_gaussian_and_prior(prior, b, d, seed, step, dtype)
    return gaussian_and_prior(prior, b, d, seed, step)


def orthogonalize(q: Tensor) -> Tensor:
    """Return Q of the QR decomposition of a square Gaussian matrix.

    It is computed by two rounds of Cholesky instead of `torch.linalg.qr`, which a CUDA graph can't capture. The shift,
    a share of the expected trace d^2, makes the first round safe for any draw; the second corrects its result. In tens
    of thousands of draws the columns were orthogonal to 1e-14. If the smallest singular value of a draw is only 1e-10
    (fewer than one in 10^8 draws), they are orthogonal to 1e-10 at d = 512.
    """
    d = q.shape[0]
    for shift in (SHIFT * d * d, 0.0):
        gram = q.T @ q
        if shift:
            gram.diagonal().add_(shift)
        factor = torch.linalg.cholesky_ex(gram).L
        q = torch.linalg.solve_triangular(factor.T, q, upper=True, left=False)
    return q


def sliced_wasserstein(states: Tensor, prior: Tensor, directions: Tensor) -> Tensor:
    """Return the mean squared difference of the sorted projections of states and prior; the prior gets no gradient."""
    if torch.compiler.is_compiling() or in_torch_func():
        return sliced_wasserstein_by_definition(states, prior, directions)
    return _SlicedWasserstein.apply(states, prior, directions)


def sliced_wasserstein_by_definition(states: Tensor, prior: Tensor, directions: Tensor) -> Tensor:
    """Compute the distance step by step, differentiated by autograd."""
    projected, target = states @ directions, prior.detach() @ directions
    return (projected.sort(dim=0).values - target.sort(dim=0).values).square().mean()


class _SlicedWasserstein(torch.autograd.Function):
    """The distance in few operations: called from Python on a GPU, each costs more time than its arithmetic."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, prior: Tensor, directions: Tensor) -> Tensor:
        b, d = states.shape
        projected = directions.T @ torch.cat([states, prior]).T
        ordered, order = projected.view(d, 2, b).sort(dim=2)
        ctx.save_for_backward(states, prior, directions, ordered, order)
        return mse_loss(ordered[:, 0], ordered[:, 1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        states, prior, directions, ordered, order = ctx.saved_tensors
        if torch.is_grad_enabled():  # with create_graph: the gradient will be differentiated again
            distance = sliced_wasserstein_by_definition(states, prior, directions)
            return *torch.autograd.grad(distance, states, grads[0], create_graph=True), None, None
        mean = 1  # the reduction, as a number
        slope = torch.ops.aten.mse_loss_backward(grads[0], ordered[:, 0], ordered[:, 1], mean)
        to_projected = torch.empty_like(slope).scatter_(1, order[:, 0], slope)
        return to_projected.T @ directions.T, None, None
