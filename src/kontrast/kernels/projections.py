r"""Sorted projections: the sliced Wasserstein distance of a batch to a prior, and draws by a counter.

b rows, d width.  states [b,d], prior [b,d], directions [d,d] with orthonormal columns.

A draw depends on (seed, step, stream) alone, by integer arithmetic on the device: every rank draws the same, a captured
graph draws anew when its step tensor has moved on, and a resumed run draws what it would have drawn.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

PRIORS = ("hypersphere", "hypercube", "normal")


def uniform(count: int, seed: int, step: Tensor, stream: int) -> Tensor:
    """`count` float64 numbers in [0,1) from a counter: the splitmix64 mix of its number, step, stream and seed."""
    counter = torch.arange(count, dtype=torch.int64, device=step.device)
    x = _mix(_mix(step + _signed(0x9E3779B97F4A7C15 * (seed + 1))) + stream) + counter * _signed(0x9E3779B97F4A7C15)
    return ((_mix(x) >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def _signed(value: int) -> int:
    """A 64-bit pattern as torch's int64 has it."""
    return (value & (1 << 64) - 1) - (1 << 64 if value & 1 << 63 else 0)


def _mix(x: Tensor) -> Tensor:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & (1 << (64 - shift)) - 1)) * _signed(factor)
    return x ^ ((x >> 31) & (1 << 33) - 1)


def gaussian(rows: int, columns: int, seed: int, step: Tensor, stream: int) -> Tensor:
    """Standard normal numbers [rows, columns], float64, by Box and Muller."""
    count = rows * columns
    first, second = uniform(2 * count, seed, step, stream).view(2, rows, columns)
    return torch.sqrt(-2 * torch.log1p(-first)) * torch.cos(2 * math.pi * second)


def orthogonal_directions(d: int, seed: int, step: Tensor) -> Tensor:
    """A random orthogonal matrix [d,d], uniform over rotations: the Q of a Gaussian's QR with positive diagonal.

    Q by Cholesky three times, the first with a shift, rather than by `torch.linalg.qr`, which a CUDA graph can't
    capture; the shift makes it safe for any Gaussian draw.
    """
    q = gaussian(d, d, seed, step, stream=0)
    identity = torch.eye(d, dtype=q.dtype, device=q.device)
    for shift in (1e-13 * d, 0.0, 0.0):
        gram = q.T @ q
        factor = torch.linalg.cholesky_ex(gram + shift * gram.diagonal().sum() * identity).L
        q = torch.linalg.solve_triangular(factor.T, q, upper=True, left=False)
    return q


def prior_rows(prior: str, b: int, d: int, seed: int, step: Tensor) -> Tensor:
    """Draws [b,d] of the prior: uniform on the unit sphere, uniform in the cube (-1,1)^d, or standard normal."""
    if prior == "hypercube":
        return 2 * uniform(b * d, seed, step, stream=1).view(b, d) - 1
    rows = gaussian(b, d, seed, step, stream=1)
    return rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True) if prior == "hypersphere" else rows


def sliced_wasserstein(states: Tensor, prior: Tensor, directions: Tensor) -> Tensor:
    """Mean over rows and directions of the squared difference of sorted projections; no gradient to the prior."""
    projected, aimed = states @ directions, prior.detach() @ directions
    return (projected.sort(dim=0).values - aimed.sort(dim=0).values).square().mean()
