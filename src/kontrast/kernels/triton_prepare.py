"""Triton kernels that prepare the inputs of the statistics: they split float32 rows into parts, and find id ranges.

M rows, D width.  rows [M,D], ids [M].
"""

from __future__ import annotations

import triton
import triton.language as tl

from kontrast.kernels.triton_fast_launch import FastKernel


@FastKernel
@triton.jit(do_not_specialize=["rows", "stride"])
def cut(source, target, rows, stride, width, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Split float32 rows into three parts of bf16 precision: [3, stride, width], with zeros after the last row."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    place = row[:, None] * width + d[None, :]
    inside = (d < width)[None, :]
    rest = tl.load(source + place, mask=inside & (row < rows)[:, None], other=0.0)
    for part in tl.static_range(3):
        head = rest.to(tl.bfloat16).to(tl.float32)
        tl.store(target + part * stride.to(tl.int64) * width + place, head, mask=inside & (row < stride)[:, None])
        rest -= head


@FastKernel
@triton.jit(do_not_specialize=["count"])
def id_spans(ids, low, high, count, BLOCK: tl.constexpr):
    """Find the smallest and largest id of each block: blocks whose ranges don't overlap have no excluded pairs."""
    block = tl.program_id(0)
    index = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(ids + index, mask=index < count, other=tl.load(ids + block * BLOCK))
    tl.store(low + block, tl.min(values, 0))
    tl.store(high + block, tl.max(values, 0))
