"""Launch the Triton kernels for small batches of views.

V query views of B images, W key views of N images, D width, S scales, P links.  queries [V,B,D], keys [W,N,D], ids [B]
and [N];  statistics and their gradients [S,P,B].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kontrast.kernels import triton_small_batch as kernels
from kontrast.kernels.dense import INTERPRETED
from kontrast.kernels.row_loss import DEBIASED, RowLoss
from kontrast.kernels.triton_operands import ceil_div, power_of_two

LOG2_E = math.log2(math.e)

# Precision of the two products, s and the gradient; that of fp16 needs the range of tf32.
PRECISIONS = {torch.float32: ("tf32x3", "tf32x3"), torch.float16: ("ieee", "tf32"), torch.bfloat16: ("ieee", "ieee")}


@functools.cache
def block_sizes(D: int, dtype: torch.dtype) -> dict[str, Any]:
    width = max(16, power_of_two(D))
    columns = 64 if width * dtype.itemsize <= 256 else 32
    return {"BLOCK_M": 16, "BLOCK_N": columns, "BLOCK_D": width, "num_warps": 4, "num_stages": 2}


STORED_BLOCKS = {"BLOCK_M": 4, "BLOCK_N": 256, "BLOCK_D": 16, "num_warps": 4, "num_stages": 2}


def readable(rows: Tensor | None) -> Any:
    """Return rows as the kernels read them. The interpreter can't multiply bf16, and float32 represents it exactly."""
    if rows is None:
        return None
    return (rows.float() if INTERPRETED and rows.dtype == torch.bfloat16 else rows).contiguous()


