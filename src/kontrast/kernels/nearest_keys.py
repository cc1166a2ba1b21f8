"""The nearest key of each query: the maximum of each row of the affinity matrix and where it is.

M queries, K keys, D width.  queries [M,D], keys [K,D], ids [M] and [K];  similarity and index [M]; a tile of the
affinity is [rows, columns].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kontrast.kernels.dense import accumulation_type, affinity, equal_ids, in_torch_func
from kontrast.kernels.row_statistics import check_arguments, choose_implementation
from kontrast.kernels.tiled import Affinity


def nearest_keys(
    queries: Tensor, keys: Tensor | None = None, *,
    query_ids: Tensor | None = None, key_ids: Tensor | None = None, implementation: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    r"""Find the key with the largest similarity to each query; the similarity has exact gradients.

        index_i = argmax_j <q_i, k_j>,   similarity_i = <q_i, k_index_i>       pairs with equal ids are excluded

    The first key wins a tie. A row without pairs has similarity -inf, index -1 and no gradient. The similarity has a
    gradient to the query and to the chosen key. In half precision, products are summed in float32.

    Args:
        queries: rows q, float64, float32, bfloat16 or float16.
        keys: rows k of the same type. None means that the queries are the keys; give ids to exclude a row itself.
        query_ids: an int64 per query, usually the index of its image. None excludes no pairs.
        key_ids: an int64 per key. Not allowed without keys, because `query_ids` then serve both sides.
        implementation: `dense` (the definition), `tiled` (plain torch), `triton` (CUDA), or `auto` by device.

    Shape:
        queries [M,D], keys [K,D], query_ids [M], key_ids [K]; similarity [M] and index [M] int64.

    Example:
        >>> nearest_keys(torch.eye(2), torch.tensor([[0.6, 0.8], [0.8, 0.6]]))
        (tensor([0.8000, 0.8000]), tensor([1, 0]))
    """
    check_arguments(queries, keys, query_ids, key_ids, implementation)
    if implementation == "dense" or (implementation == "auto" and in_torch_func()):
        index = dense_index(queries.detach(), None if keys is None else keys.detach(), query_ids, key_ids)
    else:
        compute: Any = index_operator if torch.compiler.is_compiling() else nearest_index
        how = choose_implementation(implementation, queries)
        index = compute(queries.detach(), None if keys is None else keys.detach(), query_ids, key_ids, how)
    kind = accumulation_type(queries)
    # Cast before selecting: a key that many queries choose would otherwise sum its gradient in half precision.
    chosen = (queries if keys is None else keys).to(kind).index_select(0, index.clamp(min=0))
    similarity = (queries.to(kind) * chosen).sum(dim=1)  # elementwise, because a matmul may round to tf32
    return similarity.masked_fill(index < 0, -torch.inf), index


def dense_index(queries: Tensor, keys: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None) -> Tensor:
    """Return the index of the nearest key [M] by definition."""
    keys, key_ids = (queries, query_ids) if keys is None else (keys, key_ids)
    s, excluded = affinity(queries, keys), equal_ids(query_ids, key_ids)
    if excluded is None:
        return s.argmax(dim=1)
    return s.masked_fill(excluded, -torch.inf).argmax(dim=1).masked_fill(excluded.all(dim=1), -1)


def nearest_index(
    queries: Tensor, keys: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None, implementation: str
) -> Tensor:
    """Return the index of the nearest key [M], -1 for a row without pairs."""
    if implementation == "triton":
        from kontrast.kernels.triton_nearest import triton_nearest

        return triton_nearest(queries, keys, query_ids, key_ids)
    return tiled_index(queries, keys, query_ids, key_ids)


index_operator = torch.library.custom_op("kontrast::nearest_index", nearest_index, mutates_args=())


@index_operator.register_fake
def _(queries: Tensor, *rest: Any) -> Tensor:
    return queries.new_empty(queries.shape[0], dtype=torch.int64)


def tiled_index(queries: Tensor, keys: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None) -> Tensor:
    """Return the index of the nearest key [M], tile by tile."""
    matrix = Affinity(queries, keys, query_ids, key_ids)
    best = matrix.queries.new_full((len(queries),), -torch.inf)
    index = torch.full_like(best, -1, dtype=torch.int64)
    for rows, columns in matrix.tiles(triangle=False):
        tile, excluded = matrix.tile(rows, columns, 1.0), matrix.excluded_pairs(rows, columns)
        if excluded is not None:
            tile.masked_fill_(excluded, -torch.inf)
        top, place = tile.max(dim=1)
        nearer = top > best[rows]  # an equal key in a later tile doesn't replace the first one
        best[rows] = torch.where(nearer, top, best[rows])
        index[rows] = torch.where(nearer, place + columns.start, index[rows])
    return index
