"""Unit rows and the similarities of each image's views, from which objectives take anchors and positives.

V query views, W key views, B images, D width, L pairs of views.  z [V,B,D], keys [W,B,D], similarities [L,B].  Without
keys the pairs are v < w, sorted; with keys they are all (v, w), sorted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kontrast.kernels.dense import INTERPRETED, in_torch_func

SHORTEST = 1e-12


class UnitRows(NamedTuple):
    """Rows of length one in the type of z, those of the keys if there are any, and similarities in float32 at least."""

    z: Tensor
    keys: Tensor | None
    similarities: Tensor


def unit_rows(z: Tensor, keys: Tensor | None = None, *, normalize: bool = True) -> UnitRows:
    """Normalize z and keys, and compute the similarity of the views of each image, with gradient.

    Similarities are those of the rows before they are rounded to half precision. With `normalize=False` rows are taken
    as they are.
    """
    constant = keys is None or not keys.requires_grad
    if torch.compiler.is_compiling() or in_torch_func() or not constant:
        return define_unit_rows(z, keys, normalize)
    return UnitRows(*UnitRowsFunction.apply(z, keys, normalize))


def unit(z: Tensor, eps: float = SHORTEST) -> Tensor:
    """Scale rows to length one.

    A zero vector stays zero, with a finite gradient in half precision too. A row whose length overflows becomes NaN;
    dividing by infinity would turn it into a zero that looks healthy.
    """
    norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    return z / torch.where(norm > eps, norm + 0 * norm.detach(), 1.0)


def wide_units(z: Tensor, shortest: float = SHORTEST) -> Tensor:
    """Return `unit` of rows [V,B,D] in float32 at least, with a gradient of few operations, on CUDA one launch."""
    if torch.compiler.is_compiling() or in_torch_func():
        return unit(z.to(torch.promote_types(z.dtype, torch.float32)), shortest)
    return WideUnitsFunction.apply(z, shortest)


def view_pairs(V: int, W: int | None) -> list[tuple[int, int]]:
    """Return the pairs of views in the order of the similarities; W is None without keys."""
    return [(v, w) for v in range(V) for w in range(v + 1 if W is None else 0, V if W is None else W)]


def define_unit_rows(z: Tensor, keys: Tensor | None, normalize: bool) -> UnitRows:
    """Compute unit rows and similarities by definition, for autograd, torch.func and torch.compile."""
    wide = torch.promote_types(z.dtype, torch.float32)
    y, k = z.to(wide), None if keys is None else keys.to(wide)
    if normalize:
        y, k = unit(y), None if k is None else unit(k)
    pairs = view_pairs(len(z), None if keys is None else len(keys))
    ones, others = y.unbind(), (y if k is None else k).unbind()
    # Elementwise, because a matrix product may round to tf32.
    products = [(ones[v] * others[w]).sum(-1) for v, w in pairs]
    similarities = torch.stack(products) if products else y.new_empty(0, z.shape[1])
    return UnitRows(y.to(z.dtype), None if k is None else k.to(z.dtype), similarities)


def by_triton(z: Tensor) -> bool:
    """Return whether the Triton kernels take the rows, natively or in the interpreter."""
    return (z.is_cuda or INTERPRETED) and z.dtype != torch.float64 and z.shape[-1] <= 4096


class UnitRowsFunction(torch.autograd.Function):
    """Unit rows and similarities with a gradient to z, of few operations; on CUDA one launch each way."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, keys: Tensor | None, normalize: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.normalize = normalize
        if by_triton(z):
            from kontrast.kernels.triton_unit_launch import triton_unit_forward

            z, keys = z.contiguous(), None if keys is None else keys.contiguous()
            units, key_units, similarities = triton_unit_forward(z, keys, normalize)
        else:
            units, key_units, similarities = define_unit_rows(z, keys, normalize)
        if keys is not None and key_units is not None:
            ctx.mark_non_differentiable(key_units)
        ctx.save_for_backward(z, keys)
        return units, key_units, similarities

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, None]:
        (z, keys), (grad_units, _, grad_similarities) = ctx.saved_tensors, grads
        given = [g for g in (grad_units, grad_similarities) if g is not None]
        if not given or not ctx.needs_input_grad[0]:
            return None, None, None
        if torch.is_grad_enabled():  # with create_graph: the gradient will be differentiated again
            rows = define_unit_rows(z, keys, ctx.normalize)
            values = [x for x, g in ((rows.z, grad_units), (rows.similarities, grad_similarities)) if g is not None]
            return torch.autograd.grad(values, z, given, create_graph=True)[0], None, None
        if by_triton(z):
            from kontrast.kernels.triton_unit_launch import triton_unit_backward

            return triton_unit_backward(z, keys, grad_units, grad_similarities, ctx.normalize), None, None
        return unit_gradient(z, keys, grad_units, grad_similarities, ctx.normalize), None, None


class WideUnitsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, shortest: float) -> Tensor:
        z = z.contiguous()
        ctx.save_for_backward(z)
        ctx.shortest = shortest
        if by_triton(z):
            from kontrast.kernels.triton_unit_launch import triton_wide_units

            return triton_wide_units(z, shortest)
        return unit(z.to(torch.promote_types(z.dtype, torch.float32)), shortest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (z,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # with create_graph: the gradient will be differentiated again
            units = unit(z.to(grads[0].dtype), ctx.shortest)
            return *torch.autograd.grad(units, z, grads[0], create_graph=True), None
        if by_triton(z):
            from kontrast.kernels.triton_unit_launch import triton_unit_backward

            return triton_unit_backward(z, None, grads[0], None, True, shortest=ctx.shortest), None
        return unit_gradient(z, None, grads[0], None, True, ctx.shortest), None


def unit_gradient(
    z: Tensor, keys: Tensor | None, grad_units: Tensor | None, grad_similarities: Tensor | None, normalize: bool,
    shortest: float = SHORTEST,
) -> Tensor:  # fmt: skip
    """Return the gradient of z: that of the unit rows without its part along the row, divided by the length."""
    wide = torch.promote_types(z.dtype, torch.float32)
    y, k = z.to(wide), None if keys is None else keys.to(wide)
    if normalize:
        norm = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        norm = torch.where(norm > shortest, norm + 0 * norm, 1.0)
        y, k = y / norm, None if k is None else unit(k)
    gradient = torch.zeros_like(y) if grad_units is None else grad_units.to(wide, copy=True)
    if grad_similarities is not None:
        others = y if k is None else k
        for pair, (v, w) in enumerate(view_pairs(len(z), None if keys is None else len(keys))):
            weight = grad_similarities[pair, :, None]
            gradient[v].addcmul_(weight, others[w])
            if k is None:
                gradient[w].addcmul_(weight, y[v])
    if normalize:
        along = (y * gradient).sum(-1, keepdim=True)
        short = (y * y).sum(-1, keepdim=True) < 0.5  # too short to normalize: not a unit vector
        gradient = gradient.addcmul_(y, along.masked_fill_(short, 0), value=-1).div_(norm)
    return gradient.to(z.dtype)
