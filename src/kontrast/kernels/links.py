"""Row statistics of views: of each query view against all key views, or of each link (a query view with a key view).

V query views of B images, W key views of N images, D width, S scales, P links.  queries [V,B,D], keys [W,N,D], ids [B]
and [N];  statistics [V,B] or [P,B], for S scales [S,V,B] or [S,P,B].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kontrast.kernels.row_statistics import RowStatistics, Scale, as_list, row_statistics
from kontrast.kernels.small_batch import fits_small_kernel, small_batch
from kontrast.kernels.two_way_statistics import two_way_statistics
from kontrast.kernels.view_links import Link, from_one_matrix, image_indices, kind_of_links

SMALL = {"cpu": 2**16, "cuda": 2**17}
"""Up to this many pairs of rows per link, the statistics of all links are made from one stored matrix: for so little
work, launching kernels for each link costs more than the arithmetic. `benchmarks/links.py` times both ways."""


def link_statistics(
    queries: Tensor, keys: Tensor | None, links: Sequence[Link] | None, *, scale: Scale,
    query_ids: Tensor | None = None, key_ids: Tensor | None = None, start: int = 0,
    with_mean: bool = False, detach_weights: bool = False, unit: bool = False,
) -> RowStatistics:  # fmt: skip
    """Return the statistics of each query view against all key views, or of each link against its key view alone.

    `keys=None` means that the queries are the keys. Links are sorted by query view and then by key view. Pairs of the
    same image are excluded: images with equal ids, or without ids those with the same index, where the queries are the
    images from `start` on. `unit` promises that no row is longer than one. The two directions of one pair of views
    share their matrix.
    """
    scales = as_list(scale)
    kind = kind_of_links(queries, keys, links)
    options: dict[str, Any] = {"with_mean": with_mean, "detach_weights": detach_weights}
    numbers = not any(isinstance(a, Tensor) for a in scales)
    if kind is not None and numbers and len(scales) <= 2 and fits_small_kernel(queries, keys):
        single = not isinstance(scale, Sequence)
        count = len(queries) if links is None else len(links)
        arguments = query_ids, key_ids, kind, count, start, scales, detach_weights, with_mean, single
        return RowStatistics(*small_batch(queries, keys, *arguments))
    if query_ids is None or key_ids is None:
        query_ids = key_ids = image_indices(queries.shape[1], start, queries.device)
        if keys is not None:
            key_ids = image_indices(keys.shape[1], 0, keys.device)
    if links is None:
        repeated = query_ids.repeat(len(queries))
        rows = row_statistics(
            queries.flatten(0, 1), None if keys is None else keys.flatten(0, 1), scale=scale, query_ids=repeated,
            key_ids=None if keys is None else key_ids.repeat(len(keys)), unit=unit, **options,
        )  # fmt: skip
        # By the quotient, because -1 can't be inferred for an empty mean.
        return RowStatistics(*(x.view(*x.shape[:-1], len(queries), x.shape[-1] // len(queries)) for x in rows))
    if keys is None and list(links) == [(0, 1), (1, 0)] and not isinstance(scale, Sequence) and not is_per_row(scale):
        return both_directions(queries[0], queries[1], scale, query_ids, unit, options)
    if len(links) > 1 and fits_one_matrix(queries, keys, len(links)):
        both = queries if keys is None else keys
        lse, mean = from_one_matrix(queries, both, links, scales, query_ids, key_ids, detach_weights, with_mean)
        return RowStatistics(lse, mean) if isinstance(scale, Sequence) else RowStatistics(lse[0], mean[0])
    views = queries.unbind()
    others = views if keys is None else keys.unbind()
    parts = [
        row_statistics(
            views[v], None if views[v] is others[w] else others[w], scale=scale, query_ids=query_ids,
            key_ids=None if views[v] is others[w] else key_ids, unit=unit, **options,
        )
        for v, w in links
    ]  # fmt: skip
    return RowStatistics(torch.stack([part.lse for part in parts], -2), torch.stack([part.mean for part in parts], -2))


def both_directions(
    first: Tensor, second: Tensor, scale: float | Tensor, ids: Tensor, unit: bool, options: dict[str, Any]
) -> RowStatistics:
    """Return the statistics of the first view against the second, and of the second against the first: [2,B]."""
    rows, columns = two_way_statistics(
        first, second, scale=scale, query_ids=ids, key_ids=ids, unit=unit, **options,
        implementation="dense" if is_small(first, len(first) * len(second)) else "auto",
    )  # fmt: skip
    return RowStatistics(torch.stack([rows.lse, columns.lse]), torch.stack([rows.mean, columns.mean]))


def is_per_row(scale: float | Tensor) -> bool:
    return isinstance(scale, Tensor) and scale.ndim > 0


def is_small(rows: Tensor, pairs: int) -> bool:
    """Return whether there are few enough pairs of rows, and a plain matrix product keeps float32's precision."""
    rounded = rows.is_cuda and rows.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return pairs <= SMALL.get(rows.device.type, 0) and not rounded


def fits_one_matrix(queries: Tensor, keys: Tensor | None, links: int) -> bool:
    """Return whether all views together have few enough rows."""
    rows = queries.shape[0] * queries.shape[1]
    columns = rows if keys is None else keys.shape[0] * keys.shape[1]
    return is_small(queries, rows * columns // links)
