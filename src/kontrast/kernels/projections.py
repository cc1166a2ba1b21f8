r"""Sliced Wasserstein distance of a batch to a prior, and its random draws.

b rows, d width.  states [b,d], prior [b,d], directions [d,d] with orthonormal columns.

A draw depends on (seed, step, stream) alone, by integer arithmetic on the device: all ranks draw the same numbers, a
captured graph draws new ones after its step tensor has changed, and a resumed run continues the sequence.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kontrast.counters import GOLDEN, finalize_tensor, signed

PRIORS = ("hypersphere", "hypercube", "normal")


def uniform(count: int, seed: int, step: Tensor, stream: int) -> Tensor:
    """Return `count` float64 numbers in [0,1), each a hash of its index, the step, the stream and the seed."""
    index = torch.arange(count, dtype=torch.int64, device=step.device)
    start = finalize_tensor(finalize_tensor(step + signed(GOLDEN * (seed + 1))) + stream)
    word = finalize_tensor(start + index * signed(GOLDEN))
    return ((word >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def gaussian(rows: int, columns: int, seed: int, step: Tensor, stream: int) -> Tensor:
    """Return standard normal numbers [rows, columns], float64, by the Box-Muller transform."""
    count = rows * columns
    first, second = uniform(2 * count, seed, step, stream).view(2, rows, columns)
    return torch.sqrt(-2 * torch.log1p(-first)) * torch.cos(2 * math.pi * second)


def orthogonal_directions(d: int, seed: int, step: Tensor) -> Tensor:
    """Return a random orthogonal matrix [d,d], uniform over rotations: Q of the QR decomposition of a Gaussian matrix.

    Q is computed by three rounds of Cholesky instead of `torch.linalg.qr`, which a CUDA graph can't capture. The shift
    in the first round makes it safe for any Gaussian draw.
    """
    q = gaussian(d, d, seed, step, stream=0)
    identity = torch.eye(d, dtype=q.dtype, device=q.device)
    for shift in (1e-13 * d, 0.0, 0.0):
        gram = q.T @ q
        factor = torch.linalg.cholesky_ex(gram + shift * gram.diagonal().sum() * identity).L
        q = torch.linalg.solve_triangular(factor.T, q, upper=True, left=False)
    return q


def prior_rows(prior: str, b: int, d: int, seed: int, step: Tensor) -> Tensor:
    """Draw [b,d] from the prior: uniform on the unit sphere, uniform in the cube (-1,1)^d, or standard normal."""
    if prior == "hypercube":
        return 2 * uniform(b * d, seed, step, stream=1).view(b, d) - 1
    rows = gaussian(b, d, seed, step, stream=1)
    return rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True) if prior == "hypersphere" else rows


def sliced_wasserstein(states: Tensor, prior: Tensor, directions: Tensor) -> Tensor:
    """Return the mean squared difference of the sorted projections of states and prior; the prior gets no gradient."""
    projected, target = states @ directions, prior.detach() @ directions
    return (projected.sort(dim=0).values - target.sort(dim=0).values).square().mean()
