"""Row statistics as one torch operator with a fake and a gradient: compiled and captured programs see through it.

M queries, K keys, D width, S scales.  queries [M,D], keys [K,D], ids [M] and [K], statistics and their gradients [S,M].
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kontrast.kernels.dense import dense_statistics, working_type
from kontrast.kernels.tiled import tiled_backward, tiled_forward


def chosen(implementation: str, queries: Tensor) -> str:
    """The implementation that `auto` means here, and whether one that is named can run here."""
    native = queries.device.type == "cuda" and queries.dtype != torch.float64
    if implementation == "auto":
        return "triton" if native else "tiled"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and queries.dtype != torch.float64
    if implementation == "triton" and not (native or interpreted):
        given = f"{queries.dtype} on {queries.device}"
        raise ValueError(f"triton can't take {given}: give a CUDA tensor of at most 32 bits, or use 'tiled'")
    return implementation


def forward(
    queries: Tensor,
    keys: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    scales: Sequence[float],
    detach_weights: bool,
    with_mean: bool,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    """lse [S,M] and mean [S,M], or [S,0] without it."""
    if implementation == "triton":
        from kontrast.kernels.triton_launch import triton_forward

        return triton_forward(queries, keys, query_ids, key_ids, scales, with_mean)
    return tiled_forward(queries, keys, query_ids, key_ids, scales, with_mean)


statistics_operator = torch.library.custom_op("kontrast::row_statistics", forward, mutates_args=())


@statistics_operator.register_fake
def _(
    queries: Tensor,
    keys: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    scales: Sequence[float],
    detach_weights: bool,
    with_mean: bool,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    lse = queries.new_empty(len(scales), queries.shape[0], dtype=working_type(queries))
    return lse, torch.empty_like(lse) if with_mean else lse.new_empty(len(scales), 0)


def gradients(
    grad_lse: Tensor | None,
    grad_mean: Tensor | None,
    queries: Tensor,
    keys: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    lse: Tensor,
    mean: Tensor,
    scales: Sequence[float],
    detach_weights: bool,
    need_queries: bool,
    need_keys: bool,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    """Gradients to queries [M,D] and keys [K,D], empty where not needed. Queries that are keys get both shares."""
    if implementation == "triton":
        from kontrast.kernels.triton_launch import triton_backward as backward
    else:
        backward = tiled_backward
    found = backward(
        grad_lse, grad_mean, queries, keys, query_ids, key_ids, lse, mean,
        scales, detach_weights, need_queries, need_keys,
    )  # fmt: skip
    to_queries, to_keys = (queries.new_empty(0) if gradient is None else gradient for gradient in found)
    return to_queries, to_keys


backward_operator = torch.library.custom_op("kontrast::row_statistics_backward", gradients, mutates_args=())


@backward_operator.register_fake
def _(
    grad_lse: Tensor | None,
    grad_mean: Tensor | None,
    queries: Tensor,
    keys: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    lse: Tensor,
    mean: Tensor,
    scales: Sequence[float],
    detach_weights: bool,
    need_queries: bool,
    need_keys: bool,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    to_queries = queries.new_empty(queries.shape if need_queries else 0)
    to_keys = queries.new_empty(keys.shape if keys is not None and need_keys else 0)
    return to_queries, to_keys


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    queries, keys, query_ids, key_ids, scales, detach_weights, _, implementation = inputs
    ctx.save_for_backward(queries, keys, query_ids, key_ids, *output)
    ctx.arguments = scales, detach_weights, implementation
    # A statistic that the loss does not use then brings no gradient at all, and its arithmetic is skipped.
    ctx.set_materialize_grads(False)


def backward(ctx: Any, grad_lse: Tensor | None, grad_mean: Tensor | None, compute: Any = backward_operator) -> Any:
    queries, keys, query_ids, key_ids, lse, mean = ctx.saved_tensors
    scales, detach_weights, implementation = ctx.arguments
    if mean.shape[-1] == 0:
        grad_mean = None
    to_queries = to_keys = None
    if grad_lse is not None or grad_mean is not None:
        need_queries, need_keys = ctx.needs_input_grad[0], keys is not None and ctx.needs_input_grad[1]
        to_queries, to_keys = compute(
            grad_lse, grad_mean, queries, keys, query_ids, key_ids, lse, mean,
            scales, detach_weights, need_queries, need_keys, implementation,
        )  # fmt: skip
        to_queries, to_keys = to_queries if need_queries else None, to_keys if need_keys else None
    return to_queries, to_keys, None, None, None, None, None, None


statistics_operator.register_autograd(backward, setup_context=save_for_backward)


class Statistics(torch.autograd.Function):
    """The same outside a compiler: a custom operator's first call imports torch's compiler, which takes seconds."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = forward(*inputs)
        save_for_backward(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph: what comes out is differentiated again
            return differentiable_backward(ctx, *grads)
        grad_lse, grad_mean = grads
        return backward(ctx, grad_lse, grad_mean, gradients)


def differentiable_backward(ctx: Any, grad_lse: Tensor | None, grad_mean: Tensor | None) -> Any:
    """The same gradient by the definition, which stores the matrix, and with a graph of its own."""
    queries, keys, query_ids, key_ids, *_ = ctx.saved_tensors
    scales, detach_weights, _ = ctx.arguments
    found: list[Tensor | None] = [None, None]
    wanted = [n for n, x in enumerate((queries, keys)) if x is not None and ctx.needs_input_grad[n]]
    made = dense_statistics(queries, keys, scales, query_ids, key_ids, detach_weights, grad_mean is not None)
    used = [(x, grad) for x, grad in zip(made, (grad_lse, grad_mean)) if grad is not None and grad.numel()]
    if used:
        values, grads = zip(*used)
        inputs = [(queries, keys)[n] for n in wanted]
        for n, gradient in zip(wanted, torch.autograd.grad(values, inputs, grads, create_graph=True)):
            found[n] = gradient
    return *found, None, None, None, None, None, None


def statistics(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Row statistics with their gradient: as the operator where a compiler looks on, plainly elsewhere."""
    if torch.compiler.is_compiling():
        return statistics_operator(*inputs)
    return Statistics.apply(*inputs)
