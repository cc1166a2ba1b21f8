r"""The anchors of an objective, their positives, and the statistics of their negatives, over all ranks.

V query views, W key views, B images of this rank, N images of all ranks, P links (a query view with a key view), D
width, S scales.  z [V,B,D], k [W,B,D];  statistics [V,B] per anchor or [P,B] per link, for S scales [S,V,B] or [S,P,B].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Unpack

import torch
from torch import Tensor

from kontrast import distributed
from kontrast.kernels import RowStatistics, merge, row_statistics, softplus_sums
from kontrast.kernels.links import link_statistics
from kontrast.kernels.log_add_exp import log_add_exp
from kontrast.kernels.row_statistics import Scale, StatisticsOptions, as_list
from kontrast.kernels.small_batch import AnchorFunction, Arguments, fits_small_kernel
from kontrast.kernels.stored_batch import StoredBatchFunction, fits_stored_batch
from kontrast.kernels.symmetry import asymmetry
from kontrast.kernels.unit_rows import UnitRows, unit_rows, wide_units
from kontrast.kernels.view_links import ALL, SAME, Link, image_indices, kind_of_links
from kontrast.objectives.cached_value import cached
from kontrast.objectives.inputs import Inputs, may_read_values
from kontrast.objectives.link_rows import links_per_query, select_rows, stack


class Pairs:
    """Anchors z, their positives among the keys k, and their negatives: the bank if given, else keys of other images.

    Without a teacher k is z. With one query view, every key view is a positive. With more, key view w shows the same
    crop as query view w, so the positives of view v are the keys w != v.
    """

    def __init__(self, inputs: Inputs, *, normalize: bool):
        self.teacher = inputs.keys is not None
        self.bank = inputs.bank
        self.V, self.B, self.D = inputs.z.shape
        self.W = self.V if inputs.keys is None else inputs.keys.shape[0]
        self.N = self.B * distributed.world()
        self.given, self.labels = inputs, inputs.labels
        self._inputs, self._normalize = inputs, normalize
        self._everyone: tuple[Tensor, Tensor] | None = None  # z and k of all ranks, once they have been gathered
        self._places: dict[Link, Link] = {}  # the indices of a link's views in z and k, if each link has its own

    # Rows

    @property
    def dtype(self) -> torch.dtype:
        """The type that the kernels multiply in."""
        return self._inputs.z.dtype

    @cached
    def z(self) -> Tensor:
        """Anchors [V,B,D], float32 at least."""
        return self._wide(self._inputs.z)

    @cached
    def k(self) -> Tensor:
        """Keys [W,B,D], float32 at least; without a teacher they are the anchors."""
        return self.z if self._inputs.keys is None else self._wide(self._inputs.keys)

    def _wide(self, rows: Tensor) -> Tensor:
        return wide_units(rows) if self._normalize else rows.to(torch.promote_types(rows.dtype, torch.float32))

    @cached
    def _rows(self) -> UnitRows:
        """Anchors and keys in the type of the kernels, and the similarities of each image's views."""
        if self._places:
            k = self.k.unbind()
            similarities = (self.z * torch.stack([k[w] for _, w in self._places.values()])).sum(-1)
            return UnitRows(self.z, self.k if self.teacher else None, similarities)
        return unit_rows(self._inputs.z, self._inputs.keys, normalize=self._normalize)

    def replace_rows(self, z: Tensor, k: Tensor, places: dict[Link, Link] | None = None) -> None:
        """Use other anchors and keys from now on, as they are; without a teacher k is z.

        With `places`, each link has views of its own in z and k, at these indices, in the order of the links.
        """
        self._places = self._places if places is None else places
        self.z, self.k = z, k if self.teacher else z
        self._inputs = self._inputs._replace(z=z, keys=k if self.teacher else None)
        self._normalize = False

    def normalize(self, eps: float) -> None:
        """Scale the rows to length one; those shorter than eps stay as they are."""
        self.replace_rows(wide_units(self.z, eps), wide_units(self.k, eps) if self.teacher else self.z)

    # Links

    @property
    def links(self) -> list[Link]:
        """Every query view with each of its positive key views, sorted."""
        alone = self.V == 1
        return [(v, w) for v in range(self.V) for w in range(self.W) if alone or v != w]

    def one_way_links(self, symmetric: bool = False) -> list[Link]:
        """Return each pair of views once, the earlier one as the query; all links if `symmetric` or with a teacher."""
        return self.links if symmetric or self.teacher else [(v, w) for v, w in self.links if v < w]

    @property
    def paired(self) -> bool:
        """Whether each link has views of its own in z and k."""
        return bool(self._places)

    def place(self, link: Link) -> Link:
        """Return the indices into z and k of the two views of a link."""
        return self._places.get(link, link)

    # Positives

    @cached
    def positive(self) -> Tensor:
        """Mean similarity of each anchor to its positives: [V,B]."""
        if self.labels is not None:
            return self._similarity_to_same_label()
        return self.similarity(self.links) if self._one_positive else self.reduce_positives(lambda s: s.mean(-1))

    @property
    def _one_positive(self) -> bool:
        """Whether each anchor has one positive, so that means and log-sum-exps over positives need no work."""
        return len(self.links) == self.V

    def similarity(self, links: Sequence[Link]) -> Tensor:
        """Return the similarity of each image's two views, for each link: [P,B]."""
        return select_rows(self._rows.similarities, [self._pair(*self.place(link)) for link in links])

    def _pair(self, v: int, w: int) -> int:
        """Return the index of two views among the similarities."""
        if self._places:
            return v
        if self.teacher:
            return v * len(self._rows.keys) + w  # type: ignore[arg-type]
        low, high = min(v, w), max(v, w)
        return low * (2 * self.V - low - 1) // 2 + high - low - 1

    def squared_distance(self, links: Sequence[Link]) -> Tensor:
        """Return ||z - k||^2 of each image's two views, for each link, for rows of any length: [P,B]."""
        z = self.z.unbind()  # once, because each index would have a gradient of the size of z
        k = self.k.unbind() if self.teacher else z
        # Without a teacher (v,w) and (w,v) share one result. 2 - 2 <z, k> would cancel for close views.
        pairs = [self.place(link) for link in links]
        pairs = pairs if self.teacher else [(min(pair), max(pair)) for pair in pairs]
        once = sorted(set(pairs))
        apart = torch.stack([z[v] for v, _ in once]) - torch.stack([k[w] for _, w in once])
        return select_rows(apart.square().sum(-1), [once.index(pair) for pair in pairs])

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

    def _similarity_to_same_label(self) -> Tensor:
        """Return the mean similarity to all other rows of the anchor's label, from the sum of the rows per label."""
        everyone = self.gather_views(self.z.dtype)[0]
        names, groups = torch.unique(self._all_labels, return_inverse=True)
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
            return self._flat_statistics(scale, None, self.bank.to(self.dtype), None, **options)
        found = self._small_statistics(scale, None, **options)
        return self._statistics(scale, self._keys, None, **options) if found is None else found[0]

    def others(self, scale: float | Tensor) -> Tensor:
        """Return the log-sum-exp of each anchor over every other row, including its positives: [V,B]."""
        if self.labels is not None:
            rows = torch.arange(self.V * self.N, device=self.labels.device).view(self.V, self.N)
            mine = rows[:, distributed.rank() * self.B :][:, : self.B].reshape(-1)
            keys, key_ids = (None, None) if self._keys is None else (self._keys.flatten(0, 1), rows.reshape(-1))
            return self._flat_statistics(scale, mine, keys, key_ids).lse
        if self._one_positive:
            return log_add_exp(self.negatives(scale).lse, self.positive, scale)
        positives = self.reduce_positives(lambda s: torch.logsumexp(scale * s, dim=-1))
        return log_add_exp(self.negatives(scale).lse, positives, 1.0)

    def same_view(self, scale: Scale, **options: Unpack[StatisticsOptions]) -> RowStatistics:
        """Return the statistics of each anchor against the same view of other images, with gradient to both: [V,B]."""
        links = [(v, v) for v in range(self.V)]
        found = None if self.teacher else self._small_statistics(scale, links, **options)
        if found is not None:
            return found[0]
        if distributed.world() == 1:
            keys = None
        elif self.bank is not None:  # the bank has the negatives, so nobody needs a teacher's keys
            keys = distributed.gather(self._rows.z, dim=1)
        else:
            keys = self.gather_views(self.dtype)[0].to(self.dtype)
        return self._statistics(scale, keys, links, **options)

    def negatives_and_same_view(self, scale: Scale, **options: Unpack[StatisticsOptions]) -> RowStatistics:
        """Return the statistics of each anchor against its negatives and the same view of other images: [V,B]."""
        segments = [self.same_view(scale, **options), self.negatives(scale, **options)]
        return merge(segments, detach_weights=options.get("detach_weights", False))

    def constant_negatives_and_same_view(self, scale: Scale) -> RowStatistics:
        """Do the same with a gradient of the weights through the same view alone: [V,B]."""
        same_view = self.same_view(scale, with_mean=True)
        constant = self.negatives(scale, with_mean=True, detach_weights=True)
        return merge([RowStatistics(constant.lse.detach(), constant.mean), same_view])

    def mean_key_negatives(self, scale: float | Tensor) -> Tensor:
        """Return the lse of each anchor over the mean of each other image's positive keys, or over the bank: [V,B]."""
        if self.bank is not None:
            return self.negatives(scale).lse
        k = self.k.unbind()
        means = [torch.stack([k[w] for u, w in self.links if u == v]).mean(0) for v in range(self.V)]
        keys = distributed.gather(torch.stack(means).to(self.dtype), dim=1)
        return self._statistics(scale, keys, [(v, v) for v in range(self.V)]).lse

    def link_negatives(
        self, scale: Scale, links: Sequence[Link], **options: Unpack[StatisticsOptions]
    ) -> RowStatistics:
        """Return the statistics of each link's query view against its key view of other images, or the bank: [P,B]."""
        if self.bank is not None:
            rows = self.negatives(scale, **options)
            # Stacked, not indexed by a list: that would copy the list to the device, which a captured graph can't.
            return RowStatistics(*(torch.stack([x[..., v, :] for v, _ in links], -2) for x in rows))
        found = self._small_statistics(scale, links, **options)
        return self._statistics(scale, *self._link_keys(links), **options) if found is None else found[0]

    def link_others(self, scale: float | Tensor, links: Sequence[Link]) -> Tensor:
        """Return the log-sum-exp of each link's query view over its key view of all images, positives too: [P,B]."""
        return log_add_exp(self.link_negatives(scale, links).lse, self.similarity(links), scale)

    def attraction_and_others(
        self, scale: float | Tensor, links: Sequence[Link] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return -scale times the similarity to the positives, and the log-sum-exp over all others, positives too.

        For each anchor [V,B], against all other rows, or for each link [P,B].
        """
        found = self._small_statistics(scale, links, positive=True, attraction=True) if self._one_positive else None
        if found is not None:
            return found[1], found[0].lse
        if links is None:
            return -scale * self.positive, self.others(scale)
        return -scale * self.similarity(links), self.link_others(scale, links)

    def attraction_and_negatives(self, scale: float | Tensor) -> tuple[Tensor, Tensor]:
        """Return -scale times the similarity to the positives, and the log-sum-exp over all negatives: [V,B]."""
        found = self._small_statistics(scale, None, attraction=True) if self._one_positive else None
        return (-scale * self.positive, self.negatives(scale).lse) if found is None else (found[1], found[0].lse)

    def link_softplus_sums(self, scale: float | Tensor, bias: float | Tensor, links: Sequence[Link]) -> Tensor:
        """Return sum_j softplus(scale s_ij + bias) of each link's query view with its key view of other images: [P,B].

        Scale and bias may be tensors with gradient.
        """
        keys, places = self._link_keys(links)
        rows = self._rows.z.unbind()
        columns = rows if keys is None else keys.unbind()
        ids, key_ids = self.labels, self._all_labels
        if ids is None or key_ids is None:
            device = self._rows.z.device
            ids, key_ids = image_indices(self.B, self._start, device), image_indices(self.N, 0, device)
        sums = [
            softplus_sums(rows[v], columns[w], scale=scale, bias=bias, query_ids=ids, key_ids=key_ids)
            for v, w in places
        ]
        return torch.stack(sums)

    def _link_keys(self, links: Sequence[Link]) -> tuple[Tensor | None, list[Link]]:
        """Return the key views of these links over all ranks, and the places of the links in z and these keys.

        None means that the keys are the queries. On several ranks one message in each direction serves all links, in
        both directions between two views too: forward, every rank sends its rows of the key views that the links use,
        [views,B,D] in the type of the kernels; backward, the gradients of all these rows are summed over ranks.
        """
        places = [self.place(link) for link in links]
        used = sorted({w for _, w in places})
        views = self._rows.z if self._rows.keys is None else self._rows.keys
        if distributed.world() == 1 or len(used) == len(views) or self._everyone is not None:
            return self._keys, places
        keys = distributed.gather(torch.stack([views[w] for w in used]), dim=1)
        return keys, [(v, used.index(w)) for v, w in places]

    def _small_statistics(
        self, scale: Scale, links: Sequence[Link] | None, with_mean: bool = False, detach_weights: bool = False,
        positive: bool = False, attraction: bool = False,
    ) -> tuple[RowStatistics, Tensor] | None:  # fmt: skip
        """Return statistics against the keys of other images and the attraction, with unit rows on the way; or None.

        One function for all of them saves time if the batch is small. It must be the first to ask for rows.
        """
        constant = self._inputs.keys is None or not self._inputs.keys.requires_grad
        if "_rows" in vars(self) or self.bank is not None or distributed.world() > 1 or not constant:
            return None
        inputs, places = self._inputs, None if links is None else [self.place(link) for link in links]
        kind, scales = kind_of_links(inputs.z, inputs.keys, places), as_list(scale)
        plain = len(scales) <= 2 and not any(isinstance(a, Tensor) for a in scales)
        one_pair = kind not in (ALL, SAME) or (kind == ALL and self.V == 2 and not self.teacher)
        stored = kind == ALL and not with_mean and self.labels is None and (one_pair or not attraction)
        if stored and fits_stored_batch(inputs.z, inputs.keys, self._normalize, scales):
            z, similarities, lse, pull = StoredBatchFunction.apply(inputs.z, scales[0], positive)
            self._rows = UnitRows(z, None, similarities)
            return RowStatistics(lse[None] if isinstance(scale, Sequence) else lse, lse.new_empty(0)), pull
        if kind is None or not plain or (attraction and not one_pair) or not fits_small_kernel(inputs.z, inputs.keys):
            return None
        arguments = Arguments(
            self.labels, self._all_labels, kind, self.V if places is None else len(places), 0, scales,
            detach_weights, with_mean, not isinstance(scale, Sequence), positive, attraction,
        )  # fmt: skip
        z, keys, similarities, *found = AnchorFunction.apply(inputs.z, inputs.keys, self._normalize, arguments)
        self._rows = UnitRows(z, keys, similarities)
        return RowStatistics(*found[:2]), found[2]

    def _statistics(
        self, scale: Scale, keys: Tensor | None, links: list[Link] | None, **options: Unpack[StatisticsOptions]
    ) -> RowStatistics:
        """Return the statistics of anchors against keys of other images, or against each other without keys."""
        return link_statistics(
            self._rows.z, keys, links, scale=scale, query_ids=self.labels, key_ids=self._all_labels,
            start=self._start, unit=self._normalize, **options,
        )  # fmt: skip

    def _flat_statistics(
        self, scale: Scale, query_ids: Tensor | None, keys: Tensor | None, key_ids: Tensor | None,
        with_mean: bool = False, detach_weights: bool = False,
    ) -> RowStatistics:  # fmt: skip
        """Return the statistics of all anchors against rows that are no views, such as a bank: [V,B]."""
        rows = row_statistics(
            self._rows.z.flatten(0, 1), keys, scale=scale, query_ids=query_ids, key_ids=key_ids,
            with_mean=with_mean, detach_weights=detach_weights, unit=self._normalize and self.bank is None,
        )  # fmt: skip
        # By the quotient, because -1 can't be inferred for an empty mean.
        return RowStatistics(*(x.view(*x.shape[:-1], self.V, x.shape[-1] // self.V) for x in rows))

    @property
    def _start(self) -> int:
        """The index of this rank's first image among those of all ranks."""
        return distributed.rank() * self.B

    @cached
    def _keys(self) -> Tensor | None:
        """Keys of all ranks, in the type of the kernels: [W,N,D]; None if the anchors are the keys."""
        if self._rows.keys is None and distributed.world() == 1:
            return None
        if self._everyone is not None:
            return self._everyone[1].to(self.dtype)
        return distributed.gather(self._rows.z if self._rows.keys is None else self._rows.keys, dim=1)

    def gather_views(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return z [V,N,D] and k [W,N,D] of all ranks, sent in one message of this type; later calls use it too.

        An objective that needs more than its keys calls this before its negatives, which then send nothing.
        """
        if distributed.world() == 1:
            return self.z, self.k
        if self._everyone is None:
            views = torch.cat([self.z, self.k]) if self.teacher else self.z
            both = distributed.gather(views.to(dtype), dim=1)
            z, k = (both[: self.V], both[self.V :]) if self.teacher else (both, both)
            self._everyone = z, k if self.k.requires_grad else k.detach()
        return self._everyone

    @cached
    def _all_labels(self) -> Tensor | None:
        """Labels of the images of all ranks: [N]. They are sent in a message of their own."""
        if self.labels is None:
            return None
        labels = distributed.gather(self.labels)
        if may_read_values(labels) and bool((labels == labels[0]).all()):
            raise ValueError(f"all {self.N} labels are {int(labels[0])}: give at least 2 different labels")
        return labels

    # Statistics of the whole batch

    def asymmetries(self, links: Sequence[Link]) -> Tensor:
        """Return ||A - A^T||_F of the affinity matrix A_ij = <z_i, k_j> of each link's views, over all ranks: [P]."""
        z = self.z.unbind()  # once, because each index would have a gradient of the size of z
        k = self.k.unbind() if self.teacher else z
        places = [self.place(link) for link in links]
        if distributed.world() == 1:
            return stack([asymmetry(z[v], k[w]) for v, w in places])
        all_z, all_k = (x.unbind() for x in self.gather_views(self.z.dtype))
        return stack([asymmetry(z[v], k[w], all_z[v], all_k[w], total=distributed.total) for v, w in places])

    def log_mean_exp(self, rows: Tensor) -> Tensor:
        """Return log mean exp over the images of all ranks: [...,B] to [...]."""
        return torch.logsumexp(distributed.gather(rows, dim=-1), dim=-1) - math.log(self.N)