def triton_views_forward(
    queries: Tensor, keys: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None,
    links: int, count: int, start: int, scales: Sequence[float], with_mean: bool,
    similarities: Tensor | None = None, positive: bool = False, matrix: Tensor | None = None,
    loss: RowLoss | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return lse and mean [S,P,B], and with `similarities` [L,B] the attraction [P,B]; empty if they are not wanted.

    `start` is the image index of the first query. If `positive`, the similarities count in lse too. `matrix` is s
    [V*B,W*N], if it is stored. With a `loss`, the loss of each row [P,B] takes the place of the attraction, and for
    HN-CL's repulsion its slopes [3,P,B] come last.
    """
    queries, keys = readable(queries), readable(keys)
    others = queries if keys is None else keys
    (V, B, D), (W, N, _) = queries.shape, others.shape
    lse = queries.new_empty(len(scales), count, B, dtype=torch.float32)
    if with_mean:
        mean = torch.empty_like(lse)
    else:
        mean = lse if loss is not None else lse.new_empty(len(scales), count, 0)
    slopes = lse
    if loss is not None and loss.repulsion == DEBIASED:
        slopes = lse.new_empty(3, count, B)
    blocks = block_sizes(D, queries.dtype) if matrix is None else STORED_BLOCKS
    grid = ceil_div(B, blocks["BLOCK_M"]), V if links == 0 else V * W
    attraction = lse if similarities is None else lse.new_empty(count, B)
    arguments = [
        queries, others, queries if matrix is None else matrix, lse if similarities is None else similarities,
        queries if query_ids is None else query_ids, queries if key_ids is None else key_ids,
        lse, mean, attraction, slopes, V, W, B, N, D, count, start, scales[0] * LOG2_E, scales[-1] * LOG2_E,
        *((0.0,) * 6 if loss is None else loss.numbers),
    ]  # fmt: skip
    constants = {
        "LINKS": links, "SCALES": len(scales), "HAS_IDS": query_ids is not None, "WITH_MEAN": with_mean,
        "STORED": matrix is not None, "POSITIVE": positive, "ATTRACTION": loss is None and similarities is not None,
        "REPULSION": 0 if loss is None else loss.repulsion,
        "TEACHER": keys is not None, "PRECISION": PRECISIONS[queries.dtype][0], **blocks,
    }  # fmt: skip
    kernels.views_forward[grid](*arguments, **constants)
    return lse, mean, attraction if similarities is not None else lse.new_empty(0), slopes


class SmallBatch(NamedTuple):
    """What the backward pass of a small batch needs: statistics [S,P,B] and arguments of the forward pass."""

    lse: Tensor
    mean: Tensor
    links: int
    start: int
    scales: Sequence[float]
    detach_weights: bool


def triton_views_backward(
    grad_lse: Tensor | None, grad_mean: Tensor | None,
    queries: Tensor, keys: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None, batch: SmallBatch,
    need_queries: bool = True, need_keys: bool = False,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of queries and keys; if the queries are the keys, the first is the whole gradient."""
    kind = queries.dtype
    queries, keys = readable(queries), readable(keys)
    (V, B, D), W = queries.shape, queries.shape[0] if keys is None else keys.shape[0]
    lse, mean, links, start, scales, detach_weights = batch
    precision, second_precision = PRECISIONS[queries.dtype]
    strides = [(0, 0, 0) if grad is None else grad.stride() for grad in (grad_lse, grad_mean)]
    blocks = block_sizes(D, queries.dtype)

    def launch(
        rows: Tensor, columns: Tensor, row_ids: Tensor | None, column_ids: Tensor | None,
        first: int, column_first: int, row_side: bool, column_side: bool,
    ) -> Tensor:  # fmt: skip
        out = torch.empty_like(rows, dtype=kind)
        arguments = [
            rows, columns, rows if row_ids is None else row_ids, rows if column_ids is None else column_ids,
            lse, mean, lse if grad_lse is None else grad_lse, lse if grad_mean is None else grad_mean, out,
            V, W, rows.shape[1], columns.shape[1], D, B, lse.shape[1], first, column_first, scales[0], scales[-1],
            *strides[0], *strides[1],
        ]  # fmt: skip
        constants = {
            "LINKS": links, "SCALES": len(scales), "HAS_IDS": row_ids is not None,
            "ROW_SIDE": row_side, "COLUMN_SIDE": column_side,
            "HAS_LSE": grad_lse is not None, "HAS_MEAN": grad_mean is not None, "DETACHED": detach_weights,
            "PRECISION": precision, "SECOND_PRECISION": second_precision, "WIDE": rows.dtype == torch.float16, **blocks,
        }  # fmt: skip
        grid = ceil_div(rows.shape[1], blocks["BLOCK_M"]), rows.shape[0]
        kernels.views_backward[grid](*arguments, **constants)
        return out

    if keys is None:
        return launch(queries, queries, query_ids, query_ids, start, start, True, True), None
    to_queries = launch(queries, keys, query_ids, key_ids, start, 0, True, False) if need_queries else None
    return to_queries, launch(keys, queries, key_ids, query_ids, 0, start, False, True) if need_keys else None


def triton_stored_gradient(
    grad_lse: Tensor | None, grad_mean: Tensor | None,
    matrix: Tensor, shape: tuple[int, int, int, int], symmetric: bool,
    query_ids: Tensor | None, key_ids: Tensor | None, batch: SmallBatch, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return d loss / d s [V*B,W*N]; if the queries are the keys, the sum of those of s_ij and s_ji."""
    V, W, B, N = shape
    lse, mean, links, start, scales, detach_weights = batch
    out = torch.empty_like(matrix, dtype=dtype)
    strides = [(0, 0, 0) if grad is None else grad.stride() for grad in (grad_lse, grad_mean)]
    arguments = [
        matrix, matrix if query_ids is None else query_ids, matrix if key_ids is None else key_ids,
        lse, mean, lse if grad_lse is None else grad_lse, lse if grad_mean is None else grad_mean, out,
        V, W, B, N, lse.shape[1], start, scales[0], scales[-1], *strides[0], *strides[1],
    ]  # fmt: skip
    constants = {
        "LINKS": links, "SCALES": len(scales), "HAS_IDS": query_ids is not None, "COLUMN_SIDE": symmetric,
        "HAS_LSE": grad_lse is not None, "HAS_MEAN": grad_mean is not None, "DETACHED": detach_weights,
        "BLOCK_M": 16, "BLOCK_N": 128, "num_warps": 4,
    }  # fmt: skip
    grid = ceil_div(B, 16), ceil_div(N, 128), V * W
    kernels.stored_gradient[grid](*arguments, **constants)
    return out
