"""The loss of two views by its definition, which stores the matrix and whose gradient can be differentiated.

B images, D width.  z [2,B,D], or z and z2 [B,D].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kontrast.kernels.covariance import identity
from kontrast.kernels.row_loss import DEBIASED, MEAN, RowLoss
from kontrast.kernels.small_batch import Arguments, small_definition
from kontrast.kernels.symmetry import asymmetry_by_definition
from kontrast.kernels.unit_rows import unit
from kontrast.kernels.view_links import ALL, cases_of_links


def statistics_arguments(loss: RowLoss) -> Arguments:
    links = 2 if loss.kind == ALL else len(cases_of_links(2, 2)[loss.kind])
    return Arguments(
        None, None, loss.kind, links, 0, loss.scales, loss.detach_weights, loss.repulsion == MEAN, False, loss.positive
    )


def define_two_view_loss(z: Tensor, loss: RowLoss) -> Tensor:
    """Compute the loss of z [2,B,D] by definition, differentiated by autograd."""
    units = unit(z.to(torch.promote_types(z.dtype, torch.float32)), loss.shortest)
    lse, mean = small_definition(units.to(z.dtype), None, *statistics_arguments(loss))
    s = (units[0] * units[1]).sum(-1)
    if loss.repulsion == DEBIASED:
        log_R = lse[0] - lse[1] + loss.log_count
        share = loss.log_share + loss.pull * s - log_R
        left = torch.log(-torch.expm1(torch.where(share < 0, share, -1.0)))
        log_N = log_R + left - loss.log_rest
        log_N = torch.where((share < 0) & (log_N > loss.floor), log_N, loss.floor)
        repulsion = torch.logaddexp(loss.pull * s, log_N)
    elif loss.repulsion == MEAN:
        repulsion = mean[0]
    else:
        repulsion = torch.logaddexp(lse[0], loss.scales[0] * s) if loss.positive else lse[0]
    value = (loss.push * repulsion - loss.pull * s).mean()
    if loss.asymmetry:
        norm = asymmetry_by_definition(units[0], units[1], None, None, identity, "tiles")
        value = value + loss.asymmetry * norm
    return value


def differentiable_gradients(
    loss: RowLoss, z: Tensor, z2: Tensor | None, grad: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of z and z2 as far as they are needed, in a form that can be differentiated."""
    value = define_two_view_loss(z if z2 is None else torch.stack([z, z2]), loss)
    inputs = [x for x, needed in zip((z, z2), needs) if needed and x is not None]
    found = iter(torch.autograd.grad(value, inputs, grad, create_graph=True))
    first, second = (next(found) if needed else None for needed in needs[:2])
    return first, second
