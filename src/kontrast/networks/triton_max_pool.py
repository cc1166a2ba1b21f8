"""Triton kernels of max pooling on channels-last images. A program handles BLOCK consecutive values of one image.

C channels, H x W pixels, OH x OW outputs, windows of K x K with stride S and padding P.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = {"forward": 1024, "gradient": 2048}  # the fastest of 256 to 4,096 on an H200


@triton.jit
def forward_kernel(
    input, largest, places, BLOCKS,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    K: tl.constexpr, S: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the first largest value of each window; a NaN is larger than any number."""
    image = (tl.program_id(0) // BLOCKS).to(tl.int64)
    index = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = index < C * OH * OW
    channel, top, left = index % C, index // C // OW * S - P, index // C % OW * S - P
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = tl.full((BLOCK,), 255, tl.int32)
    for k in tl.static_range(K * K):
        y, x = top + k // K, left + k % K
        there = inside & (y >= 0) & (y < H) & (x >= 0) & (x < W)
        value = tl.load(input + image * (C * H * W) + (y * W + x) * C + channel, mask=there, other=0.0).to(tl.float32)
        better = there & ((value > best) | (value != value) | (place == 255))
        best, place = tl.where(better, value, best), tl.where(better, k, place)
    to = image * (C * OH * OW) + index
    tl.store(largest + to, best.to(largest.dtype.element_ty), mask=inside)
    tl.store(places + to, place.to(tl.uint8), mask=inside)


@triton.jit
def gradient_kernel(
    grad_output, places, grad_input, BLOCKS,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    K: tl.constexpr, S: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum for each input the gradients of the windows that chose it; at most R x R windows cover an input."""
    R: tl.constexpr = (K + S - 1) // S
    image = (tl.program_id(0) // BLOCKS).to(tl.int64)
    index = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = index < C * H * W
    channel, y, x = index % C, index // C // W + P, index // C % W + P
    total = tl.zeros((BLOCK,), tl.float32)
    for r in tl.static_range(R * R):
        oy, ox = y // S - r // R, x // S - r % R
        ky, kx = y - oy * S, x - ox * S
        there = inside & (oy >= 0) & (oy < OH) & (ox >= 0) & (ox < OW) & (ky < K) & (kx < K)
        window = image * (C * OH * OW) + (oy * OW + ox) * C + channel
        place = tl.load(places + window, mask=there, other=255).to(tl.int32)
        share = tl.load(grad_output + window, mask=there, other=0.0).to(tl.float32)
        total += tl.where(place == ky * K + kx, share, 0.0)
    tl.store(grad_input + image * (C * H * W) + index, total.to(grad_input.dtype.element_ty), mask=inside)


def launch(kernel, block: int, tensors: list[Tensor], over: Tensor, input: Tensor, output: Tensor, window) -> None:
    """Run one program per `block` values of each image of `over`."""
    count, channels, *sides = input.shape
    if count:
        blocks = triton.cdiv(over[0].numel(), block)
        with torch.cuda.device_of(input):
            kernel[(count * blocks,)](*tensors, blocks, channels, *sides, *output.shape[2:], *window, BLOCK=block)


def triton_forward(input: Tensor, largest: Tensor, places: Tensor, *window: int) -> None:
    """Fill `largest` and `places`, both channels-last."""
    dense = input.contiguous(memory_format=torch.channels_last)
    launch(forward_kernel, BLOCK["forward"], [dense, largest, places], largest, input, largest, window)


def triton_gradient(grad_output: Tensor, places: Tensor, grad_input: Tensor, *window: int) -> None:
    """Fill `grad_input`, channels-last."""
    dense = [t.contiguous(memory_format=torch.channels_last) for t in (grad_output, places)]
    launch(gradient_kernel, BLOCK["gradient"], [*dense, grad_input], grad_input, grad_input, grad_output, window)
