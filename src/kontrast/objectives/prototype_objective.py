"""Objectives with prototypes: each view predicts how other views of its image are assigned to them.

V query views, W assigning key views, B images, K prototypes, D width, P links of a query view with an assigning view.
z [V,B,D], keys and targets [W,B,D], bias [K] or [W,K].
"""

from __future__ import annotations

from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from kontrast import distributed
from kontrast.kernels import mean_vectors, row_statistics
from kontrast.kernels.view_links import Link
from kontrast.objectives.arguments import Number
from kontrast.objectives.base import Objective, Terms, without_autocast
from kontrast.objectives.inputs import OptionalInputs
from kontrast.objectives.link_rows import links_per_query
from kontrast.objectives.pairs import Pairs

STORED = 2**25
"""The most entries of a matrix of keys and prototypes that is stored, 128 MiB in float32. Tile by tile, DINO's 65,536
prototypes take two thousand more operations, each a launch on a GPU."""


class Assignment(NamedTuple):
    """Where keys are assigned: p = softmax_k(<queries, prototypes_k> + bias_k), all without gradient."""

    queries: Tensor  # [W,B,D]
    prototypes: Tensor  # [K,D]
    bias: Tensor  # [K], or [W,K] with one per view

    def means(self, values: Tensor) -> Tensor:
        """Return the mean of values [K,D] under each key's assignment, with gradient to the values: [W,B,D]."""
        if self.bias.ndim == 1:
            return self._means(self.queries.flatten(0, 1), values, self.bias).view_as(self.queries)
        parts = [self._means(rows, values, bias) for rows, bias in zip(self.queries.unbind(), self.bias.unbind())]
        return torch.stack(parts)

    def _means(self, queries: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        how = "dense" if len(queries) * len(values) <= STORED else "auto"
        return mean_vectors(queries, self.prototypes, scale=1.0, values=values, key_bias=bias, implementation=how)

    def log_probabilities(self) -> Tensor:
        """Return log p, the whole matrix [W,B,K]."""
        return torch.log_softmax(self.queries @ self.prototypes.T + self.bias.unsqueeze(-2), dim=-1)


class PrototypeObjective(Objective):
    """The cross-entropy of assignments of keys to prototypes and their prediction from other views of the image.

        loss = mean over links (v,w) of -<z_v, sum_k p_wk c_k>/tau + log sum_k exp(<z_v, c_k>/tau)

    That is -sum_k p_wk log softmax_k(<z_v, c_k>/tau). Only global views assign, all views predict. A subclass defines
    `assign`.
    """

    takes_global_views = True
    needs_prototypes = True
    temperature: Number

    def assign(self, keys: Tensor, prototypes: Tensor, pairs: Pairs) -> Assignment:
        """Return the assignment of the keys [W,B,D] of the assigning views, given the prototypes for keys [K,D]."""
        raise NotImplementedError(f"{type(self).__name__} has no assign(keys, prototypes, pairs)")

    def contrast(self, pairs: Pairs) -> Terms:
        z, links, C = pairs.z, assigning_links(pairs), own_prototypes(pairs)
        targets = self.assign(assigning_keys(pairs), key_prototypes(pairs), pairs).means(C).unbind()
        sums = [torch.stack([targets[w] for u, w in links if u == v]).sum(0) for v in range(pairs.V)]
        each = pairs.V / len(links)  # the mean of the rows is then the mean over links
        attraction = (z * torch.stack(sums)).sum(-1) * (-each / self.temperature)
        rows, keys = z.to(pairs.dtype).flatten(0, 1), C.to(pairs.dtype)
        lse = row_statistics(rows, keys, scale=1 / self.temperature, with_mean=False).lse.view(pairs.V, pairs.B)
        counts = links_per_query(links)
        if len(set(counts)) > 1:
            lse = torch.stack([row * (each * count) for row, count in zip(lse.unbind(), counts)])
        return Terms(attraction=attraction, repulsion=lse)

    @torch.no_grad()
    def entropies(self, z: Tensor, z2: Tensor | None = None, **given: Unpack[OptionalInputs]) -> dict[str, Tensor]:
        """Return what tells learning from both kinds of collapse, over all ranks; call it like the objective.

        The loss is `kl` + `entropy`. If `entropy`, the mean entropy of an assignment, is log K, every key is assigned
        to all prototypes alike; if `usage`, the entropy of the mean assignment, is 0, all keys to the same prototype.
        In both cases `kl` is near 0 and nothing is learned.
        """
        inputs = self._check(z, z2, given)
        with without_autocast(inputs.z.device.type):
            pairs = self.pairs(inputs)
            loss = self.contrast(pairs).total.mean()
            log_p = self.assign(assigning_keys(pairs), key_prototypes(pairs), pairs).log_probabilities()
            entropy = entropies_of(log_p).mean(-1)
            entropy = torch.stack([entropy[w] for _, w in assigning_links(pairs)]).mean()
            loss, entropy = distributed.mean(torch.stack([loss, entropy])).unbind()
            usage = entropies_of(distributed.mean(log_p.exp().mean((0, 1))).log())
        return {"kl": loss - entropy, "entropy": entropy, "usage": usage}


def entropies_of(log_p: Tensor) -> Tensor:
    """Return -sum_k p_k log p_k over the last dimension; an impossible k has no part in it."""
    return -torch.special.xlogy(log_p.exp(), log_p.exp()).sum(-1)


def assigning_links(pairs: Pairs) -> list[Link]:
    """Return every query view with each global key view of another crop, sorted."""
    count = pairs.given.global_views or pairs.W
    return [(v, w) for v, w in pairs.links if w < count]


def assigning_keys(pairs: Pairs) -> Tensor:
    """Return the keys of the global views, without gradient: [W,B,D]."""
    return pairs.k.detach()[: pairs.given.global_views]


def own_prototypes(pairs: Pairs) -> Tensor:
    """Return the prototypes [K,D] in the type of z."""
    assert pairs.given.prototypes is not None
    return pairs.given.prototypes.to(pairs.z.dtype)


def key_prototypes(pairs: Pairs) -> Tensor:
    """Return the teacher's prototypes [K,D], or else the prototypes, without gradient, in the type of z."""
    given = pairs.given.key_prototypes
    return own_prototypes(pairs).detach() if given is None else given.to(pairs.z.dtype)
