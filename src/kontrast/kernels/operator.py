"""Row statistics as a torch operator with a shape function and a gradient, so that programs with it can be compiled.

M queries, K keys, D width, S scales.  queries [M,D], keys [K,D], ids [M] and [K], statistics and their gradients [S,M].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kontrast.kernels.dense import accumulation_type, dense_statistics
from kontrast.kernels.tiled import tiled_backward, tiled_forward


def forward(
    queries: Tensor, keys: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None,
    scales: Sequence[float], detach_weights: bool, with_mean: bool, implementation: str, key_bias: Tensor | None,
    unit: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return lse [S,M] and mean [S,M], or [S,0] without the mean."""
    if implementation == "triton":
        from kontrast.kernels.triton_launch import triton_forward

        return triton_forward(queries, keys, query_ids, key_ids, scales, with_mean, unit, key_bias)
    return tiled_forward(queries, keys, query_ids, key_ids, scales, with_mean, key_bias)


def backward(
    grad_lse: Tensor | None, grad_mean: Tensor | None,
    queries: Tensor, keys: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None,
    lse: Tensor, mean: Tensor, scales: Sequence[float], detach_weights: bool,
    need_queries: bool, need_keys: bool, implementation: str, key_bias: Tensor | None, need_bias: bool,
    unit: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of queries [M,D], keys [K,D] and bias [K]; empty if not needed, or if there are none."""
    to_bias = None
    if implementation == "triton":
        from kontrast.kernels.triton_launch import triton_backward

        to_queries, to_keys = triton_backward(
            grad_lse, grad_mean, queries, keys, query_ids, key_ids, lse, mean,
            scales, detach_weights, need_queries, need_keys, unit, key_bias,
        )  # fmt: skip
        if need_bias:
            *_, to_bias = tiled_backward(
                grad_lse, grad_mean, queries, keys, query_ids, key_ids, lse, mean,
                scales, detach_weights, False, False, key_bias, True,
            )  # fmt: skip
    else:
        to_queries, to_keys, to_bias = tiled_backward(
            grad_lse, grad_mean, queries, keys, query_ids, key_ids, lse, mean,
            scales, detach_weights, need_queries, need_keys, key_bias, need_bias,
        )  # fmt: skip
    gradients = (queries.new_empty(0) if part is None else part for part in (to_queries, to_keys, to_bias))
    return tuple(gradients)  # type: ignore[return-value]


statistics_operator = torch.library.custom_op("kontrast::row_statistics", forward, mutates_args=())
backward_operator = torch.library.custom_op("kontrast::row_statistics_backward", backward, mutates_args=())


@statistics_operator.register_fake
def _(queries: Tensor, keys: Any, query_ids: Any, key_ids: Any, scales: Any, detach: Any, with_mean: bool, *rest: Any):
    lse = queries.new_empty(len(scales), queries.shape[0], dtype=accumulation_type(queries))
    return lse, torch.empty_like(lse) if with_mean else lse.new_empty(len(scales), 0)


@backward_operator.register_fake
def _(grad_lse: Any, grad_mean: Any, queries: Tensor, keys: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    *_, need_queries, need_keys, _, key_bias, need_bias, _ = rest
    to_queries = queries.new_empty(queries.shape if need_queries else 0)
    to_keys = queries.new_empty(keys.shape if keys is not None and need_keys else 0)
    return to_queries, to_keys, torch.empty_like(key_bias) if need_bias else queries.new_empty(0)


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    queries, keys, query_ids, key_ids, scales, detach_weights, _, implementation, key_bias, unit = inputs
    ctx.save_for_backward(queries, keys, query_ids, key_ids, key_bias, *output)
    ctx.arguments = scales, detach_weights, implementation, unit
    # A statistic that the loss doesn't use then has the gradient None, and its arithmetic is skipped.
    ctx.set_materialize_grads(False)


def input_gradients(
    ctx: Any, grad_lse: Tensor | None, grad_mean: Tensor | None, compute: Any = backward_operator
) -> tuple[Tensor | None, ...]:
    """Return the gradient of each argument of `forward`."""
    queries, keys, query_ids, key_ids, key_bias, lse, mean = ctx.saved_tensors
    scales, detach_weights, implementation, unit = ctx.arguments
    if mean.shape[-1] == 0:
        grad_mean = None
    to_queries = to_keys = to_bias = None
    if grad_lse is not None or grad_mean is not None:
        need_queries, need_keys = ctx.needs_input_grad[0], keys is not None and ctx.needs_input_grad[1]
        need_bias = key_bias is not None and ctx.needs_input_grad[8]
        to_queries, to_keys, to_bias = compute(
            grad_lse, grad_mean, queries, keys, query_ids, key_ids, lse, mean,
            scales, detach_weights, need_queries, need_keys, implementation, key_bias, need_bias, unit,
        )  # fmt: skip
        to_queries, to_keys = to_queries if need_queries else None, to_keys if need_keys else None
        to_bias = to_bias if need_bias else None
    return to_queries, to_keys, None, None, None, None, None, None, to_bias, None


statistics_operator.register_autograd(input_gradients, setup_context=save_for_backward)


class StatisticsFunction(torch.autograd.Function):
    """The operator for eager mode: the first call of a custom operator imports torch's compiler and takes seconds."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = forward(*inputs)
        save_for_backward(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():  # with create_graph: the gradient will be differentiated again
            return differentiable_gradients(ctx, *grads)
        grad_lse, grad_mean = grads
        return input_gradients(ctx, grad_lse, grad_mean, backward)


def differentiable_gradients(ctx: Any, grad_lse: Tensor | None, grad_mean: Tensor | None) -> tuple[Tensor | None, ...]:
    """Compute the same gradients by the definition, which stores the matrix, so that they can be differentiated."""
    queries, keys, query_ids, key_ids, key_bias, *_ = ctx.saved_tensors
    scales, detach_weights, *_ = ctx.arguments
    gradients: list[Tensor | None] = [None] * 10
    # Aliases, because the same tensor may be given as queries and as keys, and each place has its own gradient.
    queries = queries.view_as(queries)
    keys, key_bias = (None if x is None else x.view_as(x) for x in (keys, key_bias))
    differentiable = {0: queries, 1: keys, 8: key_bias}
    wanted = [n for n, x in differentiable.items() if x is not None and ctx.needs_input_grad[n]]
    with_mean = grad_mean is not None
    outputs = dense_statistics(queries, keys, query_ids, key_ids, scales, detach_weights, with_mean, key_bias)
    used = [(x, grad) for x, grad in zip(outputs, (grad_lse, grad_mean)) if grad is not None and grad.numel()]
    if used:
        values, grads = zip(*used)
        inputs: Any = [differentiable[n] for n in wanted]
        for n, gradient in zip(wanted, torch.autograd.grad(values, inputs, grads, create_graph=True)):
            gradients[n] = gradient
    return tuple(gradients)
