r"""Distance of the affinity matrix A_ij = <z_i, y_j> from symmetry, ||A - A^T||_F, without storing a large matrix.

M rows of this rank, K rows of all ranks, D width.  z, y [M,D], all_z, all_y [K,D].  With a_i = [z_i, -y_i] and b_j =
[y_j, z_j], A_ij - A_ji = <a_i, b_j>, so

    ||A - A^T||^2 = sum_ij <a_i, b_j>^2          from tiles: M K D work, memory linear in M + K
                  = <a^T a, b^T b>               closed form: (M + K) D^2 work

All of it is in float64: the two products nearly cancel if A is nearly symmetric, and the penalty makes it so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kontrast.float64 import where_float64_is
from kontrast.kernels.covariance import Total, identity
from kontrast.kernels.dense import in_torch_func

TILE = 1 << 20
ROUNDING = {"tiles": 1e-30, "closed": 1e-15}
"""A square of the norm below this share of |a|^2 |b|^2 counts as zero, because its gradient would be noise of full
length."""


def asymmetry(
    z: Tensor, y: Tensor, all_z: Tensor | None = None, all_y: Tensor | None = None, *,
    total: Total = identity, method: str = "auto",
) -> Tensor:  # fmt: skip
    """Return ||A - A^T||_F over all ranks; its gradient is 0 if A is symmetric.

    `all_z` and `all_y` are the rows of all ranks, z and y by default, and `total` sums a tensor over ranks. `method` is
    `tiles`, `closed` or `auto`.
    """
    if method == "auto":
        method = faster_method(z, len(z if all_z is None else all_z))
    device, z, y = z.device, where_float64_is(z), where_float64_is(y)
    all_z, all_y = (None if x is None else where_float64_is(x) for x in (all_z, all_y))
    if torch.compiler.is_compiling() or in_torch_func():
        return asymmetry_by_definition(z, y, all_z, all_y, total, method).to(device)
    return _Asymmetry.apply(z, y, all_z, all_y, total, method).to(device)


def faster_method(z: Tensor, K: int) -> str:
    """Return the method with less work. The closed form loses more digits, which float32 rows don't need in float64."""
    M, D = z.shape[-2:]
    return "closed" if 2 * D * (M + K) < M * K and z.dtype != torch.float64 else "tiles"


def asymmetry_by_definition(
    z: Tensor, y: Tensor, all_z: Tensor | None, all_y: Tensor | None, total: Total, method: str
) -> Tensor:
    """Compute the norm from the whole matrix or by the closed form, differentiated by autograd."""
    a = torch.cat([z, -y], dim=1).double()
    b = torch.cat([y if all_y is None else all_y, z if all_z is None else all_z], dim=1).double()
    squared = ((a.T @ a) * (b.T @ b)).sum() if method == "closed" else (a @ b.T).square().sum()
    squared, size = total(torch.stack([squared, a.detach().square().sum() * b.detach().square().sum()]))
    apart = squared > ROUNDING[method] * size
    return torch.where(apart, torch.where(apart, squared, 1.0).sqrt(), 0.0).to(z.dtype)


