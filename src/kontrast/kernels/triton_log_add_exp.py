"""Triton kernels that add a positive to the log-sum-exp of its negatives.

P rows of B anchors.  lse, similarity, total and gradients [P,B], with any strides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kontrast.kernels.triton_fast_launch import FastKernel
from kontrast.kernels.triton_operands import ceil_div

BLOCK = 256


@FastKernel
@triton.jit(do_not_specialize=["B", "row_stride", "stride", "other_row_stride", "other_stride"])
def forward_kernel(
    lse, similarity, total, scale, B, row_stride, stride, other_row_stride, other_stride, BLOCK: tl.constexpr
):
    row, b = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = b < B
    x = tl.load(lse + row * row_stride + b * stride, mask=inside, other=0.0)
    y = scale * tl.load(similarity + row * other_row_stride + b * other_stride, mask=inside, other=0.0)
    top = tl.maximum(x, y)
    tl.store(total + row * B + b, top + tl.log(tl.exp(x - top) + tl.exp(y - top)), mask=inside)


@FastKernel
@triton.jit(do_not_specialize=["B", "row_stride", "stride", "other_row_stride", "other_stride"])
def backward_kernel(
    grad, similarity, total, to_lse, to_similarity, scale, B, row_stride, stride, other_row_stride, other_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, b = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = b < B
    incoming = tl.load(grad + row * row_stride + b * stride, mask=inside, other=0.0)
    y = scale * tl.load(similarity + row * other_row_stride + b * other_stride, mask=inside, other=0.0)
    share = tl.exp(y - tl.load(total + row * B + b, mask=inside, other=0.0)) * incoming
    tl.store(to_lse + row * B + b, incoming - share, mask=inside)
    tl.store(to_similarity + row * B + b, scale * share, mask=inside)


def triton_log_add_exp(lse: Tensor, similarity: Tensor, scale: float) -> Tensor:
    """Return log(exp(lse) + exp(scale * similarity))."""
    P, B = lse.shape
    total = torch.empty(P, B, dtype=lse.dtype, device=lse.device)
    grid = (ceil_div(B, BLOCK), P)
    forward_kernel[grid](lse, similarity, total, scale, B, *lse.stride(), *similarity.stride(), BLOCK=BLOCK)
    return total


def triton_log_add_exp_gradient(grad: Tensor, similarity: Tensor, total: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of lse and similarity."""
    P, B = total.shape
    to_lse, to_similarity = torch.empty_like(total), torch.empty_like(total)
    grid = (ceil_div(B, BLOCK), P)
    backward_kernel[grid](
        grad, similarity, total, to_lse, to_similarity, scale, B, *grad.stride(), *similarity.stride(), BLOCK=BLOCK
    )
    return to_lse, to_similarity
