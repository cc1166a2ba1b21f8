"""Row statistics of views, for each link (a query view with a key view) separately.

V query views of B images, W key views of N images, D width, S scales, P links.  queries [V,B,D], keys [W,N,D], ids [B]
and [N];  statistics [P,B], for S scales [S,P,B].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kontrast.kernels.dense import affinity, affinity_statistics
from kontrast.kernels.row_statistics import RowStatistics, Scale, as_list, row_statistics

Link = tuple[int, int]

SMALL = {"cpu": 2**16, "cuda": 2**17}
"""Up to this many pairs of rows per link, the statistics of all links are made from one stored matrix: for so little
work, launching kernels for each link costs more than the arithmetic. `benchmarks/links.py` times both ways."""


def link_statistics(
    queries: Tensor, keys: Tensor | None, links: Sequence[Link], *, scale: Scale,
    query_ids: Tensor, key_ids: Tensor, with_mean: bool = False, detach_weights: bool = False,
) -> RowStatistics:  # fmt: skip
    """Return the statistics of each link's query view against its key view alone.

    `keys=None` means that the queries are the keys. Links are sorted by query view and then by key view.
    """
    if len(links) > 1 and fits_one_matrix(queries, keys, len(links)):
        lse, mean = from_one_matrix(
            queries, queries if keys is None else keys, links, as_list(scale), query_ids, key_ids, detach_weights,
            with_mean,
        )  # fmt: skip
        return RowStatistics(lse, mean) if isinstance(scale, Sequence) else RowStatistics(lse[0], mean[0])
    rows = queries.unbind()
    columns = rows if keys is None else keys.unbind()
    parts = [
        row_statistics(
            rows[v], None if rows[v] is columns[w] else columns[w], scale=scale, query_ids=query_ids,
            key_ids=None if rows[v] is columns[w] else key_ids, with_mean=with_mean, detach_weights=detach_weights,
        )
        for v, w in links
    ]  # fmt: skip
    return RowStatistics(torch.stack([part.lse for part in parts], -2), torch.stack([part.mean for part in parts], -2))


def fits_one_matrix(queries: Tensor, keys: Tensor | None, links: int) -> bool:
    """Return whether all views together have few enough rows, and a plain matrix product keeps float32's precision."""
    rows = queries.shape[0] * queries.shape[1]
    columns = rows if keys is None else keys.shape[0] * keys.shape[1]
    rounded = queries.is_cuda and queries.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return rows * columns <= links * SMALL.get(queries.device.type, 0) and not rounded


def from_one_matrix(
    queries: Tensor, keys: Tensor, links: Sequence[Link], scales: list[float | Tensor],
    query_ids: Tensor, key_ids: Tensor, detach_weights: bool, with_mean: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return lse and mean [S,P,B] of all links, from the affinity of every query view with every key view."""
    (V, B, _), (W, N, _) = queries.shape, keys.shape
    s = affinity(queries.flatten(0, 1), keys.flatten(0, 1)).view(V, B, W, N)
    excluded = query_ids[:, None, None] == key_ids
    scales = [a.to(s)[..., None, None] if isinstance(a, Tensor) else a for a in scales]  # [1,1] or [B,1,1]
    lse, mean = affinity_statistics(s, excluded, scales, detach_weights, with_mean)
    no_mean = mean.new_empty(len(scales), len(links), 0)
    return select_links(lse, links), select_links(mean, links) if with_mean else no_mean


def select_links(statistics: Tensor, links: Sequence[Link]) -> Tensor:
    """Select the links [S,P,B] from the statistics of every query view with every key view [S,V,B,W]."""
    W = statistics.shape[-1]
    rows, sizes, end = statistics.transpose(-1, -2).flatten(-3, -2), [], 0
    for v, w in links:
        sizes += [v * W + w - end, 1]
        end = v * W + w + 1
    # One split, gaps included: an index per link would have a gradient as large as all rows together.
    return torch.cat(rows.split([*sizes, rows.shape[-2] - end], dim=-2)[1::2], dim=-2)
