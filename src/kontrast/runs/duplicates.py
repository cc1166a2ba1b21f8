"""Images that are all but the same to an encoder: groups whose vectors point in one direction.

N rows, F width.  A tile is [at most TILE, at most TILE] cosines; the whole matrix is never stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kontrast.errors import DataError, UsageError
from kontrast.lens.measures import directions
from kontrast.runs.embed import open_run, own_embeddings
from kontrast.runs.embeddings_file import Embeddings, read_embeddings
from kontrast.training.device import choose_device
from kontrast.training.progress import Progress

TILE = 4_096
MOST_PAIRS = 1_000_000
ROUNDING = 1e-6  # of a cosine in float32: one of two equal rows may stand at 0.9999998
Pair = tuple[int, int, float]


def duplicates(
    file: Embeddings,
    above: float = 0.99,
    device: torch.device | str = "cpu",
    advance: Callable[[int], None] | None = None,
) -> list[dict[str, Any]]:
    """Groups of images, each like another of its group by a cosine of at least `above`; the most alike first.

    A group has its `names` in the file's order and the least `similarity` of the pairs that join it. advance: told how
    many rows were compared with all that follow.
    """
    if not -1 <= above <= 1:
        raise UsageError(f"--above {above:g}: a cosine lies between -1 and 1; give one near 1")
    pairs = list(pairs_above(file, above, device, advance))
    least: dict[int, float] = {}
    members: dict[int, list[int]] = {}
    group = joined(pairs)
    for first, _, cosine in pairs:
        least[group[first]] = min(cosine, least.get(group[first], 1.0))
    for row in sorted(group):
        members.setdefault(group[row], []).append(row)
    order = sorted(members, key=lambda top: (-least[top], members[top]))
    return [{"similarity": round(least[n], 6), "names": [str(file.names[row]) for row in members[n]]} for n in order]


def pairs_above(
    file: Embeddings, above: float, device: torch.device | str, advance: Callable[[int], None] | None
) -> Iterator[Pair]:
    """Every pair of rows, the earlier first, whose cosine is at least `above`."""
    count = 0
    for start in range(0, len(file), TILE):
        rows = directions(file.rows(slice(start, start + TILE))).to(device)
        for other in range(start, len(file), TILE):
            columns = rows if other == start else directions(file.rows(slice(other, other + TILE))).to(device)
            cosines = rows @ columns.T
            alike = cosines >= above - ROUNDING
            alike = alike.triu(1) if other == start else alike
            count += int(alike.sum())
            if count > MOST_PAIRS:
                raise DataError(f"more than {MOST_PAIRS:,} pairs have a cosine of {above:g} or more: raise --above")
            for (i, j), cosine in zip(alike.nonzero().tolist(), cosines[alike].tolist()):
                yield start + i, other + j, min(1.0, cosine)
        if advance:
            advance(len(rows))


def joined(pairs: list[Pair]) -> dict[int, int]:
    """Each row of some pair, with the one that stands for its group: rows of one chain of pairs are one group."""
    above: dict[int, int] = {}

    def top(row: int) -> int:
        while above.setdefault(row, row) != row:
            above[row] = above[above[row]]
            row = above[row]
        return row

    for first, second, _ in pairs:
        above[top(second)] = top(first)
    return {row: top(row) for row in list(above)}


def alike(
    target: Path, above: float = 0.99, *, device: str = "auto", say: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """Groups of near-duplicates in an embeddings file, or among a run's own train images."""
    path = own_embeddings(open_run(target), device, say) if target.is_dir() else target
    file = read_embeddings(path)
    with Progress("compare", len(file)) as bar:
        return duplicates(file, above, choose_device(device), bar.advance)
