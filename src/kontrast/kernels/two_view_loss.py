"""The loss of two views in one autograd function: little more than the launches, or the arithmetic on the CPU, is left.

B images, D width, P rows of each image, S scales.  z [2,B,D], or z and z2 [B,D];  similarity [B], statistics [S,P,B],
ids [2B].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kontrast.kernels.dense import in_torch_func
from kontrast.kernels.row_loss import DEBIASED, LSE, MEAN, RowLoss
from kontrast.kernels.small_batch import are_few_pairs, compute_gradients, compute_statistics
from kontrast.kernels.stored_loss import StoredLossFunction, fits_stored_loss
from kontrast.kernels.symmetry import ROUNDING, compute_norm, compute_norm_gradients, faster_method
from kontrast.kernels.two_view_definition import differentiable_gradients, statistics_arguments
from kontrast.kernels.unit_rows import by_triton
from kontrast.kernels.view_links import ALL, SAME


def fits_two_view_loss(z: Any, z2: Any) -> bool:
    """Return whether the inputs are two views of a type that one function can take; anything unusual is not."""
    if not isinstance(z, Tensor) or z.ndim != (3 if z2 is None else 2) or not (by_triton(z) or z.device.type == "cpu"):
        return False
    if torch.compiler.is_compiling() or in_torch_func():
        return False
    if z2 is not None:
        same = isinstance(z2, Tensor) and z.shape == z2.shape and z.dtype == z2.dtype and z.device == z2.device
    else:
        same = z.shape[0] == 2
    B, D = z.shape[-2:]
    return same and B > 1 and D > 0 and z.is_floating_point()


def computes(loss: RowLoss, z: Tensor) -> bool:
    """Return whether this module computes the loss: of large batches only an lse over all rows, of few on the CPU."""
    B = z.shape[-2]
    if not by_triton(z):
        return fits_stored_loss(z, loss)
    return are_few_pairs(2 * B, 2 * B) or (loss.kind == ALL and loss.repulsion == LSE)


def two_view_loss(z: Tensor, z2: Tensor | None, loss: RowLoss) -> Tensor:
    """Return the loss, a scalar, of the normalized rows."""
    function = TwoViewLossFunction if by_triton(z) else StoredLossFunction
    return function.apply(z, z2, loss)


class TwoViewLossFunction(torch.autograd.Function):
    """One launch normalizes the rows, one computes the losses of a small batch; backward, one each for the same."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, z2: Tensor | None, loss: RowLoss) -> Tensor:
        from kontrast.kernels.triton_unit_launch import triton_unit_forward

        z, z2 = z.contiguous(), None if z2 is None else z2.contiguous()
        M = 2 * z.shape[-2]
        ctx.small = are_few_pairs(M, M)
        ids = None if ctx.small else z.new_empty(M, dtype=torch.int64)
        units, _, similarities = triton_unit_forward(z, None, True, z2, loss.shortest, ids)
        mean = slopes = matrix = None
        if ids is None:
            arguments = statistics_arguments(loss)
            lse, mean, rows, slopes, matrix = compute_statistics(units, None, arguments, similarities, loss)
        else:
            lse, rows = large_statistics(units, similarities, ids, loss)
        value = rows.mean()
        kept: list[Tensor] = []
        if loss.asymmetry:
            norm, *kept = asymmetry_norm(z, z2, loss.shortest)
            value = value.add(norm, alpha=loss.asymmetry)
        ctx.loss = loss
        ctx.save_for_backward(z, z2, units, similarities, lse, mean, slopes, matrix, ids, *kept)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from kontrast.kernels.triton_unit_launch import LinkGradients, triton_unit_backward

        z, z2, units, similarities, lse, mean, slopes, matrix, ids, *kept = ctx.saved_tensors
        loss, arguments = ctx.loss, statistics_arguments(ctx.loss)
        if torch.is_grad_enabled():  # with create_graph: the gradient will be differentiated again
            return *differentiable_gradients(ctx.loss, z, z2, grads[0], ctx.needs_input_grad), None
        # d loss / d row, a scalar that the kernels read with strides of zero.
        each = grads[0] * (loss.push / lse[0].numel())
        of_row = each.expand(lse.shape)
        to_lse, to_mean, pull = of_row, None, loss.pull / loss.push
        if loss.repulsion == DEBIASED:
            to_slopes = slopes * each
            to_lse, of_row, pull = to_slopes[:2], to_slopes[2:], -pull
        elif loss.repulsion == MEAN:
            to_lse, to_mean = None, of_row
        if ctx.small:
            units_grad, _ = compute_gradients((to_lse, to_mean), units, None, lse, mean, matrix, arguments, True, False)
        else:
            units_grad = large_gradient(of_row, units, lse, ids, loss)
        assert units_grad is not None
        if loss.asymmetry:
            units_grad = asymmetry_gradient(grads[0], kept, loss.asymmetry).add_(units_grad)
        # The positive of a row is the other view, also of a row that is compared with its own view.
        kind = ALL if loss.kind == SAME else loss.kind
        links = LinkGradients(
            similarities, lse[0], of_row[0] if loss.positive else None, of_row[0], loss.scales[0], pull, kind
        )
        found = triton_unit_backward(z, None, units_grad, None, True, links, z2, loss.shortest)
        return (found, None, None) if z2 is None else (found[0], found[1], None)


