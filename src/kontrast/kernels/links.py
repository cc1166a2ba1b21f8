"""Row statistics of views: of each query view against all key views, or of each link (a query view with a key view).

V query views of B images, W key views of N images, D width, S scales, P links.  queries [V,B,D], keys [W,N,D], ids [B]
and [N];  statistics [V,B] or [P,B], for S scales [S,V,B] or [S,P,B].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kontrast.kernels.custom_gradient import Operation
from kontrast.kernels.dense import affinity, affinity_statistics, in_torch_func
from kontrast.kernels.row_statistics import RowStatistics, as_list, interpreted, row_statistics

Link = tuple[int, int]

ALL, SAME, LATER, OTHER, EACH = range(5)
"""Which links a kernel for small batches computes: of each query view with all key views together, with the key view of
the same index, with each later one, with each other one, or with each one."""

SMALL = {"cpu": 2**16, "cuda": 2**22}
"""Up to this many pairs of rows (on the CPU, of each link) the statistics of all links are computed together, on a CUDA
device by one kernel for small batches: for so little work, launches cost more than the arithmetic. `benchmarks/links.py`
times both ways."""
WIDEST = 256
"""The widest rows that the kernel for small batches takes."""


def link_statistics(
    queries: Tensor, keys: Tensor | None, links: Sequence[Link] | None, *, scale: float | Sequence[float],
    query_ids: Tensor | None = None, key_ids: Tensor | None = None, start: int = 0,
    with_mean: bool = False, detach_weights: bool = False, unit: bool = False,
) -> RowStatistics:  # fmt: skip
    """Return the statistics of each query view against all key views, or of each link against its key view alone.

    `keys=None` means that the queries are the keys. Links are sorted by query view and then by key view. Pairs of the
    same image are excluded: images with equal ids, or without ids those with the same index, where the queries are the
    images from `start` on. `unit` promises that no row is longer than one.
    """
    scales = as_list(scale)
    kind = kind_of_links(queries, keys, links)
    options: dict[str, Any] = {"with_mean": with_mean, "detach_weights": detach_weights}
    if kind is not None and len(scales) <= 2 and fits_small_kernel(queries, keys):
        single = not isinstance(scale, Sequence)
        count = len(queries) if links is None else len(links)
        arguments = query_ids, key_ids, kind, count, start, scales, detach_weights, with_mean, single
        return RowStatistics(*small_batch(queries, keys, *arguments))
    if query_ids is None or key_ids is None:
        N = (queries if keys is None else keys).shape[1]
        query_ids, key_ids = image_indices(queries.shape[1], start, queries.device), image_indices(N, 0, queries.device)
    if links is None:
        repeated = query_ids.repeat(len(queries))
        rows = row_statistics(
            queries.flatten(0, 1), None if keys is None else keys.flatten(0, 1), scale=scale, query_ids=repeated,
            key_ids=None if keys is None else key_ids.repeat(len(keys)), unit=unit, **options,
        )  # fmt: skip
        # By the quotient, because -1 can't be inferred for an empty mean.
        return RowStatistics(*(x.view(*x.shape[:-1], len(queries), x.shape[-1] // len(queries)) for x in rows))
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


def image_indices(count: int, start: int, device: torch.device) -> Tensor:
    return torch.arange(start, start + count, device=device)


# Small batches on a CUDA device


def kind_of_links(queries: Tensor, keys: Tensor | None, links: Sequence[Link] | None) -> int | None:
    """Return which of the kernel's cases the links are, or None."""
    if links is None:
        return ALL
    V, W = len(queries), len(queries if keys is None else keys)
    return next((kind for kind, case in cases_of_links(V, W).items() if case == list(links)), None)


def cases_of_links(V: int, W: int) -> dict[int, list[Link]]:
    every = [(v, w) for v in range(V) for w in range(W)]
    same, later = [link for link in every if link[0] == link[1]], [link for link in every if link[0] < link[1]]
    return {SAME: same, LATER: later, OTHER: [link for link in every if link[0] != link[1]], EACH: every}


def fits_small_kernel(queries: Tensor, keys: Tensor | None) -> bool:
    """Return whether the kernel for small batches can take the views, and is the faster way."""
    if torch.compiler.is_compiling() or in_torch_func() or queries.dtype == torch.float64:
        return False
    rows = queries.shape[0] * queries.shape[1]
    columns = rows if keys is None else keys.shape[0] * keys.shape[1]
    native = queries.is_cuda or interpreted(queries)
    return native and queries.shape[2] <= WIDEST and rows * columns <= SMALL["cuda"]


