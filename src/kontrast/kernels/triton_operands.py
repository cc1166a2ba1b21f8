"""Inputs of the Triton kernels: rows in the layout they read, block sizes, and whether their shortcut is safe.

M queries, K keys, D width.  queries [M,D], keys [K,D], ids [M] and [K].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kontrast.kernels import triton_prepare
from kontrast.kernels.dense import INTERPRETED
from kontrast.kernels.tiled import SAFE_EXPONENT

# From this many pairs on, the work outweighs the extra launches that let the device choose the shortcut.
LARGE = 2**24


@dataclass(frozen=True)
class Shape:
    """The launch parameters of a kernel: block sizes, warps, pipeline stages, widest piece of a row, register limit."""

    rows: int
    columns: int
    warps: int
    stages: int
    piece: int = 128
    registers: int | None = None


# By bytes per number. Narrow rows fit into one piece; for wider ones the kernels loop over pieces. Both tables were
# chosen by benchmarks/kernels.py --tune.
NARROW = {
    "rows": {2: Shape(64, 128, 4, 3), 4: Shape(128, 64, 8, 2)},
    "triangle": {2: Shape(128, 64, 8, 3), 4: Shape(64, 128, 4, 2)},
    "gradient": {2: Shape(128, 64, 4, 3), 4: Shape(128, 64, 8, 2)},
}
WIDE = {
    "rows": {2: Shape(128, 128, 4, 3, 64), 4: Shape(128, 128, 8, 3, 32)},
    "both": {2: Shape(128, 128, 4, 3, 64), 4: Shape(128, 128, 8, 3, 32)},
    "tiles": {2: Shape(128, 128, 4, 3, 64), 4: Shape(128, 128, 8, 3, 32)},
    "strips": {2: Shape(128, 128, 8, 3, 64), 4: Shape(128, 128, 8, 3, 32)},
}
NARROW_WIDTH = 128
"""The widest rows for which a program keeps a block of rows and its gradient on the chip."""

# Precision of the two products on the tensor cores: s and the gradient. Float32 rows are split into three bf16
# parts by `cut`. The gradient of fp16 needs the range of tf32.
PRECISIONS = {torch.float32: ("ieee", "ieee"), torch.float16: ("ieee", "tf32"), torch.bfloat16: ("ieee", "ieee")}


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up. Triton's own function takes microseconds on the host."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def shape_of(kernel: str, tensor: Tensor) -> tuple[Shape, int, int]:
    """Return the shape of a kernel, the width of a piece of a row, and the number of pieces."""
    wide = tensor.shape[1] > NARROW_WIDTH or kernel not in NARROW
    shape = (WIDE if wide else NARROW)[kernel][tensor.element_size()]
    piece = min(max(16, power_of_two(tensor.shape[1])), shape.piece)
    return shape, piece, ceil_div(tensor.shape[1], piece)


class Operand:
    """Rows in the layout that the kernels read: contiguous, each aligned to 16 bytes, float32 in three parts."""

    def __init__(self, rows: Tensor, ids: Tensor | None, bias: Tensor | None = None):
        self.count, self.width = rows.shape
        self.kind = rows.dtype
        self.ids = None if ids is None else ids.contiguous()
        self.bias = None if bias is None else bias.contiguous()
        # The interpreter can't multiply bf16; float32 represents each number exactly.
        rows = rows.float() if INTERPRETED and rows.dtype == torch.bfloat16 else rows
        excess = -self.width % 8
        rows = torch.nn.functional.pad(rows, (0, excess)) if excess else rows.contiguous()
        # torch calls a single row contiguous, whatever its stride.
        usual = rows.stride() == (rows.shape[1], 1) and rows.data_ptr() % 16 == 0
        self.rows = rows if usual else rows.new_empty(rows.shape).copy_(rows)
        self.in_parts = self.kind == torch.float32
        self.stride = 0
        self.read = self.cut() if self.in_parts else self.rows

    def cut(self) -> Tensor:
        """Split the rows into three parts of bf16 precision whose sum they are: [3 * stride, width]."""
        self.stride = ceil_div(self.count, 128) * 128
        width = self.rows.shape[1]
        parts = self.rows.new_empty(3 * self.stride, width, dtype=torch.float32 if INTERPRETED else torch.bfloat16)
        piece = min(128, power_of_two(width))
        grid = ceil_div(self.stride, 32), ceil_div(width, piece)
        triton_prepare.cut[grid](self.rows, parts, self.count, self.stride, width, BLOCK=32, BLOCK_D=piece)
        return parts

    def pointer(self, narrow: bool) -> Tensor:
        """Return the ids (their lower halves if `narrow`). Without ids, return any tensor: no kernel reads it."""
        return self.rows if self.ids is None else self.ids.to(torch.int32) if narrow else self.ids

    @property
    def bias_pointer(self) -> Tensor:
        """The bias. Without one, any tensor: no kernel reads it."""
        return self.rows if self.bias is None else self.bias

    def spans(self, narrow: bool, block: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the ids and the smallest and largest id of each block. Without ids, return any tensors."""
        ids = self.pointer(narrow)
        if self.ids is None:
            return ids, ids, ids
        low, high = ids.new_empty(2, ceil_div(self.count, block))
        triton_prepare.id_spans[(len(low),)](ids, low, high, self.count, BLOCK=block)
        return ids, low, high

    def described(self, block: int, piece: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(self.read, [block, piece])


class Guard:
    """Which variants of a kernel to launch: with exponents that are known to be bounded, without, or both.

    The scales may be multiplied by one more `scale` that only the device knows. Unit rows are bounded or not by their
    scales alone. For other rows, if there are many, the device finds `bound`, the largest exponent that their norms
    allow, and both variants are launched; the host never reads it. It is infinite if the lower halves of the ids can't
    distinguish them.
    """

    def __init__(
        self, queries: Operand, keys: Operand | None, scales: Sequence[float], unit: bool, ask: bool = True,
        scale: Tensor | None = None,
    ):  # fmt: skip
        if keys is not None and keys.bias is not None:
            unit = ask = False  # nothing is known about the bias, so the largest exponent is subtracted
        largest = max(abs(a) for a in scales)
        self.limit = SAFE_EXPONENT / largest if largest > 0 else 3e38
        self.many = queries.count * (keys or queries).count >= LARGE
        self.used = ask and self.many and (scale is not None or not unit)
        self.scaled = scale is not None
        self.bound = queries.rows  # any tensor will do: no kernel reads it
        self.scale = queries.rows if scale is None else scale
        # Half precision may round unit rows up a little.
        self.variants = (True, False) if self.used else (unit and scale is None and self.limit >= 1.05,)
        if not self.used:
            return
        sides = [queries] if keys is None else [queries, keys]
        norms = [torch.linalg.vector_norm(side.rows, dim=1, dtype=torch.float32).amax() for side in sides]
        self.bound = norms[0] * norms[-1] if scale is None else norms[0] * norms[-1] * scale.abs()
        if queries.ids is not None and queries.ids.dtype == torch.int64:
            ends = [end.double() for side in sides if side.ids is not None for end in torch.aminmax(side.ids)]
            span = torch.maximum(ends[1], ends[-1]) - torch.minimum(ends[0], ends[-2])
            self.bound = self.bound.masked_fill(span >= 2**32 - 1, torch.inf)

    def narrow(self, bounded: bool) -> bool:
        """Return whether a variant may use the lower halves of the ids."""
        return self.used and bounded
