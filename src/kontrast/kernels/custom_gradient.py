"""Statistics with a hand-written gradient: autograd functions in eager mode, torch operators in compiled programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]


class Operation:
    """A function of tensors and constants with its own gradient.

    Args:
        name: the operator is `torch.ops.kontrast.<name>`.
        inputs: the arguments in the language of torch's operator schemas.
        outputs: the number of tensors that it returns, always as a tuple.
        forward: computes the outputs from the inputs.
        backward: `backward(grads, outputs, needs, *inputs)` returns the gradients of those inputs whose `needs` is
            true, in their order. A gradient of an output that the loss doesn't use is None.
        definition: computes the outputs by operations of torch, for second derivatives.
        shapes: computes empty outputs of the right shape and type from the inputs.
    """

    def __init__(
        self, name: str, inputs: str, outputs: int, *, forward: Callable[..., Outputs],
        backward: Callable[..., list[Tensor]], definition: Callable[..., Outputs], shapes: Callable[..., Outputs],
    ):  # fmt: skip
        self.forward, self.backward, self.definition = forward, backward, definition
        declared = f"({inputs}) -> ({', '.join(['Tensor'] * outputs)})"
        compute = only_output(forward) if outputs == 1 else forward
        self.operator = torch.library.custom_op(f"kontrast::{name}", compute, mutates_args=(), schema=declared)
        self.operator.register_fake(only_output(shapes) if outputs == 1 else shapes)
        declared = f"(Tensor?[] grads, Tensor[] outputs, bool[] needs, {inputs}) -> Tensor[]"
        gradient = torch.library.custom_op(f"kontrast::{name}_backward", backward, mutates_args=(), schema=declared)
        gradient.register_fake(empty_gradients)
        self.operator.register_autograd(
            lambda ctx, *grads: input_gradients(ctx, grads, gradient), setup_context=save_for_backward
        )

    def __call__(self, *inputs: Any) -> Outputs:
        if not torch.compiler.is_compiling():
            return OperationFunction.apply(self, *inputs)
        found: Any = self.operator(*inputs)
        return (found,) if isinstance(found, Tensor) else found


def only_output(compute: Callable[..., Outputs]) -> Callable[..., Tensor]:
    """Return the function with its only output bare, because a schema has no tuple of one."""
    return lambda *inputs: compute(*inputs)[0]


def empty_gradients(grads: Any, outputs: Any, needs: Sequence[bool], *inputs: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x, need in zip(inputs, needs) if need]


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Outputs | Tensor) -> None:
    ctx.tensors = [n for n, x in enumerate(inputs) if isinstance(x, Tensor)]
    ctx.constants = [None if isinstance(x, Tensor) else x for x in inputs]
    output = (output,) if isinstance(output, Tensor) else output
    ctx.save_for_backward(*(inputs[n] for n in ctx.tensors), *output)
    # An output that the loss doesn't use then has the gradient None, and its arithmetic is skipped.
    ctx.set_materialize_grads(False)


def saved_inputs(ctx: Any) -> tuple[list[Any], list[Tensor]]:
    """Return the inputs and the outputs."""
    inputs, saved = list(ctx.constants), list(ctx.saved_tensors)
    for n, x in zip(ctx.tensors, saved):
        inputs[n] = x
    return inputs, saved[len(ctx.tensors) :]


def input_gradients(ctx: Any, grads: Sequence[Tensor | None], compute: Any) -> tuple[Tensor | None, ...]:
    """Return the gradient of each input; None for those that need none."""
    inputs, outputs = saved_inputs(ctx)
    # In eager mode the first input of the autograd function is the operation.
    needs = list(ctx.needs_input_grad)[-len(inputs) :]
    if not any(grad is not None for grad in grads):
        return (None,) * len(inputs)
    gradients = iter(compute(list(grads), outputs, needs, *inputs))
    return tuple(next(gradients) if need else None for need in needs)


class OperationFunction(torch.autograd.Function):
    """An operation in eager mode: the first call of a custom operator imports torch's compiler and takes seconds."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, *inputs: Any) -> Outputs:
        output = operation.forward(*inputs)
        ctx.operation = operation
        save_for_backward(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        compute = ctx.operation.backward
        if torch.is_grad_enabled():  # with create_graph: the gradient will be differentiated again
            compute = differentiable_backward(ctx.operation.definition)
        return None, *input_gradients(ctx, grads, compute)


def differentiable_backward(definition: Callable[..., Outputs]) -> Callable[..., list[Tensor]]:
    """Return a backward pass by the definition, which stores the matrix, so that it can be differentiated."""

    def backward(grads: list[Tensor | None], outputs: Any, needs: list[bool], *inputs: Any) -> list[Tensor]:
        # Aliases, because an input may be given twice, as queries and as keys, and each place has its own gradient.
        inputs = tuple(x.view_as(x) if need else x for x, need in zip(inputs, needs))
        used = [(x, grad) for x, grad in zip(definition(*inputs), grads) if grad is not None and x.requires_grad]
        wanted = [x for x, need in zip(inputs, needs) if need]
        values, incoming = zip(*used)
        found = torch.autograd.grad(values, wanted, incoming, create_graph=True, allow_unused=True)
        return [torch.zeros_like(x) if gradient is None else gradient for x, gradient in zip(wanted, found)]

    return backward
