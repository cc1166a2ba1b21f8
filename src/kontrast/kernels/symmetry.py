r"""Distance of the affinity matrix A_ij = <z_i, y_j> from symmetry, ||A - A^T||_F, without storing the matrix.

M rows of this rank, K rows of all ranks, D width.  With a_i = [z_i, -y_i] and b_j = [y_j, z_j], A_ij - A_ji = <a_i,
b_j>, so

    ||A - A^T||^2 = sum_ij <a_i, b_j>^2          from tiles: M K D work, memory linear in M + K
                  = <a^T a, b^T b>               closed form: (M + K) D^2 work
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kontrast.kernels.dense import in_torch_func

TILE = 1 << 20


def squared_asymmetry(
    z: Tensor, y: Tensor, all_z: Tensor | None = None, all_y: Tensor | None = None, *, method: str = "auto"
) -> Tensor:
    """Return the sum over rows i of z, y [M,D] and rows j of all_z, all_y [K,D] of (A_ij - A_ji)^2.

    `all_z` and `all_y` default to z and y. `method` is `tiles`, `closed` or `auto`.
    """
    all_z, all_y = z if all_z is None else all_z, y if all_y is None else all_y
    # In float64: the two products nearly cancel if A is nearly symmetric, and the penalty makes it so.
    a = torch.cat([z, -y], dim=1).double()
    b = torch.cat([all_y, all_z], dim=1).double()
    (M, width), K = a.shape, b.shape[0]
    if method == "auto":
        # The closed form loses more digits than the tiles do; float64 has enough of them only for float32 rows.
        fewer = width * (M + K) < M * K
        method = "closed" if fewer and z.dtype != torch.float64 else "tiles"
    if method == "closed":
        squared = ((a.T @ a) * (b.T @ b)).sum()
    else:
        squared = (a @ b.T).square().sum() if in_torch_func() else _SquaredProduct.apply(a, b)
    # A sum below its own rounding error counts as zero, because its gradient would be noise of full length.
    rounding = 1e-30 if method == "tiles" else 1e-15
    size = a.detach().square().sum() * b.detach().square().sum()
    return torch.where(squared > rounding * size, squared, 0.0)


def root(squared: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the square root of a sum of squares, with gradient 0 at 0."""
    apart = squared > 0
    return torch.where(apart, torch.where(apart, squared, 1.0).sqrt(), 0.0).to(dtype)


class _SquaredProduct(torch.autograd.Function):
    """Compute sum_ij <a_i, b_j>^2 one block of rows at a time, forward and backward."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return torch.stack([(block @ b.T).square().sum() for block in a.split(max(1, TILE // len(b)))]).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        grad_a, grad_b = [], torch.zeros_like(b)
        for block in a.split(max(1, TILE // len(b))):
            slope = 2 * grads[0] * (block @ b.T)
            grad_a.append(slope @ b)
            grad_b.addmm_(slope.T, block)
        return torch.cat(grad_a), grad_b
