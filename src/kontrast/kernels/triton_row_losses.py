"""The loss of each row of two views from its lse and its positive, in one launch.

B images.  similarity [B], lse and losses [2,B].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kontrast.kernels.row_loss import RowLoss
from kontrast.kernels.triton_fast_launch import FastKernel
from kontrast.kernels.triton_operands import ceil_div

BLOCK = 256


@FastKernel
@triton.jit(do_not_specialize=["B"])
def row_losses(lse, similarity, losses, scale, push, pull, B, POSITIVE: tl.constexpr, BLOCK: tl.constexpr):
    """Write push * lse - pull * s. If POSITIVE, scale * s is added to the lse first, and the lse is replaced."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = b < B
    place = tl.program_id(1).to(tl.int64) * B + b
    x = tl.load(lse + place, mask=inside, other=0.0)
    s = tl.load(similarity + b, mask=inside, other=0.0)
    if POSITIVE:
        top = tl.maximum(x, scale * s)
        x = top + tl.log(tl.exp(x - top) + tl.exp(scale * s - top))
        tl.store(lse + place, x, mask=inside)
    tl.store(losses + place, push * x - pull * s, mask=inside)


def triton_row_losses(lse: Tensor, similarity: Tensor, loss: RowLoss) -> Tensor:
    """Return the loss of each row [2,B]; if the positive counts in the lse, it is added to it in place."""
    losses, B = torch.empty_like(lse), lse.shape[1]
    row_losses[(ceil_div(B, BLOCK), 2)](
        lse, similarity, losses, loss.scales[0], loss.push, loss.pull, B, POSITIVE=loss.positive, BLOCK=BLOCK
    )
    return losses
