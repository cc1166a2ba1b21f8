r"""What an objective contrasts: anchors, their positives and the statistics of their negatives, over all ranks.

V query views, W key views, B images of this rank, N images of all ranks, P links (a query view with a key view), D
width, S scales.  z [V,B,D], k [W,B,D], statistics [V,B] or [P,B], with S in front for several scales.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor

from kontrast import distributed
from kontrast.kernels import RowStatistics, merge, row_statistics
from kontrast.kernels.features import whiten
from kontrast.kernels.links import Link, link_statistics
from kontrast.kernels.symmetry import root, squared_asymmetry
from kontrast.objectives.inputs import Inputs

Scale = float | Sequence[float]


class How(TypedDict, total=False):
    """with_mean: make the mean too; most objectives need `lse` alone, which is faster, and get an empty mean.
    detach_weights: the weights of the mean are constant."""

    with_mean: bool
    detach_weights: bool


Value = TypeVar("Value")


class once(Generic[Value]):
    """A property that is computed once; functools' has a lock on Python 3.11, which torch.compile can't follow."""

    def __init__(self, compute: Callable[[Any], Value]):
        self.compute = compute

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, pairs: Any, owner: type) -> Value:
        value = self.compute(pairs)
        setattr(pairs, self.name, value)
        return value


def unit(z: Tensor, eps: float = 1e-12) -> Tensor:
    """Rows of length one. A zero vector stays zero, and its gradient stays finite in half precision too."""
    norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    return z / torch.where(norm > eps, norm, 1.0)


def stacked(rows: Sequence[Tensor]) -> Tensor:
    """Rows as one tensor; a single one is not copied."""
    return rows[0][None] if len(rows) == 1 else torch.stack(list(rows))


class Pairs:
    """Anchors z [V,B,D] and keys k [W,B,D], float32 at least; without a teacher the keys are z itself.

    Negatives are the rows of the bank where there is one, else the keys of other images. With one query view every key
    view is another view of the image; with more, key view w is the same picture as query view w, so w != v are its
    positives.
    """

    def __init__(self, inputs: Inputs, *, normalize: bool):
        self.type = inputs.z.dtype
        wide = torch.promote_types(self.type, torch.float32)
        self.z = unit(inputs.z.to(wide)) if normalize else inputs.z.to(wide)
        self.teacher = inputs.keys is not None
        self.k = self.z
        if inputs.keys is not None:
            self.k = unit(inputs.keys.to(wide)) if normalize else inputs.keys.to(wide)
        self.bank = inputs.bank
        self.V, self.B, self.D = self.z.shape
        self.W = self.k.shape[0]
        self.N = self.B * distributed.world()
        self.labels = inputs.ids is not None
        self.ids = distributed.image_ids(self.B, self.z.device) if inputs.ids is None else inputs.ids

    @property
    def links(self) -> list[Link]:
        """Every query view with each of its positive key views."""
        alone = self.V == 1
        return [(v, w) for v in range(self.V) for w in range(self.W) if alone or v != w]

    def one_way(self, symmetric: bool = False) -> list[Link]:
        """Each pair of views once, the earlier view as the query; all links where symmetric or with a teacher."""
        return self.links if symmetric or self.teacher else [(v, w) for v, w in self.links if v < w]

    @once
    def _products(self) -> dict[Link, Tensor]:
        # Elementwise, not a matmul: no tf32 in the positives. Without a teacher s_vw is s_wv, computed once.
        z = self.z.unbind()  # once: each index would have a gradient of the size of z
        k = self.k.unbind() if self.teacher else z
        links = self.one_way()
        queries, keys = stacked([z[v] for v, _ in links]), stacked([k[w] for _, w in links])
        products = dict(zip(links, (queries * keys).sum(-1).unbind()))
        return products if self.teacher else products | {(w, v): s for (v, w), s in products.items()}

    def linked(self, links: Sequence[Link]) -> Tensor:
        """Similarity of each image's two views, for each link: [P,B]."""
        return stacked([self._products[link] for link in links])

    def over_positives(self, reduced: Callable[[Tensor], Tensor]) -> Tensor:
        """Each anchor's similarities to its positives [...,positives], reduced to one number: [V,B]."""
        similarity, counts = self.linked(self.links), self._counts(self.links)
        if len(set(counts)) > 1:
            return torch.stack([reduced(part.T) for part in similarity.split(counts)])
        return reduced(similarity.unflatten(0, (self.V, -1)).transpose(1, 2))

    @staticmethod
    def _counts(links: Sequence[Link]) -> list[int]:
        """How many links each query view has that has some; links come in the order of their query views."""
        return list(Counter(v for v, _ in links).values())

    @once
    def positive(self) -> Tensor:
        """Mean similarity of each anchor to its positives: [V,B]."""
        if self.labels:
            return self._of_the_same_id
        return self.linked(self.links) if self._single else self.over_positives(lambda s: s.mean(-1))

    @property
    def _single(self) -> bool:
        """Whether each anchor has one positive, with which mean and log-sum-exp are no work."""
        return len(self.links) == self.V

    @once
    def _of_the_same_id(self) -> Tensor:
        """Mean similarity to all other rows of the anchor's id, from the sum of each id's rows: no matrix."""
        everyone, ids = distributed.gather(self.z, dim=1), distributed.gather(self.ids)
        names, groups = torch.unique(ids, return_inverse=True)
        if len(names) < 2:
            raise ValueError(
                f"all {self.N} ids are {int(names[0])}: give at least 2 different ones, contrast needs another"
            )
        zero = everyone.new_zeros(len(names), self.D)
        sums = zero.index_add(0, groups.repeat(self.V), everyone.reshape(-1, self.D))
        sizes = self.V * torch.bincount(groups, minlength=len(names))
        own = groups[distributed.rank() * self.B :][: self.B]
        others = sums[own] - self.z
        return (self.z * others).sum(-1) / (sizes[own] - 1)

    def by_anchor(self, values: Tensor, links: Sequence[Link]) -> Tensor:
        """Values [P,B] of links, in order, as rows [A,B] of the A query views that have links, with the same mean."""
        counts = self._counts(links)
        if len(counts) == len(links):
            return values
        rows = [part.sum(0) for part in values.split(counts)]
        return torch.stack(rows) * (len(counts) / len(links))

    def squared_distance(self, links: Sequence[Link]) -> Tensor:
        """||z - k||^2 of each image's two views, for each link, whatever the rows' length: [P,B]."""
        return torch.stack([(self.z[v] - self.k[w]).square().sum(-1) for v, w in links])

    def distance(self, links: Sequence[Link], power: float) -> Tensor:
        """||z - k||^power between unit rows, for each link: [P,B]; the slope at 0 stays finite for a power under 2."""
        squared = 2 - 2 * self.linked(links)
        return squared if power == 2 else squared.clamp(min=1e-12) ** (power / 2)

    def asymmetry(self, link: Link) -> Tensor:
        """||A - A^T||_F of the affinity matrix A_ij = <z_i, k_j> of two views, over all ranks."""
        z, k = self.z[link[0]], self.k[link[1]]
        squared = squared_asymmetry(z, k, distributed.gather(z), distributed.gather(k))
        return root(distributed.total(squared), z.dtype)

    def log_mean_exp(self, rows: Tensor) -> Tensor:
        """log mean exp over the images of all ranks: [...,B] to [...]."""
        return torch.logsumexp(distributed.gather(rows, dim=-1), dim=-1) - math.log(self.N)

    @property
    def pooled_count(self) -> int:
        """How many rows of all views and keys the ranks hold together."""
        return self.N * (self.V + (self.W if self.teacher else 0))

    def whitened(self, ridge: float, *, absolute: bool = False, detach: bool = False) -> Pairs:
        """These pairs, in place, with z and keys whitened together by the mean and covariance of all their rows."""
        both = torch.cat([self.z, self.k]) if self.teacher else self.z
        rows, count = both.reshape(-1, self.D), self.pooled_count
        white = whiten(rows, ridge=ridge, absolute=absolute, detach=detach, count=count, total=distributed.total)
        self.z = white.view_as(both)[: self.V]
        self.k = white.view_as(both)[self.V :] if self.teacher else self.z
        return self

    def whitened_by_view(self, ridge: float) -> Pairs:
        """These pairs, in place, with each view of z and of the keys whitened by itself."""

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
        return self._linked_statistics(self._keys, links, scale, **how)

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
            how = How(with_mean=False) | how
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
