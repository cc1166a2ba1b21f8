r"""The anchors of an objective, their positives, and the statistics of their negatives, over all ranks.

V query views, W key views, B images of this rank, N images of all ranks, P links (a query view with a key view), D
width, S scales.  z [V,B,D], k [W,B,D];  statistics [V,B] per anchor or [P,B] per link, for S scales [S,V,B] or [S,P,B].
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor

from kontrast import distributed
from kontrast.errors import UsageError
from kontrast.kernels import RowStatistics, merge, row_statistics
from kontrast.kernels.covariance import whiten
from kontrast.kernels.links import Link, link_statistics
from kontrast.kernels.row_statistics import Scale
from kontrast.kernels.symmetry import root, squared_asymmetry
from kontrast.objectives.inputs import Inputs

Value = TypeVar("Value")


class StatisticsOptions(TypedDict, total=False):
    """Options of the statistics.

    with_mean: compute the mean too. Most objectives need `lse` alone, which is faster, and get an empty mean.
    detach_weights: treat the weights of the mean as constants.
    """

    with_mean: bool
    detach_weights: bool


class cached(Generic[Value]):
    """A property that is computed once. functools' has a lock on Python 3.11, which torch.compile can't follow."""

    def __init__(self, compute: Callable[[Any], Value]):
        self.compute = compute

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, pairs: Any, owner: type) -> Value:
        value = self.compute(pairs)
        setattr(pairs, self.name, value)
        return value


def unit(z: Tensor, eps: float = 1e-12) -> Tensor:
    """Scale rows to length one.

    A zero vector stays zero, with a finite gradient in half precision too. A row whose length overflows becomes NaN;
    dividing by infinity would turn it into a zero that looks healthy.
    """
    norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    return z / torch.where(norm > eps, norm + 0 * norm.detach(), 1.0)


def stack(rows: Sequence[Tensor]) -> Tensor:
    """Stack tensors. One tensor, or the same one several times, is expanded instead of copied."""
    same = all(row is rows[0] for row in rows)
    return rows[0].expand(len(rows), *rows[0].shape) if same else torch.stack(list(rows))


def check_ridge(ridge: float, absolute: bool = False) -> None:
    if ridge > 1 and not absolute:
        raise UsageError(f"ridge is {ridge:g}: give the share of the identity in the covariance, from 0 to 1")


class Pairs:
    """Anchors z, their positives among the keys k, and their negatives: the bank if given, else keys of other images.

    z and k are float32 at least, and without a teacher k is z. With one query view, every key view is a positive. With
    more, key view w shows the same crop as query view w, so the positives of view v are the keys w != v.
    """

    def __init__(self, inputs: Inputs, *, normalize: bool):
        self.dtype = inputs.z.dtype  # the type that the kernels multiply in
        wide = torch.promote_types(self.dtype, torch.float32)
        self.z = unit(inputs.z.to(wide)) if normalize else inputs.z.to(wide)
        self.teacher = inputs.keys is not None
        self.k = self.z
        if inputs.keys is not None:
            self.k = unit(inputs.keys.to(wide)) if normalize else inputs.keys.to(wide)
        self.bank = inputs.bank
        self.V, self.B, self.D = self.z.shape
        self.W = self.k.shape[0]
        self.N = self.B * distributed.world()
        self.has_labels = inputs.labels is not None
        # Rows with equal ids are no negatives of each other. The id of an image is its label, or unique to it.
        self.ids = distributed.image_ids(self.B, self.z.device) if inputs.labels is None else inputs.labels
        self._places: dict[Link, Link] = {}  # after whitening by link: the indices of a link's views in z and k

    # Links

    @property
    def links(self) -> list[Link]:
        """Every query view with each of its positive key views, sorted."""
        alone = self.V == 1
        return [(v, w) for v in range(self.V) for w in range(self.W) if alone or v != w]

    def one_way_links(self, symmetric: bool = False) -> list[Link]:
        """Return each pair of views once, the earlier one as the query; all links if `symmetric` or with a teacher."""
        return self.links if symmetric or self.teacher else [(v, w) for v, w in self.links if v < w]

    def place(self, link: Link) -> Link:
        """Return the indices into z and k of the two views of a link."""
        return self._places.get(link, link)

    # Positives

    @cached
    def positive(self) -> Tensor:
        """Mean similarity of each anchor to its positives: [V,B]."""
        if self.has_labels:
            return self._similarity_to_same_label()
        return self.similarity(self.links) if self._one_positive else self.reduce_positives(lambda s: s.mean(-1))

    @property
    def _one_positive(self) -> bool:
        """Whether each anchor has one positive, so that means and log-sum-exps over positives need no work."""
        return len(self.links) == self.V

    def similarity(self, links: Sequence[Link]) -> Tensor:
        """Return the similarity of each image's two views, for each link: [P,B]."""
        return stack([self._similarities[link] for link in links])

    def squared_distance(self, links: Sequence[Link]) -> Tensor:
        """Return ||z - k||^2 of each image's two views, for each link, for rows of any length: [P,B]."""
        return stack([self._squared_distances[link] for link in links])

    def distance(self, links: Sequence[Link], power: float | Tensor) -> Tensor:
        """Return ||z - k||^power for each link: [P,B]. It is 0 for equal views, with a finite slope at any power."""
        squared = self.squared_distance(links)
        if not isinstance(power, Tensor) and power == 2:
            return squared
        return torch.where(squared > 1e-12, squared.clamp(min=1e-12) ** (power / 2), 0.0)

    def reduce_positives(self, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """Reduce each anchor's similarities to its positives [...,positives] to one number: [V,B]."""
        return self._reduce_links(self.similarity(self.links), reduce)

    def mean_over_positives(self, values: Tensor) -> Tensor:
        """Average values [P,B] of all links over the positives of each anchor: [V,B]."""
        return self._reduce_links(values, lambda x: x.mean(-1))

    def sum_by_query(self, values: Tensor, links: Sequence[Link]) -> Tensor:
        """Sum values [P,B] of links over each query view that has links, scaled so that the mean stays the same."""
        counts = links_per_query(links)
        if len(counts) == len(links):
            return values
        rows = [part.sum(0) for part in values.split(counts)]
        return torch.stack(rows) * (len(counts) / len(links))

    def _reduce_links(self, values: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        counts = links_per_query(self.links)
        if len(set(counts)) > 1:
            return torch.stack([reduce(part.T) for part in values.split(counts)])
        return reduce(values.unflatten(0, (self.V, -1)).transpose(1, 2))

    @cached
    def _similarities(self) -> dict[Link, Tensor]:
        return self._measure_links(lambda z, k: (z * k).sum(-1))  # elementwise, because a matmul may round to tf32

    @cached
    def _squared_distances(self) -> dict[Link, Tensor]:
        return self._measure_links(lambda z, k: (z - k).square().sum(-1))  # 2 - 2 <z, k> would cancel for close views

    def _measure_links(self, measure: Callable[[Tensor, Tensor], Tensor]) -> dict[Link, Tensor]:
        """Measure each image's two views, for every link. Without a teacher, (v,w) and (w,v) share one result."""
        z = self.z.unbind()  # once, because each index would have a gradient of the size of z
        k = self.k.unbind() if self.teacher else z
        links = self.one_way_links()
        places = [self.place(link) for link in links]
        measured = measure(stack([z[v] for v, _ in places]), stack([k[w] for _, w in places]))
        by_link = dict(zip(links, measured.unbind()))
        return by_link if self.teacher else by_link | {(w, v): x for (v, w), x in by_link.items()}

    def _similarity_to_same_label(self) -> Tensor:
        """Return the mean similarity to all other rows of the anchor's label, from the sum of the rows per label."""
        everyone, labels = distributed.gather(self.z, dim=1), distributed.gather(self.ids)
        names, groups = torch.unique(labels, return_inverse=True)
        if len(names) < 2:
            raise ValueError(f"all {self.N} labels are {int(names[0])}: give at least 2 different labels")
        zero = everyone.new_zeros(len(names), self.D)
        sums = zero.index_add(0, groups.repeat(self.V), everyone.reshape(-1, self.D))
        sizes = self.V * torch.bincount(groups, minlength=len(names))
        mine = groups[distributed.rank() * self.B :][: self.B]
        others = sums[mine] - self.z
        return (self.z * others).sum(-1) / (sizes[mine] - 1)

    # Negatives

    @property
    def negative_count(self) -> int:
        """The number of negatives per anchor."""
        return self.W * (self.N - 1) if self.bank is None else self.bank.shape[0]

    def negatives(self, scale: Scale, **options: Unpack[StatisticsOptions]) -> RowStatistics:
        """Return the statistics of each anchor against all its negatives: [V,B]."""
        if self.bank is not None:
            return self._statistics(scale, None, self.bank.to(self.dtype), None, **options)
        ids = self.ids.repeat(self.V)
        if not self.teacher and distributed.world() == 1:
            return self._statistics(scale, ids, None, None, **options)
        return self._statistics(scale, ids, self._keys.reshape(-1, self.D), self._key_ids.repeat(self.W), **options)

    def others(self, scale: float | Tensor) -> Tensor:
        """Return the log-sum-exp of each anchor over every other row, including its positives: [V,B]."""
        if self.has_labels:
            rows = torch.arange(self.V * self.N, device=self.z.device).view(self.V, self.N)
            mine = rows[:, distributed.rank() * self.B :][:, : self.B].reshape(-1)
            alone = distributed.world() == 1
            keys, key_ids = (None, None) if alone else (self._keys.reshape(-1, self.D), rows.reshape(-1))
            return self._statistics(scale, mine, keys, key_ids).lse
        if self._one_positive:
            positives = scale * self.positive
        else:
            positives = self.reduce_positives(lambda s: torch.logsumexp(scale * s, dim=-1))
        return torch.logaddexp(self.negatives(scale).lse, positives)

    def same_view(self, scale: Scale, **options: Unpack[StatisticsOptions]) -> RowStatistics:
        """Return the statistics of each anchor against the same view of other images, with gradient to both: [V,B]."""
        keys = None
        if distributed.world() > 1:
            keys = distributed.gather(self.z.to(self.dtype), dim=1) if self.teacher else self._keys
        return self._link_statistics(scale, keys, [(v, v) for v in range(self.V)], **options)

    def negatives_and_same_view(self, scale: Scale, **options: Unpack[StatisticsOptions]) -> RowStatistics:
        """Return the statistics of each anchor against its negatives and the same view of other images: [V,B]."""
        segments = [self.negatives(scale, **options), self.same_view(scale, **options)]
        return merge(segments, detach_weights=options.get("detach_weights", False))

    def constant_negatives_and_same_view(self, scale: Scale) -> RowStatistics:
        """Do the same with a gradient of the weights through the same view alone: [V,B]."""
        constant = self.negatives(scale, with_mean=True, detach_weights=True)
        return merge([RowStatistics(constant.lse.detach(), constant.mean), self.same_view(scale, with_mean=True)])

    def mean_key_negatives(self, scale: float | Tensor) -> Tensor:
        """Return the lse of each anchor over the mean of each other image's positive keys, or over the bank: [V,B]."""
        if self.bank is not None:
            return self.negatives(scale).lse
        rows = []
        for v in range(self.V):
            mean = torch.stack([self.k[w] for u, w in self.links if u == v]).mean(0)
            keys, queries = distributed.gather(mean.to(self.dtype)), self.z[v].to(self.dtype)
            ids, key_ids = self.ids, self._key_ids
            rows.append(row_statistics(queries, keys, scale=scale, query_ids=ids, key_ids=key_ids, with_mean=False).lse)
        return torch.stack(rows)

    def link_negatives(
        self, scale: Scale, links: Sequence[Link], **options: Unpack[StatisticsOptions]
    ) -> RowStatistics:
        """Return the statistics of each link's query view against its key view of other images, or the bank: [P,B]."""
        if self.bank is not None:
            rows = self.negatives(scale, **options)
            # Stacked, not indexed by a list: that would copy the list to the device, which a captured graph can't.
            return RowStatistics(*(torch.stack([x[..., v, :] for v, _ in links], -2) for x in rows))
        return self._link_statistics(scale, self._keys, [self.place(link) for link in links], **options)

    def _link_statistics(
        self, scale: Scale, keys: Tensor | None, places: list[Link], **options: Unpack[StatisticsOptions]
    ) -> RowStatistics:
        queries, ids = self.z.to(self.dtype), self.ids
        return link_statistics(queries, keys, places, scale=scale, query_ids=ids, key_ids=self._key_ids, **options)

    def _statistics(
        self, scale: Scale, query_ids: Tensor | None, keys: Tensor | None, key_ids: Tensor | None,
        with_mean: bool = False, detach_weights: bool = False,
    ) -> RowStatistics:  # fmt: skip
        """Return the statistics of all anchors against keys, or against each other without keys: [V,B]."""
        rows = row_statistics(
            self.z.to(self.dtype).reshape(-1, self.D), keys, scale=scale, query_ids=query_ids, key_ids=key_ids,
            with_mean=with_mean, detach_weights=detach_weights,
        )  # fmt: skip
        # By the quotient, because -1 can't be inferred for an empty mean.
        return RowStatistics(*(x.view(*x.shape[:-1], self.V, x.shape[-1] // self.V) for x in rows))

    @cached
    def _keys(self) -> Tensor:
        """Keys of all ranks, in the type of the kernels: [W,N,D]."""
        return distributed.gather(self.k.to(self.dtype), dim=1)

    @cached
    def _key_ids(self) -> Tensor:
        return distributed.gather(self.ids) if self.has_labels else torch.arange(self.N, device=self.z.device)

    # Statistics of the whole batch

    def asymmetry(self, link: Link) -> Tensor:
        """Return ||A - A^T||_F of the affinity matrix A_ij = <z_i, k_j> of two views, over all ranks."""
        query, key = self.place(link)
        z, k = self.z[query], self.k[key]
        squared = squared_asymmetry(z, k, distributed.gather(z), distributed.gather(k))
        return root(distributed.total(squared), z.dtype)

    def log_mean_exp(self, rows: Tensor) -> Tensor:
        """Return log mean exp over the images of all ranks: [...,B] to [...]."""
        return torch.logsumexp(distributed.gather(rows, dim=-1), dim=-1) - math.log(self.N)

    # Whitening

    @property
    def pooled_count(self) -> int:
        """The number of rows, over all ranks, that were whitened together."""
        return self.N * (2 if self._places else self.V + (self.W if self.teacher else 0))

    def whiten(self, ridge: float, *, absolute: bool = False, detach: bool = False, by_link: bool = False) -> Pairs:
        """Whiten z and keys in place by the mean and covariance of all their rows, and return the pairs.

        With `by_link` and a teacher, the two views of each link are whitened together instead.
        """
        check_ridge(ridge, absolute)

        def white(views: Tensor) -> Tensor:
            rows, count, total = views.reshape(-1, self.D), len(views) * self.N, distributed.total
            return whiten(rows, ridge=ridge, absolute=absolute, detach=detach, count=count, total=total).view_as(views)

        if by_link and self.teacher:
            links = self.links
            self.z, self.k = torch.stack([white(torch.stack([self.z[v], self.k[w]])) for v, w in links], dim=1)
            self._places = {link: (place, place) for place, link in enumerate(links)}
        else:
            both = white(torch.cat([self.z, self.k]) if self.teacher else self.z)
            self.z, self.k = both[: self.V], both[self.V :] if self.teacher else both
        self.dtype = self.z.dtype  # the kernels multiply the whitened rows, which are no longer in the input's type
        return self

    def whiten_by_view(self, ridge: float) -> Pairs:
        """Whiten each view of z and of the keys separately, in place, and return the pairs."""
        check_ridge(ridge)

        def white(views: Tensor) -> Tensor:
            return torch.stack([whiten(x, ridge=ridge, count=self.N, total=distributed.total) for x in views])

        self.z, self.k = (white(self.z), white(self.k)) if self.teacher else (white(self.z),) * 2
        return self


def links_per_query(links: Sequence[Link]) -> list[int]:
    """Return the number of links of each query view that has any; links are sorted by query view."""
    return list(Counter(v for v, _ in links).values())