class _Asymmetry(torch.autograd.Function):
    """The norm in few operations: called from Python on a GPU, each costs more time than its arithmetic."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, y: Tensor, all_z: Tensor | None, all_y: Tensor | None, total: Total, method: str
    ) -> Tensor:
        own = torch.stack([z, y]).double()
        everyone = own if all_z is None or all_y is None else torch.stack([all_z, all_y]).double()
        norm, *kept = compute_norm(own, everyone, method)
        if all_z is not None:
            norm = total(norm.square()).sqrt()
        length = torch.linalg.vector_norm(everyone)
        symmetric = torch.addcmul(norm, length, length, value=-(ROUNDING[method] ** 0.5)) <= 0
        divisor = norm.masked_fill(symmetric, torch.inf)
        ctx.save_for_backward(z, y, all_z, all_y, divisor, *kept)
        ctx.arguments = total, method
        return norm.masked_fill(symmetric, 0.0).to(z.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, y, all_z, all_y, divisor, *kept = ctx.saved_tensors
        total, method = ctx.arguments
        if torch.is_grad_enabled():  # with create_graph: the gradient will be differentiated again
            inputs = [x for n, x in enumerate((z, y, all_z, all_y)) if ctx.needs_input_grad[n]]
            norm = asymmetry_by_definition(z, y, all_z, all_y, total, method)
            found = iter(torch.autograd.grad(norm, inputs, grads[0], create_graph=True))
            return *(next(found) if needed else None for needed in ctx.needs_input_grad[:4]), None, None
        slope = total(grads[0]) / divisor
        own, everyone = compute_norm_gradients(slope, kept, method, alone=all_z is None)
        to_z, to_y = own.to(z.dtype)
        to_all_z, to_all_y = (None, None) if everyone is None else everyone.to(z.dtype)
        return to_z, to_y, to_all_z, to_all_y, None, None


def compute_norm(own: Tensor, everyone: Tensor, method: str) -> list[Tensor]:
    """Return the norm over the rows of this rank, z and y [2,M,D], and what the gradient needs; all in float64."""
    return closed_norm(own, everyone) if method == "closed" else tiled_norm(own, everyone)


def compute_norm_gradients(
    slope: Tensor, kept: list[Tensor], method: str, *, alone: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of own [2,M,D] and everyone [2,K,D]; the slope is d loss / d norm, divided by the norm."""
    return (closed_gradients if method == "closed" else tiled_gradients)(slope, *kept, alone=alone)


def tiled_norm(own: Tensor, everyone: Tensor) -> list[Tensor]:
    blocks = own.split(block_rows(everyone), dim=1)
    if len(blocks) == 1:
        gap = antisymmetric_part(own, everyone)
        return [torch.linalg.vector_norm(gap), own, everyone, gap]
    norms = [torch.linalg.vector_norm(antisymmetric_part(block, everyone)) for block in blocks]
    return [torch.linalg.vector_norm(torch.stack(norms)), own, everyone]


def tiled_gradients(
    slope: Tensor, own: Tensor, everyone: Tensor, gap: Tensor | None = None, *, alone: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients; a single block of the matrix was kept as `gap`."""
    to_own, to_everyone = torch.empty_like(own), None if alone else torch.zeros_like(everyone)
    twice = 2.0 if alone else 1.0  # alone, the rows are those of all ranks too, with the same gradient in both roles
    size = block_rows(everyone)
    for block, to_block in zip(own.split(size, dim=1), to_own.split(size, dim=1)):
        weights = (antisymmetric_part(block, everyone) if gap is None else gap) * slope
        to_block[0].addmm_(weights, everyone[1], beta=0, alpha=twice)
        to_block[1].addmm_(weights, everyone[0], beta=0, alpha=-twice)
        if to_everyone is not None:
            to_everyone[0].addmm_(weights.T, block[1], alpha=-1)
            to_everyone[1].addmm_(weights.T, block[0])
    return to_own, to_everyone


def antisymmetric_part(block: Tensor, everyone: Tensor) -> Tensor:
    """Return A_ij - A_ji for the rows i of a block and all j."""
    return (block[0] @ everyone[1].T).addmm_(block[1], everyone[0].T, alpha=-1)


def block_rows(everyone: Tensor) -> int:
    return max(1, TILE // everyone.shape[1])


def closed_norm(own: Tensor, everyone: Tensor) -> list[Tensor]:
    a = torch.cat([own[0], own[1]], dim=1)
    b = torch.cat([everyone[1], -everyone[0]], dim=1)
    a_products, b_products = a.T @ a, b.T @ b
    # Rounding may make the sum negative.
    norm = (a_products * b_products).sum().clamp(min=0).sqrt()
    return [norm, a, b, a_products, b_products]


def closed_gradients(
    slope: Tensor, a: Tensor, b: Tensor, a_products: Tensor, b_products: Tensor, *, alone: bool
) -> tuple[Tensor, Tensor | None]:
    D = a.shape[1] // 2
    to_a = a @ b_products.mul(2 * slope if alone else slope)
    to_own = to_a.view(-1, 2, D).transpose(0, 1)
    if alone:
        return to_own, None
    to_y, to_minus_z = (b @ (a_products * slope)).split(D, dim=1)
    return to_own, torch.stack([-to_minus_z, to_y])
