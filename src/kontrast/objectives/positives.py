r"""Anchors and their positives: which views go together, and what is measured of them.

V query views, W key views, B images of this rank, N images of all ranks, P links (a query view with a key view), D
width.  z [V,B,D], k [W,B,D], values of links [P,B], of anchors [V,B].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from kontrast import distributed
from kontrast.kernels.links import Link
from kontrast.objectives.inputs import Inputs

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
    """Rows of length one. A zero vector stays zero, and its gradient stays finite in half precision too; one whose
    length overflows gives NaN, where dividing by infinity would make a healthy zero of it."""
    norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    return z / torch.where(norm > eps, norm + 0 * norm.detach(), 1.0)


def stacked(rows: Sequence[Tensor]) -> Tensor:
    """Rows as one tensor; one alone, or the same one several times, is not copied."""
    alone = all(row is rows[0] for row in rows)
    return rows[0].expand(len(rows), *rows[0].shape) if alone else torch.stack(list(rows))


class Positives:
    """Anchors z [V,B,D] and keys k [W,B,D], float32 at least; without a teacher the keys are z itself.

    With one query view every key view is another view of the image; with more, key view w is the same picture as query
    view w, so w != v are its positives.
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
        self.places: dict[Link, Link] = {}  # of links whose two views z and k hold in a form of their own

    @property
    def links(self) -> list[Link]:
        """Every query view with each of its positive key views."""
        alone = self.V == 1
        return [(v, w) for v in range(self.V) for w in range(self.W) if alone or v != w]

    def place(self, link: Link) -> Link:
        """Which view of z and which of k a link's two are."""
        return self.places.get(link, link)

    def one_way(self, symmetric: bool = False) -> list[Link]:
        """Each pair of views once, the earlier view as the query; all links where symmetric or with a teacher."""
        return self.links if symmetric or self.teacher else [(v, w) for v, w in self.links if v < w]

    def _of_links(self, measured: Callable[[Tensor, Tensor], Tensor]) -> dict[Link, Tensor]:
        """A measure of each image's two views, for every link; without a teacher (v,w) has that of (w,v)."""
        z = self.z.unbind()  # once: each index would have a gradient of the size of z
        k = self.k.unbind() if self.teacher else z
        links = self.one_way()
        places = [self.place(link) for link in links]
        found = measured(stacked([z[v] for v, _ in places]), stacked([k[w] for _, w in places]))
        by_link = dict(zip(links, found.unbind()))
        return by_link if self.teacher else by_link | {(w, v): x for (v, w), x in by_link.items()}

    @once
    def _products(self) -> dict[Link, Tensor]:
        return self._of_links(lambda z, k: (z * k).sum(-1))  # elementwise, not a matmul: no tf32 in the positives

    @once
    def _squares(self) -> dict[Link, Tensor]:
        return self._of_links(lambda z, k: (z - k).square().sum(-1))  # not 2 - 2 <z, k>, in which close views cancel

    def linked(self, links: Sequence[Link]) -> Tensor:
        """Similarity of each image's two views, for each link: [P,B]."""
        return stacked([self._products[link] for link in links])

    def squared_distance(self, links: Sequence[Link]) -> Tensor:
        """||z - k||^2 of each image's two views, for each link, whatever the rows' length: [P,B]."""
        return stacked([self._squares[link] for link in links])

    def distance(self, links: Sequence[Link], power: float) -> Tensor:
        """||z - k||^power, for each link: [P,B]; 0 where they agree, with a finite slope for a power under 2 too."""
        squared = self.squared_distance(links)
        return squared if power == 2 else torch.where(squared > 1e-12, squared.clamp(min=1e-12) ** (power / 2), 0.0)

    def over_positives(self, reduced: Callable[[Tensor], Tensor]) -> Tensor:
        """Each anchor's similarities to its positives [...,positives], reduced to one number: [V,B]."""
        return self._per_anchor(self.linked(self.links), reduced)

    def per_anchor(self, values: Tensor) -> Tensor:
        """Values [P,B] of all links as each anchor's mean over its positives: [V,B]."""
        return self._per_anchor(values, lambda x: x.mean(-1))

    def _per_anchor(self, values: Tensor, reduced: Callable[[Tensor], Tensor]) -> Tensor:
        counts = self._counts(self.links)
        if len(set(counts)) > 1:
            return torch.stack([reduced(part.T) for part in values.split(counts)])
        return reduced(values.unflatten(0, (self.V, -1)).transpose(1, 2))

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
