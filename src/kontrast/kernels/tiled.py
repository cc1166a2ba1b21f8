"""Row statistics tile by tile in plain torch: any device, any float type, memory linear in M + K.

M queries, K keys, D width, S scales.  queries [M,D], keys [K,D], ids [M] and [K], statistics [S,M]; a tile of the
affinity is [rows, columns].  If the queries are the keys, only tiles on and above the diagonal are computed: a tile
serves its rows and, transposed, its columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kontrast.kernels.coefficients import Coefficients, bias_coefficients, coefficients
from kontrast.kernels.dense import accumulation_type

TILE = 512

# exp(x) for |x| up to this stays far from the limits of float32, even if a million of them are summed or one is divided
# by another, so the maximum need not be subtracted.
SAFE_EXPONENT = 40.0


class Affinity:
    """The affinity matrix of queries and keys, computed tile by tile and never stored."""

    def __init__(
        self, queries: Tensor, keys: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None,
        key_bias: Tensor | None = None,
    ):  # fmt: skip
        self.key_bias = key_bias
        self.symmetric = keys is None
        self.queries = queries.to(accumulation_type(queries))
        self.keys = self.queries if keys is None else keys.to(accumulation_type(keys))
        self.query_ids = query_ids
        self.key_ids = query_ids if keys is None else key_ids
        many = max(len(self.queries), len(self.keys)) > TILE
        self.query_spans = id_spans(self.query_ids) if many else []
        self.key_spans = self.query_spans if self.symmetric else id_spans(self.key_ids) if many else []
        self.buffers: dict[str, Tensor] = {}

    def bounded(self, scales: Sequence[Any]) -> bool:
        """Return whether all exponents stay in the safe range; always False on a GPU, to avoid waiting for it."""
        if self.queries.device.type != "cpu":
            return False
        norms = torch.linalg.vector_norm(self.queries, dim=1).max()
        key_norms = norms if self.symmetric else torch.linalg.vector_norm(self.keys, dim=1).max()
        largest = max(abs(a) for a in scales) * norms * key_norms
        return bool((largest if self.key_bias is None else largest + self.key_bias.abs().max()) <= SAFE_EXPONENT)

    def tiles(self, triangle: bool) -> Iterator[tuple[slice, slice]]:
        for start in range(0, len(self.queries), TILE):
            rows = slice(start, min(start + TILE, len(self.queries)))
            for column in range(start if triangle else 0, len(self.keys), TILE):
                yield rows, slice(column, min(column + TILE, len(self.keys)))

    def buffer(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Return memory for one tile. It is reused for every tile: new memory costs more than the arithmetic."""
        if name not in self.buffers:
            self.buffers[name] = self.queries.new_empty(min(TILE, len(self.queries)) * min(TILE, len(self.keys)))
        shape = rows.stop - rows.start, columns.stop - columns.start
        return self.buffers[name][: shape[0] * shape[1]].view(shape)

    def tile(self, rows: slice, columns: slice, factor: float) -> Tensor:
        """Compute factor * s."""
        tile = self.buffer("affinity", rows, columns)
        return torch.addmm(tile, self.queries[rows], self.keys[columns].T, beta=0, alpha=factor, out=tile)

    def scaled(self, tile: Tensor, scale: float | Tensor, rows: slice, columns: slice) -> Tensor:
        """Compute scale * tile, plus the bias of the keys, in a buffer that the caller may overwrite."""
        scaled = torch.mul(tile, scale, out=self.buffer("parts", rows, columns))
        return scaled if self.key_bias is None else scaled.add_(self.key_bias[columns])

    def excluded_pairs(self, rows: slice, columns: slice) -> Tensor | None:
        """Return which pairs of the tile share an id, or None if the ranges of their ids don't overlap."""
        if self.query_ids is None or self.key_ids is None:
            return None
        if self.query_spans and self.key_spans:
            low, high = self.query_spans[rows.start // TILE]
            key_low, key_high = self.key_spans[columns.start // TILE]
            if high < key_low or key_high < low:
                return None
        return self.query_ids[rows, None] == self.key_ids[None, columns]


def id_spans(ids: Tensor | None) -> list[tuple[int, int]]:
    """Return the smallest and largest id of each tile; nothing on a GPU, to avoid waiting for it."""
    if ids is None or ids.device.type != "cpu":
        return []
    return [(int(part.min()), int(part.max())) for part in ids.split(TILE)]


def tiled_forward(
    queries: Tensor, keys: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None,
    scales: Sequence[float], with_mean: bool, key_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return lse [S,M] and mean [S,M], or [S,0] without the mean."""
    affinity = Affinity(queries, keys, query_ids, key_ids, key_bias)
    sums = plain_sums if affinity.bounded(scales) else running_sums
    top, total, weighted = sums(affinity, scales, with_mean)
    lse = top + total.log()
    mean = torch.where(total > 0, weighted / total, 0) if with_mean else lse.new_empty(len(scales), 0)
    return lse, mean


def plain_sums(affinity: Affinity, scales: Sequence[float], with_mean: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return zeros, sum_j exp(a s_ij) and sum_j exp(a s_ij) s_ij, for bounded exponents."""
    total = affinity.queries.new_zeros(len(scales), len(affinity.queries))
    weighted = torch.zeros_like(total)
    # The matrix product multiplies by a single scale at no cost.
    factor = scales[0] if len(scales) == 1 and scales[0] != 0 and affinity.key_bias is None else 1.0
    for rows, columns in affinity.tiles(triangle=affinity.symmetric):
        tile, excluded = affinity.tile(rows, columns, factor), affinity.excluded_pairs(rows, columns)
        mirrored = affinity.symmetric and rows != columns
        for n, scale in enumerate(scales):
            if factor == 1:
                parts = affinity.scaled(tile, scale, rows, columns).exp_()
            else:
                parts = torch.exp(tile, out=affinity.buffer("parts", rows, columns) if with_mean else tile)
            if excluded is not None:
                parts.masked_fill_(excluded, 0)
            add_sums(total[n], parts, rows, columns, mirrored)
            if with_mean:
                add_sums(weighted[n], parts.mul_(tile), rows, columns, mirrored)
    return torch.zeros_like(total), total, weighted.div_(factor)


def add_sums(sums: Tensor, parts: Tensor, rows: slice, columns: slice, mirrored: bool) -> None:
    sums[rows] += parts.sum(dim=1)
    if mirrored:
        sums[columns] += parts.sum(dim=0)


def running_sums(affinity: Affinity, scales: Sequence[float], with_mean: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest exponent of each row and both sums relative to it, for exponents of any size."""
    sums = [RunningSums(affinity.queries, with_mean) for _ in scales]
    for rows, columns in affinity.tiles(triangle=False):
        tile, excluded = affinity.tile(rows, columns, 1.0), affinity.excluded_pairs(rows, columns)
        for n, scale in enumerate(scales):
            exponent = affinity.scaled(tile, scale, rows, columns)
            if excluded is not None:
                exponent.masked_fill_(excluded, -torch.inf)
            sums[n].add(rows, exponent, tile)
    top, total, weighted = (torch.stack(parts) for parts in zip(*((x.top, x.total, x.weighted) for x in sums)))
    return top, total, weighted


class RunningSums:
    """The largest exponent of each row so far, and sum_j exp(x_ij) and sum_j exp(x_ij) s_ij relative to it."""

    def __init__(self, rows: Tensor, with_mean: bool):
        self.with_mean = with_mean
        self.total = rows.new_zeros(len(rows))
        self.weighted = torch.zeros_like(self.total)
        self.top = torch.full_like(self.total, -torch.inf)

    def add(self, rows: slice, exponent: Tensor, tile: Tensor) -> None:
        """Add a tile of exponents x and affinities s to the sums of its rows; the exponents are overwritten."""
        parts, shrink = self.add_parts(rows, exponent)
        if self.with_mean:
            self.weighted[rows] = self.weighted[rows] * shrink + parts.mul_(tile).sum(dim=1)

    def add_bounded(self, rows: slice, parts: Tensor, tile: Tensor) -> None:
        """Add exp(x) of a tile as it is, if all exponents are small."""
        self.top[rows] = 0
        self.total[rows] += parts.sum(dim=1)
        if self.with_mean:
            self.weighted[rows] += (parts * tile).sum(dim=1)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return lse and mean of each row; the mean is empty if it was not wanted."""
        mean = torch.where(self.total > 0, self.weighted / self.total, 0) if self.with_mean else self.total.new_empty(0)
        return self.top + self.total.log(), mean

    def add_parts(self, rows: slice, exponent: Tensor) -> tuple[Tensor, Tensor]:
        """Add to the top and total alone. Return exp(x - top) and the factor by which earlier sums shrink."""
        top = torch.maximum(self.top[rows], exponent.amax(dim=1))
        shift = top.masked_fill(torch.isneginf(top), 0)
        parts = exponent.sub_(shift[:, None]).exp_()
        shrink = torch.exp(self.top[rows] - shift)
        self.total[rows] = self.total[rows] * shrink + parts.sum(dim=1)
        self.top[rows] = top
        return parts, shrink


def tiled_backward(
    grad_lse: Tensor | None, grad_mean: Tensor | None,
    queries: Tensor, keys: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None,
    lse: Tensor, mean: Tensor, scales: Sequence[float], detach_weights: bool, need_queries: bool, need_keys: bool,
    key_bias: Tensor | None = None, need_bias: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of queries, keys and bias; if queries are keys, the first is the whole gradient."""
    affinity = Affinity(queries, keys, query_ids, key_ids, key_bias)
    terms = coefficients(grad_lse, grad_mean, lse, mean, scales, detach_weights)
    bias_terms = bias_coefficients(grad_lse, grad_mean, lse, mean, scales, detach_weights) if need_bias else []
    if affinity.bounded(scales):
        terms, bias_terms = ([term.absorb_lse() for term in group] for group in (terms, bias_terms))
    grad_queries = torch.zeros_like(affinity.queries)
    grad_keys = grad_queries if affinity.symmetric else torch.zeros_like(affinity.keys) if need_keys else None
    grad_bias = None if key_bias is None or not need_bias else torch.zeros_like(key_bias)
    for rows, columns in affinity.tiles(triangle=affinity.symmetric):
        if need_queries or grad_keys is not None:
            gradient = affinity_gradient(affinity, terms, rows, columns)
        if need_queries:
            grad_queries[rows].addmm_(gradient, affinity.keys[columns])
        if grad_keys is not None and not (affinity.symmetric and rows == columns):
            grad_keys[columns].addmm_(gradient.T, affinity.queries[rows])
        if grad_bias is not None:
            grad_bias[columns] += affinity_gradient(affinity, bias_terms, rows, columns).sum(dim=0)
    to_queries = grad_queries.to(queries.dtype) if need_queries else None
    return to_queries, None if keys is None or grad_keys is None else grad_keys.to(keys.dtype), grad_bias


def affinity_gradient(affinity: Affinity, terms: list[Coefficients], rows: slice, columns: slice) -> Tensor:
    """Return d loss / d s of one tile; if the queries are the keys, the sum of those of s_ij and s_ji."""
    groups = [group for term in terms for group in group_sides(term, rows, columns, affinity.symmetric)]
    alone = len(groups) == 1 and groups[0][0].beta is None and affinity.key_bias is None
    tile = affinity.tile(rows, columns, terms[0].scale if alone else 1.0)
    excluded = affinity.excluded_pairs(rows, columns)
    gradient = tile if alone else affinity.buffer("gradient", rows, columns).zero_()
    for group in groups:
        parts = tile if alone else affinity.scaled(tile, group[0].scale, rows, columns)
        if group[0].lse is not None:
            parts.sub_(group[0].lse)
        parts.exp_().mul_(sum_sides(affinity, tile, group, rows, columns))
        if not alone:
            gradient += parts
    return gradient if excluded is None else gradient.masked_fill_(excluded, 0)


def group_sides(term: Coefficients, rows: slice, columns: slice, symmetric: bool) -> list[list[Coefficients]]:
    """Group the sides of a pair that share one exponential: both do, unless the exponent contains their lse."""
    sides = [term.select((rows, None)), *([term.select((None, columns))] if symmetric else [])]
    return [sides] if term.lse is None else [[side] for side in sides]


def sum_sides(affinity: Affinity, tile: Tensor, group: list[Coefficients], rows: slice, columns: slice) -> Tensor:
    """Return alpha + beta s, summed over the sides of a pair."""
    total = group[0].alpha
    if len(group) == 2:
        total = torch.add(total, group[1].alpha, out=affinity.buffer("coefficients", rows, columns))
    for side in group:
        if side.beta is not None:
            total = total + side.beta * tile
    return total
