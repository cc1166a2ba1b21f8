"""Select and count the rows of links of views.

P links of a query view with a key view, B images.  rows [P,B].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from kontrast.kernels.view_links import Link


def stack(scalars: list[Tensor]) -> Tensor:
    """Stack scalars; a single one is not copied."""
    return scalars[0][None] if len(scalars) == 1 else torch.stack(scalars)


def select_rows(rows: Tensor, index: Sequence[int]) -> Tensor:
    """Select rows by index, without copying them if possible, and without copying the index to the device."""
    if list(index) == list(range(len(rows))):
        return rows
    if len(set(index)) == 1 and len(rows) == 1:
        return rows.expand(len(index), *rows.shape[1:])
    parts = rows.unbind()  # once, because each index would have a gradient of the size of all rows
    return torch.stack([parts[n] for n in index])


def links_per_query(links: Sequence[Link]) -> list[int]:
    """Return the number of links of each query view that has any; links are sorted by query view."""
    return list(Counter(v for v, _ in links).values())
