"""Max pooling with a fast gradient in compiled programs on a GPU; elsewhere it is torch's.

N images, C channels, H x W pixels, h x w outputs. The compiler's own gradient of max pooling runs at a tenth of the
memory's speed, which was a sixth of SmallAlexNet's step on an H200.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Shape = tuple[int, int, int, int]


class MaxPool(nn.MaxPool2d):
    """Max pooling of square windows of up to 15 by 15, because a place in the window is stored in a byte."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and input.is_cuda and input.dtype != torch.float64:
            return forward_operator(input, self.kernel_size, self.stride, self.padding)[0]
        return super().forward(input)


def empty(like: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=torch.channels_last)


def empty_outputs(input: Tensor, kernel: int, stride: int, padding: int) -> tuple[Tensor, Tensor]:
    count, channels, *sides = input.shape
    high, wide = ((side + 2 * padding - kernel) // stride + 1 for side in sides)
    shape = (count, channels, high, wide)
    return empty(input, shape, input.dtype), empty(input, shape, torch.uint8)


def empty_gradient(
    grad_output: Tensor, places: Tensor, high: int, wide: int, kernel: int, stride: int, padding: int
) -> Tensor:
    return empty(grad_output, (grad_output.shape[0], grad_output.shape[1], high, wide), grad_output.dtype)


def forward(input: Tensor, kernel: int, stride: int, padding: int) -> tuple[Tensor, Tensor]:
    """Return the largest value of each window [N,C,h,w] and its place in the window, uint8 [N,C,h,w]."""
    from kontrast.networks.triton_max_pool import triton_forward

    largest, places = empty_outputs(input, kernel, stride, padding)
    triton_forward(input, largest, places, kernel, stride, padding)
    return largest, places


def gradient(
    grad_output: Tensor, places: Tensor, high: int, wide: int, kernel: int, stride: int, padding: int
) -> Tensor:
    """Return the gradient of the input [N,C,H,W] from the gradient of the output."""
    from kontrast.networks.triton_max_pool import triton_gradient

    grad_input = empty_gradient(grad_output, places, high, wide, kernel, stride, padding)
    triton_gradient(grad_output, places, grad_input, kernel, stride, padding)
    return grad_input


forward_operator = torch.library.custom_op("kontrast::max_pool", forward, mutates_args=())
gradient_operator = torch.library.custom_op("kontrast::max_pool_gradient", gradient, mutates_args=())
forward_operator.register_fake(empty_outputs)
gradient_operator.register_fake(empty_gradient)


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    input, *window = inputs
    ctx.save_for_backward(output[1])
    ctx.arguments = (*input.shape[2:], *window)
    ctx.mark_non_differentiable(output[1])


def backward(ctx: Any, grad_output: Tensor, _: Tensor | None) -> tuple[Tensor, None, None, None]:
    return gradient_operator(grad_output, *ctx.saved_tensors, *ctx.arguments), None, None, None


forward_operator.register_autograd(backward, setup_context=save_for_backward)
