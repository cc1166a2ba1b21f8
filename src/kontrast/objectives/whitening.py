"""Whiten the views of an objective, each pair of compared views together, all together, or each on its own.

V query views, W key views, B images of this rank, N images of all ranks, D width.  z [V,B,D], k [W,B,D].
"""

from __future__ import annotations

import torch
from torch import Tensor

from kontrast import distributed
from kontrast.kernels.covariance import whiten
from kontrast.objectives.arguments import check_ridge
from kontrast.objectives.pairs import Pairs


def whiten_pairs(
    pairs: Pairs, ridge: float, *, absolute: bool = False, detach: bool = False, pooled: bool = False
) -> Pairs:
    """Whiten z and keys in place, the two views of each link together, and return the pairs.

    With `pooled`, all rows of z and keys have one mean and covariance.
    """
    check_ridge(ridge, absolute)

    def white(views: Tensor) -> Tensor:
        """Whiten the rows of views [...,V,B,D] together, for each index of the leading dimensions."""
        rows, count, total = views.flatten(-3, -2), views.shape[-3] * pairs.N, distributed.total
        return whiten(rows, ridge=ridge, absolute=absolute, detach=detach, count=count, total=total).view_as(views)

    if pooled and pairs.teacher:
        pairs.replace_rows(*white(torch.cat([pairs.z, pairs.k])).split([pairs.V, pairs.W]))
        return pairs
    if pooled or (pairs.V == 2 and not pairs.teacher):
        pairs.replace_rows(*(white(pairs.z),) * 2)
        return pairs
    z, k, links, once = pairs.z.unbind(), pairs.k.unbind(), pairs.links, pairs.one_way_links()
    left, right = white(torch.stack([torch.stack([z[v], k[w]]) for v, w in once])).unbind(1)
    if pairs.teacher:
        pairs.replace_rows(left, right, {link: (place, place) for place, link in enumerate(links)})
        return pairs
    # Without a teacher z has one view per link: its query, whitened together with its key.
    lefts, rights = (dict(zip(once, side.unbind())) for side in (left, right))
    rows = torch.stack([lefts[v, w] if v < w else rights[w, v] for v, w in links])
    pairs.replace_rows(rows, rows, {(v, w): (place, links.index((w, v))) for place, (v, w) in enumerate(links)})
    return pairs


def whitened_count(pairs: Pairs) -> int:
    """Return the number of rows, over all ranks, that were whitened together."""
    return pairs.N * (2 if pairs.paired else pairs.V + (pairs.W if pairs.teacher else 0))


def whiten_by_view(pairs: Pairs, ridge: float) -> Pairs:
    """Whiten each view of z and of the keys separately, in place, and return the pairs."""
    check_ridge(ridge)

    def white(views: Tensor) -> Tensor:
        return whiten(views, ridge=ridge, count=pairs.N, total=distributed.total)

    pairs.replace_rows(*((white(pairs.z), white(pairs.k)) if pairs.teacher else (white(pairs.z),) * 2))
    return pairs
