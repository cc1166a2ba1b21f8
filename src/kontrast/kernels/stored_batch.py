"""Small batches of unit rows on the CPU: the exponentials of the affinity are stored and serve the backward pass.

V views of B images, D width, M = V B rows, L pairs of views.  z [V,B,D], similarities [L,B], statistics [V,B], matrix
of exponentials e_ij = exp(a s_ij) [M,M], zero for two views of one image.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kontrast.kernels.dense import in_torch_func
from kontrast.kernels.tiled import SAFE_EXPONENT
from kontrast.kernels.unit_rows import define_unit_rows, unit_gradient

LARGEST = 2**20
"""The most entries of the stored matrix. Beyond it, computing a tile twice is cheaper than reading it from memory."""


def fits_stored_batch(z: Tensor, keys: Tensor | None, normalize: bool, scales: list[Any]) -> bool:
    """Return whether the exponentials are few, and so small that they can be added up as they are."""
    if z.is_cuda or keys is not None or not normalize or torch.compiler.is_compiling() or in_torch_func():
        return False
    number = len(scales) == 1 and not isinstance(scales[0], Tensor) and abs(scales[0]) <= SAFE_EXPONENT
    return number and (z.shape[0] * z.shape[1]) ** 2 <= LARGEST


class StoredBatchFunction(torch.autograd.Function):
    """Unit rows, similarities, the log-sum-exp of each row over other images, and the attraction.

    With `positive`, for two views, the similarity of the two views counts in the log-sum-exp too. The attraction is
    -scale times that similarity, for each row.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, scale: float, positive: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        V, B, D = z.shape
        units, _, similarities = define_unit_rows(z, None, True)
        rows = units.to(similarities.dtype).reshape(-1, D)
        matrix = torch.mm(rows, rows.T).mul_(scale).exp_()
        matrix.view(V, B, V, B).diagonal(dim1=1, dim2=3).zero_()
        total = matrix.sum(-1).view(V, B)
        own = torch.exp(scale * similarities) if positive else None
        total = total if own is None else total + own
        ctx.scale = scale
        ctx.save_for_backward(z, rows, matrix, total, own)
        ctx.set_materialize_grads(False)
        attraction = (-scale * similarities).expand(V, -1) if V == 2 else similarities.new_empty(0)
        return units, similarities, total.log(), attraction

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        z, rows, matrix, total, own = ctx.saved_tensors
        grad_units, grad_similarities, grad_lse, grad_attraction = grads
        a = ctx.scale
        if torch.is_grad_enabled():  # with create_graph: the gradient will be differentiated again
            return differentiable_gradient(z, a, own is not None, grads), None, None
        if grad_attraction is not None:
            part = -a * grad_attraction.sum(0, keepdim=True)
            grad_similarities = part if grad_similarities is None else grad_similarities + part
        if grad_lse is not None:
            share = a * grad_lse / total
            share = share.masked_fill_(total == 0, 0)
            flat = share.view(-1)
            found = torch.mm((flat[:, None] + flat).mul_(matrix), rows).view(z.shape)
            grad_units = found if grad_units is None else grad_units + found
            if own is not None:
                part = (share * own).sum(0, keepdim=True)
                grad_similarities = part if grad_similarities is None else grad_similarities + part
        return unit_gradient(z, None, grad_units, grad_similarities, True), None, None


def differentiable_gradient(z: Tensor, scale: float, positive: bool, grads: Any) -> Tensor | None:
    """Compute the gradient of z by the definition, so that it can be differentiated."""
    V, B, D = z.shape
    units, _, similarities = define_unit_rows(z, None, True)
    rows = units.to(similarities.dtype).reshape(-1, D)
    image = torch.arange(B).repeat(V)
    s = (scale * (rows @ rows.T)).masked_fill(image[:, None] == image, -torch.inf)
    lse = torch.logsumexp(s, dim=-1).view(V, B)
    lse = torch.logaddexp(lse, scale * similarities) if positive else lse
    outputs = units, similarities, lse, (-scale * similarities).expand(V, -1) if V == 2 else None
    used = [(x, grad) for x, grad in zip(outputs, grads) if x is not None and grad is not None]
    if not used:
        return None
    values, incoming = zip(*used)
    return torch.autograd.grad(values, z, incoming, create_graph=True)[0]
