"""Row statistics tile by tile in plain torch: any device, any float type, memory linear in M + K.

M queries, K keys, D width, S scales.  queries [M,D], keys [K,D], ids [M] and [K], statistics [S,M]; a tile of the
affinity is [rows, columns].  Where queries are keys only tiles on and above the diagonal are made: one tile serves its
rows and, transposed, its columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kontrast.kernels.coefficients import Coefficients, coefficients
from kontrast.kernels.dense import working_type

TILE = 512

# exp(x) for |x| up to this is far from both ends of float32, also when a million of them are summed or one of them is
# divided by another, so no maximum has to be subtracted.
SAFE_EXPONENT = 40.0


class Affinity:
    """The affinity matrix of queries and keys, handed out in tiles and never stored."""

    def __init__(self, queries: Tensor, keys: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None):
        self.symmetric = keys is None
        self.queries = queries.to(working_type(queries))
        self.keys = self.queries if keys is None else keys.to(working_type(keys))
        self.query_ids = query_ids
        self.key_ids = query_ids if keys is None else key_ids
        several = max(len(self.queries), len(self.keys)) > TILE
        self.query_spans = id_spans(self.query_ids) if several else []
        self.key_spans = self.query_spans if self.symmetric else id_spans(self.key_ids) if several else []
        self.buffers: dict[str, Tensor] = {}

    def bounded(self, scales: Sequence[float]) -> bool:
        """Whether no exponent can leave the safe range; asked on the CPU alone: there is no device to wait for."""
        if self.queries.device.type != "cpu":
            return False
        norms = torch.linalg.vector_norm(self.queries, dim=1).max()
        key_norms = norms if self.symmetric else torch.linalg.vector_norm(self.keys, dim=1).max()
        return bool(max(abs(a) for a in scales) * norms * key_norms <= SAFE_EXPONENT)

    def tiles(self, triangle: bool) -> Iterator[tuple[slice, slice]]:
        for start in range(0, len(self.queries), TILE):
            for column in range(start if triangle else 0, len(self.keys), TILE):
                yield (
                    slice(start, min(start + TILE, len(self.queries))),
                    slice(column, min(column + TILE, len(self.keys))),
                )

    def buffer(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Room for one tile, made once and used for every tile: fresh memory costs more than the arithmetic on it."""
        if name not in self.buffers:
            self.buffers[name] = self.queries.new_empty(min(TILE, len(self.queries)) * min(TILE, len(self.keys)))
        shape = rows.stop - rows.start, columns.stop - columns.start
        return self.buffers[name][: shape[0] * shape[1]].view(shape)

    def tile(self, rows: slice, columns: slice, factor: float) -> Tensor:
        """factor * s."""
        tile = self.buffer("affinity", rows, columns)
        return torch.addmm(tile, self.queries[rows], self.keys[columns].T, beta=0, alpha=factor, out=tile)

    def scaled(self, tile: Tensor, scale: float, rows: slice, columns: slice) -> Tensor:
        """scale * tile, in a buffer of its own that may be overwritten."""
        return torch.mul(tile, scale, out=self.buffer("parts", rows, columns))

    def left_out(self, rows: slice, columns: slice) -> Tensor | None:
        """Which pairs of the tile share an id; None where the ranges of ids say that none can."""
        if self.query_ids is None or self.key_ids is None:
            return None
        if self.query_spans and self.key_spans:
            low, high = self.query_spans[rows.start // TILE]
            key_low, key_high = self.key_spans[columns.start // TILE]
            if high < key_low or key_high < low:
                return None
        return self.query_ids[rows, None] == self.key_ids[None, columns]


def id_spans(ids: Tensor | None) -> list[tuple[int, int]]:
    """Smallest and largest id of each tile, on the CPU; elsewhere reading them would be waited for."""
    if ids is None or ids.device.type != "cpu":
        return []
    return [(int(part.min()), int(part.max())) for part in ids.split(TILE)]


def common_factor(scales: Sequence[float]) -> float:
    """A single scale is multiplied in by the matrix product itself, at no cost."""
    return scales[0] if len(scales) == 1 and scales[0] != 0 else 1.0


def tiled_forward(
    queries: Tensor,
    keys: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    scales: Sequence[float],
    with_mean: bool,
) -> tuple[Tensor, Tensor]:
    """lse [S,M] and mean [S,M] (or [S,0] where it is not wanted)."""
    affinity = Affinity(queries, keys, query_ids, key_ids)
    sums = plain_sums if affinity.bounded(scales) else running_sums
    top, total, weighted = sums(affinity, scales, with_mean)
    lse = top + total.log()
    mean = torch.where(total > 0, weighted / total, 0) if with_mean else lse.new_empty(len(scales), 0)
    return lse, mean


def plain_sums(affinity: Affinity, scales: Sequence[float], with_mean: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros, sum_j exp(a s_ij) and sum_j exp(a s_ij) s_ij: nothing is subtracted, since the exponents are bounded."""
    total = affinity.queries.new_zeros(len(scales), len(affinity.queries))
    weighted = torch.zeros_like(total)
    factor = common_factor(scales)
    for rows, columns in affinity.tiles(triangle=affinity.symmetric):
        tile, left_out = affinity.tile(rows, columns, factor), affinity.left_out(rows, columns)
        mirrored = affinity.symmetric and rows != columns
        for n, scale in enumerate(scales):
            if factor == 1:
                parts = affinity.scaled(tile, scale, rows, columns).exp_()
            else:
                parts = torch.exp(tile, out=affinity.buffer("parts", rows, columns) if with_mean else tile)
            if left_out is not None:
                parts.masked_fill_(left_out, 0)
            add_sums(total[n], parts, rows, columns, mirrored)
            if with_mean:
                add_sums(weighted[n], parts.mul_(tile), rows, columns, mirrored)
    return torch.zeros_like(total), total, weighted.div_(factor)


def add_sums(sums: Tensor, parts: Tensor, rows: slice, columns: slice, mirrored: bool) -> None:
    sums[rows] += parts.sum(dim=1)
    if mirrored:
        sums[columns] += parts.sum(dim=0)


def running_sums(affinity: Affinity, scales: Sequence[float], with_mean: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The row's maximum exponent so far, and both sums relative to it, for exponents of any size."""
    total = affinity.queries.new_zeros(len(scales), len(affinity.queries))
    weighted = torch.zeros_like(total)
    top = torch.full_like(total, -torch.inf)
    for rows, columns in affinity.tiles(triangle=False):
        tile, left_out = affinity.tile(rows, columns, 1.0), affinity.left_out(rows, columns)
        for n, scale in enumerate(scales):
            exponent = affinity.scaled(tile, scale, rows, columns)
            if left_out is not None:
                exponent.masked_fill_(left_out, -torch.inf)
            new_top = torch.maximum(top[n, rows], exponent.amax(dim=1))
            shift = new_top.masked_fill(torch.isneginf(new_top), 0)
            parts = exponent.sub_(shift[:, None]).exp_()
            shrink = torch.exp(top[n, rows] - shift)
            total[n, rows] = total[n, rows] * shrink + parts.sum(dim=1)
            if with_mean:
                weighted[n, rows] = weighted[n, rows] * shrink + parts.mul_(tile).sum(dim=1)
            top[n, rows] = new_top
    return top, total, weighted


def tiled_backward(
    grad_lse: Tensor | None,
    grad_mean: Tensor | None,
    queries: Tensor,
    keys: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    lse: Tensor,
    mean: Tensor,
    scales: Sequence[float],
    detach_weights: bool,
    need_queries: bool,
    need_keys: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients to queries and keys; where queries are keys, both sides' share in the first."""
    affinity = Affinity(queries, keys, query_ids, key_ids)
    terms = coefficients(grad_lse, grad_mean, lse, mean, scales, detach_weights)
    if affinity.bounded(scales):
        terms = [term.unshifted() for term in terms]
    grad_queries = torch.zeros_like(affinity.queries)
    grad_keys = grad_queries if affinity.symmetric else torch.zeros_like(affinity.keys) if need_keys else None
    for rows, columns in affinity.tiles(triangle=affinity.symmetric):
        gradient = affinity_gradient(affinity, terms, rows, columns)
        if need_queries:
            grad_queries[rows].addmm_(gradient, affinity.keys[columns])
        if grad_keys is not None and not (affinity.symmetric and rows == columns):
            grad_keys[columns].addmm_(gradient.T, affinity.queries[rows])
    to_queries = grad_queries.to(queries.dtype) if need_queries else None
    return to_queries, None if keys is None or grad_keys is None else grad_keys.to(keys.dtype)


def affinity_gradient(affinity: Affinity, terms: list[Coefficients], rows: slice, columns: slice) -> Tensor:
    """d loss / d s of one tile; where queries are keys, that of s_ij and of s_ji together."""
    groups = [group for term in terms for group in one_exponential(term, rows, columns, affinity.symmetric)]
    alone = len(groups) == 1 and groups[0][0].beta is None
    tile, left_out = affinity.tile(rows, columns, terms[0].scale if alone else 1.0), affinity.left_out(rows, columns)
    gradient = tile if alone else affinity.buffer("gradient", rows, columns).zero_()
    for group in groups:
        parts = tile if alone else affinity.scaled(tile, group[0].scale, rows, columns)
        if group[0].lse is not None:
            parts.sub_(group[0].lse)
        parts.exp_().mul_(coefficient(affinity, tile, group, rows, columns))
        if not alone:
            gradient += parts
    return gradient if left_out is None else gradient.masked_fill_(left_out, 0)


def one_exponential(term: Coefficients, rows: slice, columns: slice, symmetric: bool) -> list[list[Coefficients]]:
    """The sides of a pair, grouped by those that share one exponential: both, unless the exponent has their lse."""
    sides = [term.rows(rows), term.columns(columns)] if symmetric else [term.rows(rows)]
    return [sides] if term.lse is None else [[side] for side in sides]


def coefficient(affinity: Affinity, tile: Tensor, group: list[Coefficients], rows: slice, columns: slice) -> Tensor:
    """alpha + beta s, summed over the sides of a pair."""
    total = group[0].alpha
    if len(group) == 2:
        total = torch.add(total, group[1].alpha, out=affinity.buffer("coefficients", rows, columns))
    for side in group:
        if side.beta is not None:
            total = total + side.beta * tile
    return total
