r"""What an objective contrasts: anchors with their positives, and the statistics of their negatives, over all ranks.

V query views, W key views, B images of this rank, N images of all ranks, P links (a query view with a key view), D
width, S scales.  z [V,B,D], k [W,B,D], statistics [V,B] or [P,B], with S in front for several scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from kontrast import distributed
from kontrast.errors import UsageError
from kontrast.kernels import RowStatistics, merge, row_statistics
from kontrast.kernels.covariance import whiten
from kontrast.kernels.links import Link, link_statistics
from kontrast.kernels.symmetry import root, squared_asymmetry
from kontrast.objectives.positives import Positives, once

Scale = float | Sequence[float]


class How(TypedDict, total=False):
    """with_mean: make the mean too; most objectives need `lse` alone, which is faster, and get an empty mean.
    detach_weights: the weights of the mean are constant."""

    with_mean: bool
    detach_weights: bool


def check_ridge(ridge: float, absolute: bool = False) -> None:
    if ridge > 1 and not absolute:
        raise UsageError(f"ridge is {ridge:g}: it is the share of the identity in the covariance, from 0 to 1")


class Pairs(Positives):
    """Anchors, positives, and each anchor's negatives: the rows of the bank where there is one, else the keys of other
    images."""

    def asymmetry(self, link: Link) -> Tensor:
        """||A - A^T||_F of the affinity matrix A_ij = <z_i, k_j> of two views, over all ranks."""
        query, key = self.place(link)
        z, k = self.z[query], self.k[key]
        squared = squared_asymmetry(z, k, distributed.gather(z), distributed.gather(k))
        return root(distributed.total(squared), z.dtype)

    def log_mean_exp(self, rows: Tensor) -> Tensor:
        """log mean exp over the images of all ranks: [...,B] to [...]."""
        return torch.logsumexp(distributed.gather(rows, dim=-1), dim=-1) - math.log(self.N)

    @property
    def pooled_count(self) -> int:
        """How many rows of all views and keys, or of a link's two, the ranks hold together."""
        return self.N * (2 if self.places else self.V + (self.W if self.teacher else 0))

    def whitened(self, ridge: float, *, absolute: bool = False, detach: bool = False, by_link: bool = False) -> Pairs:
        """These pairs, in place, with z and keys whitened together by the mean and covariance of all their rows; by
        link, a query view and a key view by those of the two."""
        check_ridge(ridge, absolute)

        def white(views: Tensor) -> Tensor:
            rows, count, total = views.reshape(-1, self.D), len(views) * self.N, distributed.total
            made = whiten(rows, ridge=ridge, absolute=absolute, detach=detach, count=count, total=total)
            return made.view_as(views)

        if by_link and self.teacher:
            links = self.links
            self.z, self.k = torch.stack([white(torch.stack([self.z[v], self.k[w]])) for v, w in links], dim=1)
            self.places = {link: (place, place) for place, link in enumerate(links)}
        else:
            both = white(torch.cat([self.z, self.k]) if self.teacher else self.z)
            self.z, self.k = both[: self.V], both[self.V :] if self.teacher else both
        self.type = self.z.dtype  # what the kernels multiply is no longer what was given, in its type
        return self

    def whitened_by_view(self, ridge: float) -> Pairs:
        """These pairs, in place, with each view of z and of the keys whitened by itself."""
        check_ridge(ridge)

        def white(views: Tensor) -> Tensor:
            return torch.stack([whiten(x, ridge=ridge, count=self.N, total=distributed.total) for x in views])

        self.z, self.k = (white(self.z), white(self.k)) if self.teacher else (white(self.z),) * 2
        return self

    @property
    def negative_count(self) -> int:
        """How many negatives an anchor has."""
        return self.W * (self.N - 1) if self.bank is None else self.bank.shape[0]

    def negatives(self, scale: Scale, **how: Unpack[How]) -> RowStatistics:
        """Each anchor against all its negatives: [V,B]."""
        return self._by_view(self._negatives(scale, **how))

    def same_view(self, scale: Scale, **how: Unpack[How]) -> RowStatistics:
        """Each anchor against the same view of other images, with gradient to both: [V,B]."""
        return self._by_view(self._same_view(scale, **how))

    def negatives_and_same_view(self, scale: Scale, **how: Unpack[How]) -> RowStatistics:
        """Each anchor against its negatives and beside them the same view of other images: [V,B]."""
        segments = [self._negatives(scale, **how), self._same_view(scale, **how)]
        return self._by_view(merge(segments, scale, detach_weights=how.get("detach_weights", False)))

    def constant_negatives_and_same_view(self, scale: Scale) -> RowStatistics:
        """The same, where the weights' gradient goes through the same view alone: [V,B]."""
        constant = self._negatives(scale, with_mean=True, detach_weights=True)
        segments = [RowStatistics(constant.lse.detach(), constant.mean), self._same_view(scale, with_mean=True)]
        return self._by_view(merge(segments, scale))

    def mean_keys(self, scale: Scale) -> RowStatistics:
        """Each anchor against the mean of each other image's positive keys, or against the bank: [V,B]."""
        if self.bank is not None:
            return self.negatives(scale)
        found = []
        for v in range(self.V):
            mean = torch.stack([self.k[w] for u, w in self.links if u == v]).mean(0)
            found.append(self._statistics(self.z[v], distributed.gather(mean.to(self.type)), scale))
        return RowStatistics(torch.stack([f.lse for f in found], -2), torch.stack([f.mean for f in found], -2))

    def across(self, scale: Scale, links: Sequence[Link], **how: Unpack[How]) -> RowStatistics:
        """Each link's query view against that key view of other images alone, or against the bank: [P,B]."""
        if self.bank is not None:
            rows, views = self._by_view(self._negatives(scale, **how)), [v for v, _ in links]
            # Stacked, not indexed by a list: that would copy the list to the device, which a captured graph can't.
            return RowStatistics(*(torch.stack([x[..., v, :] for v in views], -2) if x.shape[-1] else x for x in rows))
        return self._linked_statistics(self._keys, [self.place(link) for link in links], scale, **how)

    def others(self, scale: float) -> Tensor:
        """log-sum-exp of each anchor over every other row, positives among them: [V,B]."""
        if self.labels:
            rows = torch.arange(self.V * self.N, device=self.z.device).view(self.V, self.N)
            own = rows[:, distributed.rank() * self.B :][:, : self.B]
            everyone = None if distributed.world() == 1 else self._keys.reshape(-1, self.D)
            return self._by_view(self._statistics(self.z, everyone, scale, own, rows)).lse
        if self._single:
            positives = scale * self.positive
        else:
            positives = self.over_positives(lambda s: torch.logsumexp(scale * s, dim=-1))
        return torch.logaddexp(self.negatives(scale).lse, positives)

    @once
    def _keys(self) -> Tensor:
        """Keys of all ranks, as the kernels take them: [W,N,D]."""
        return distributed.gather(self.k.to(self.type), dim=1)

    @once
    def _queries(self) -> Tensor:
        """Queries of all ranks, as the kernels take them: [V,N,D]."""
        return distributed.gather(self.z.to(self.type), dim=1) if self.teacher else self._keys

    def _negatives(self, scale: Scale, **how: Unpack[How]) -> RowStatistics:
        if self.bank is not None:
            rows = self.z.to(self.type).reshape(-1, self.D)
            how.setdefault("with_mean", False)
            return row_statistics(rows, self.bank.to(self.type), scale=scale, **how)
        themselves = not self.teacher and distributed.world() == 1
        return self._statistics(self.z, None if themselves else self._keys, scale, **how)

    def _same_view(self, scale: Scale, **how: Unpack[How]) -> RowStatistics:
        keys = None if distributed.world() == 1 else self._queries
        found = self._linked_statistics(keys, [(v, v) for v in range(self.V)], scale, **how)
        return RowStatistics(found.lse.flatten(-2), found.mean.flatten(-2))

    def _linked_statistics(
        self, keys: Tensor | None, links: Sequence[Link], scale: Scale, **how: Unpack[How]
    ) -> RowStatistics:
        return link_statistics(
            self.z.to(self.type), keys, links, scale=scale, query_ids=self.ids, key_ids=self._all_ids, **how
        )

    def _statistics(
        self,
        z: Tensor,
        k: Tensor | None,
        scale: Scale,
        own: Tensor | None = None,
        of: Tensor | None = None,
        with_mean: bool = False,
        detach_weights: bool = False,
    ) -> RowStatistics:
        """Rows of z [...,B,D] against rows of k [...,N,D], None: z itself; pairs with the same id are left out."""
        queries = z.to(self.type).reshape(-1, self.D)
        own = self.ids.repeat(len(queries) // self.B) if own is None else own.reshape(-1)
        keys = ids = None
        if k is not None:
            keys = k.reshape(-1, self.D)
            ids = self._all_ids.repeat(len(keys) // self.N) if of is None else of.reshape(-1)
        return row_statistics(
            queries, keys, scale=scale, query_ids=own, key_ids=ids, with_mean=with_mean, detach_weights=detach_weights
        )

    @once
    def _all_ids(self) -> Tensor:
        return distributed.gather(self.ids) if self.labels else torch.arange(self.N, device=self.z.device)

    def _by_view(self, rows: RowStatistics) -> RowStatistics:
        return RowStatistics(*(x.view(*x.shape[:-1], self.V, -1) if x.shape[-1] else x for x in rows))