def small_forward(
    queries: Tensor, keys: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None,
    kind: int, count: int, start: int, scales: list[float], detach_weights: bool, with_mean: bool, single: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return lse and mean [S,P,B], or [P,B] of a `single` scale; the mean is empty if it is not wanted."""
    from kontrast.kernels.triton_views_launch import triton_views_forward

    lse, mean = triton_views_forward(queries, keys, query_ids, key_ids, kind, count, start, scales, with_mean)
    return (lse.squeeze(0), mean.squeeze(0)) if single else (lse, mean)


def small_backward(
    grads: list[Tensor | None], outputs: list[Tensor], needs: list[bool],
    queries: Tensor, keys: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None,
    kind: int, count: int, start: int, scales: list[float], detach_weights: bool, with_mean: bool, single: bool,
) -> list[Tensor]:  # fmt: skip
    """Return the needed gradients of queries and keys."""
    from kontrast.kernels.triton_views_launch import triton_views_backward

    grad_lse, grad_mean = grads[0], grads[1] if with_mean else None
    lse, mean = outputs
    if single:
        lse, mean = lse[None], mean[None]
        grad_lse, grad_mean = (None if grad is None else grad[None] for grad in (grad_lse, grad_mean))
    found = triton_views_backward(
        grad_lse, grad_mean, queries, keys, query_ids, key_ids, lse, mean, kind, start, scales, detach_weights,
        needs[0], needs[1],
    )  # fmt: skip
    return [part for part, need in zip(found, needs) if need and part is not None]


def small_definition(
    queries: Tensor, keys: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None,
    kind: int, count: int, start: int, scales: list[float], detach_weights: bool, with_mean: bool, single: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the same from the whole matrix."""
    others = queries if keys is None else keys
    (V, B, _), (W, N, _) = queries.shape, others.shape
    if query_ids is None:
        query_ids, key_ids = image_indices(B, start, queries.device), image_indices(N, 0, queries.device)
    key_ids = query_ids if keys is None else key_ids
    assert key_ids is not None
    if kind == ALL:
        s = affinity(queries.flatten(0, 1), others.flatten(0, 1)).view(V, B, W * N)
        excluded = (query_ids[:, None] == key_ids).repeat(1, W)
        lse, mean = affinity_statistics(s, excluded, scales, detach_weights, with_mean)
    else:
        links = cases_of_links(V, W)[kind]
        lse, mean = from_one_matrix(queries, others, links, scales, query_ids, key_ids, detach_weights, with_mean)
    return (lse[0], mean[0]) if single else (lse, mean)


def small_shapes(
    queries: Tensor, keys: Any, query_ids: Any, key_ids: Any, kind: int, count: int, start: int, scales: list[float],
    detach_weights: bool, with_mean: bool, single: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    scale = () if single else (len(scales),)
    lse = queries.new_empty(*scale, count, queries.shape[1], dtype=torch.float32)
    return lse, torch.empty_like(lse) if with_mean else lse.new_empty(*scale, count, 0)


small_batch = Operation(
    "small_batch_statistics",
    "Tensor queries, Tensor? keys, Tensor? query_ids, Tensor? key_ids, int kind, int count, int start, "
    "float[] scales, bool detach_weights, bool with_mean, bool single",
    2, forward=small_forward, backward=small_backward, definition=small_definition, shapes=small_shapes,
)  # fmt: skip


# Few pairs per link: one stored matrix


def fits_one_matrix(queries: Tensor, keys: Tensor | None, links: int) -> bool:
    """Return whether all views together have few enough rows, and a plain matrix product keeps float32's precision."""
    rows = queries.shape[0] * queries.shape[1]
    columns = rows if keys is None else keys.shape[0] * keys.shape[1]
    rounded = queries.is_cuda and queries.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    few = 2**17 if queries.is_cuda else SMALL["cpu"]
    return rows * columns <= links * few and not rounded


def from_one_matrix(
    queries: Tensor, keys: Tensor, links: Sequence[Link], scales: list[float],
    query_ids: Tensor, key_ids: Tensor, detach_weights: bool, with_mean: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return lse and mean [S,P,B] of all links, from the affinity of every query view with every key view."""
    (V, B, _), (W, N, _) = queries.shape, keys.shape
    s = affinity(queries.flatten(0, 1), keys.flatten(0, 1)).view(V, B, W, N)
    excluded = query_ids[:, None, None] == key_ids
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
