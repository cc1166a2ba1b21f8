"""Which views are compared with which, and the statistics of all links from one stored matrix.

V query views of B images, W key views of N images, D width, S scales, P links (a query view with a key view).  queries
[V,B,D], keys [W,N,D], ids [B] and [N];  statistics [S,P,B].
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from kontrast.kernels.dense import affinity, affinity_statistics

Link = tuple[int, int]

ALL, SAME, LATER, OTHER, EACH = range(5)
"""Which links the kernels for small batches compute: of each query view with all key views together, with the key view
of the same index, with each later one, with each other one, or with each one."""


def image_indices(count: int, start: int, device: torch.device) -> Tensor:
    return torch.arange(start, start + count, device=device)


def kind_of_links(queries: Tensor, keys: Tensor | None, links: Sequence[Link] | None) -> int | None:
    """Return which of the kernel's cases the links are, or None."""
    if links is None:
        return ALL
    V, W = len(queries), len(queries if keys is None else keys)
    return next((kind for kind, case in cases_of_links(V, W).items() if case == list(links)), None)


@functools.cache
def cases_of_links(V: int, W: int) -> dict[int, list[Link]]:
    every = [(v, w) for v in range(V) for w in range(W)]
    same, later = [link for link in every if link[0] == link[1]], [link for link in every if link[0] < link[1]]
    return {SAME: same, LATER: later, OTHER: [link for link in every if link[0] != link[1]], EACH: every}


def from_one_matrix(
    queries: Tensor, keys: Tensor, links: Sequence[Link], scales: Sequence[float | Tensor],
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