def large_statistics(units: Tensor, similarities: Tensor, ids: Tensor, loss: RowLoss) -> tuple[Tensor, Tensor]:
    """Return the lse [1,2,B] of each row over all rows of other images, and the loss of each row [2,B].

    If the positive counts in the lse, it is included.
    """
    from kontrast.kernels.triton_launch import triton_forward
    from kontrast.kernels.triton_row_losses import triton_row_losses

    lse, _ = triton_forward(units.flatten(0, 1), None, ids, None, loss.scales, False, unit=True)
    losses = triton_row_losses(lse.view(units.shape[:2]), similarities, loss)
    return lse.view(1, *units.shape[:2]), losses


def large_gradient(grad_lse: Tensor, units: Tensor, lse: Tensor, ids: Tensor, loss: RowLoss) -> Tensor:
    """Return the gradient of the unit rows through the pairs of different images."""
    from kontrast.kernels.triton_launch import triton_backward

    rows, grad_lse, lse = units.flatten(0, 1), grad_lse.flatten(1), lse.flatten(1)
    found, _ = triton_backward(
        grad_lse, None, rows, None, ids, None, lse, lse[:, :0], loss.scales,
        detach_weights=False, need_queries=True, need_keys=False, unit=True,
    )  # fmt: skip
    assert found is not None
    return found.view_as(units)


def asymmetry_norm(z: Tensor, z2: Tensor | None, shortest: float) -> list[Tensor]:
    """Return ||A - A^T||_F of the unit rows before they are rounded, in float32, and what its gradient needs."""
    from kontrast.kernels.triton_unit_launch import triton_wide_units

    units = triton_wide_units(z, shortest, z2, torch.float64)
    B = units.shape[1]
    method = faster_method(z, B)
    norm, *kept = compute_norm(units, units, method)
    # A norm that rounding may have caused counts as zero. Unit rows have |a|^2 = |b|^2 = 2 B.
    rounding = 2 * B * ROUNDING[method] ** 0.5
    divisor = torch.threshold(norm, rounding, torch.inf)
    return [torch.threshold(norm, rounding, 0.0).float(), divisor, *kept]


def asymmetry_gradient(grad: Tensor, kept: list[Tensor], weight: float) -> Tensor:
    """Return the gradient of the unit rows [2,B,D], in float64."""
    divisor, *kept = kept
    method = "tiles" if len(kept) < 4 else "closed"
    return compute_norm_gradients((grad * weight) / divisor, kept, method, alone=True)[0]
