"""The loss of two views of a small batch on the CPU: few operations, since each costs as much as its arithmetic.

B images, D width, M = 2 B rows.  z [2,B,D], or z and z2 [B,D];  matrix of exponentials e_ij = exp(a s_ij) [M,M].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kontrast.kernels.row_loss import LSE, RowLoss
from kontrast.kernels.stored_batch import LARGEST
from kontrast.kernels.tiled import SAFE_EXPONENT
from kontrast.kernels.two_view_definition import differentiable_gradients
from kontrast.kernels.view_links import ALL


def fits_stored_loss(z: Tensor, loss: RowLoss) -> bool:
    """Return whether the exponentials of the pairs are few, and so small that they can be added up as they are."""
    usual = z.dtype in (torch.float32, torch.float64) and loss.kind == ALL and loss.repulsion == LSE
    few = (2 * z.shape[-2]) ** 2 <= LARGEST
    return usual and few and not loss.asymmetry and abs(loss.scales[0]) <= SAFE_EXPONENT


class StoredLossFunction(torch.autograd.Function):
    """The mean over all rows of `push * lse - pull * s`."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, z2: Tensor | None, loss: RowLoss) -> Tensor:
        rows = z.reshape(-1, z.shape[-1]) if z2 is None else torch.cat([z, z2])
        B = len(rows) // 2
        norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        # Rows that are too short stay as they are; adding zero times a length turns infinity into NaN.
        norm = torch.nn.functional.threshold(norm, loss.shortest, 1.0)
        norm = torch.add(norm, norm, alpha=0)
        units = rows / norm
        matrix = torch.addmm(units.new_empty(1), units, units.T, beta=0, alpha=loss.scales[0]).exp_()
        if loss.positive:
            matrix.fill_diagonal_(0)
        else:
            matrix.view(2, B, 2, B).diagonal(dim1=1, dim2=3).zero_()
        total = matrix.sum(-1)
        ctx.loss = loss
        ctx.save_for_backward(z, z2, units, norm, matrix, total)
        s = (units[:B] * units[B:]).sum()
        return torch.sub(total.log().mean() * loss.push, s, alpha=loss.pull / B)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        z, z2, units, norm, matrix, total = ctx.saved_tensors
        loss, M = ctx.loss, len(units)
        if torch.is_grad_enabled():  # with create_graph: the gradient will be differentiated again
            return *differentiable_gradients(loss, z, z2, grads[0], ctx.needs_input_grad), None
        grad = grads[0].item()
        share = (grad * loss.push * loss.scales[0] / M) / total
        p = (share[:, None] + share).mul_(matrix)
        others = units.view(2, M // 2, -1).flip(0).view_as(units)
        found = torch.addmm(others, p, units, beta=-2 * grad * loss.pull / M)
        # What goes along a row does not change its direction. For a row that stayed as it is, this part is below
        # rounding.
        found = found.addcmul_(units, (units * found).sum(-1, keepdim=True), value=-1).div_(norm)
        return (found.view_as(z), None, None) if z2 is None else (found[: M // 2], found[M // 2 :], None)
