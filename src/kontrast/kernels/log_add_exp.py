"""The log of a sum of exponentials with one more term: a positive beside its negatives.

P rows of B anchors.  lse and similarity [P,B].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kontrast.kernels.dense import in_torch_func


def log_add_exp(lse: Tensor, similarity: Tensor, scale: float | Tensor) -> Tensor:
    """Return log(exp(lse) + exp(scale * similarity)), with a gradient of few operations; on CUDA one launch each way.

    A row without negatives (lse = -inf) has the value scale * similarity.
    """
    plain = torch.compiler.is_compiling() or in_torch_func() or isinstance(scale, Tensor)
    if plain or lse.dtype != similarity.dtype or lse.shape != similarity.shape:
        return torch.logaddexp(lse, scale * similarity)
    return LogAddExpFunction.apply(lse, similarity, scale)


class LogAddExpFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lse: Tensor, similarity: Tensor, scale: float) -> Tensor:
        if lse.is_cuda and lse.dtype == torch.float32 and lse.ndim == 2:
            from kontrast.kernels.triton_log_add_exp import triton_log_add_exp

            total = triton_log_add_exp(lse, similarity, scale)
        else:
            total = torch.logaddexp(lse, scale * similarity)
        ctx.scale = scale
        ctx.save_for_backward(lse, similarity, total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        lse, similarity, total = ctx.saved_tensors
        if torch.is_grad_enabled():  # with create_graph: the gradient will be differentiated again
            total = torch.logaddexp(lse, ctx.scale * similarity)
        elif total.is_cuda and total.dtype == torch.float32 and total.ndim == 2:
            from kontrast.kernels.triton_log_add_exp import triton_log_add_exp_gradient

            return *triton_log_add_exp_gradient(grads[0], similarity, total, ctx.scale), None
        share = torch.exp(ctx.scale * similarity - total) * grads[0]
        return grads[0] - share, ctx.scale * share, None
