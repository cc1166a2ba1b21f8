"""Groups of images that are nearly the same to an encoder: their vectors point in the same direction.

N rows, F width.  Cosines are computed in tiles [<= TILE, <= TILE]; the whole matrix is never stored. Among very many
rows, an index finds the nearest ones of each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kontrast.errors import DataError, UsageError, printable
from kontrast.runs.embed import train_embeddings
from kontrast.runs.embeddings_file import Embeddings, read_embeddings
from kontrast.runs.index import index as build
from kontrast.runs.result_sequence import ResultSequence
from kontrast.runs.run import open_run
from kontrast.runs.vector_index import VectorIndex, open_index
from kontrast.training.device import choose_device
from kontrast.training.progress import Progress

TILE = 4_096
MOST_PAIRS = 1_000_000
INDEXED_FROM = 500_000
"""Of so many rows, not every pair is compared: that would take hours."""
NEAREST = 16
"""Rows that an index compares with each; larger groups are found as chains."""
ROUNDING = 1e-6  # the float32 cosine of two equal rows may be 0.9999998


@dataclass(frozen=True)
class DuplicateGroup:
    """Names in the file's order, and the least cosine among the pairs that connect them."""

    similarity: float
    names: list[str]


@dataclass(frozen=True, repr=False)
class Duplicates(ResultSequence[DuplicateGroup]):
    """Groups of near-duplicates, most similar first; printed as a table with a summary line."""

    target: Path
    above: float

    @property
    def repeated(self) -> int:
        """How many images could be removed so that each group keeps one."""
        return sum(len(group.names) - 1 for group in self.items)

    def __str__(self) -> str:
        lines = [f"{group.similarity:7.4f}  {'  '.join(map(printable, group.names))}" for group in self.items]
        summary = f"{len(self):,} groups at a cosine of {self.above:g} or more; {self.repeated:,} images repeat another"
        return "\n".join([*lines, summary])

    def to_dict(self) -> dict[str, Any]:
        groups = [asdict(group) for group in self.items]
        return {"target": str(self.target), "above": self.above, "repeated": self.repeated, "groups": groups}


def duplicates(
    target: str | os.PathLike[str],
    above: float = 0.99,
    *,
    index: str | os.PathLike[str] | None = None,
    exact: bool = False,
    device: str = "auto",
    say: Callable[[str], None] = print,
) -> Duplicates:
    """Find groups of near-duplicates: copies, bursts, other sizes of one picture.

    Args:
        target: An embeddings file, or a run (folder or `kontrast.Run`) for its train images.
        above: The least cosine similarity of two images that count as the same; default: 0.99.
        index: An index of the file, made by `kontrast.index`, by which each row is compared with its nearest ones.
            Default: none below 500,000 rows; from there on, one beside the file, which is made if there is none.
        exact: Compare all pairs, however many rows there are.
        device: "auto" (default), "cpu" or "cuda".
        say: Called with each line of progress and each warning; default: print.

    Returns:
        A sequence of groups, most similar first, each with `similarity` and `names`.

    Example:
        >>> import kontrast
        >>> groups = kontrast.duplicates("vectors.npy", above=0.999, device="cpu")
        >>> print(groups)
         1.0000  row 0  row 2
        1 groups at a cosine of 0.999 or more; 1 images repeat another
    """
    if not -1 <= above <= 1:
        raise UsageError(f"--above {above:g}: a cosine lies between -1 and 1; give one near 1")
    path = Path(target)
    if index is not None and exact:
        raise UsageError("--index with --exact: an index is what --exact does without; leave one of them out")
    file = read_embeddings(train_embeddings(open_run(target), device, say) if path.is_dir() else path)
    found_index = open_index(index, file.path) if index is not None else None
    if found_index is None and not exact and len(file) >= INDEXED_FROM:
        found_index = index_beside(file, say)
    with Progress("compare", len(file)) as bar:
        groups = group_duplicates(file, above, choose_device(device), bar.advance, found_index)
    return Duplicates(tuple(groups), path, above)


def index_beside(file: Embeddings, say: Callable[[str], None]) -> VectorIndex:
    """The index beside an embeddings file, which is made if there is none of its present content."""
    place = file.path.with_suffix(".index")
    try:
        found = open_index(place, file.path)
    except DataError:
        say(f"{len(file):,} rows are compared through an index, {place}; --exact compares all pairs instead")
        build(file.path, place, say=say)
        found = open_index(place, file.path)
    recall = max((one["recall"] for one in found.facts["measured"] if one["lists"]), default=1.0)
    say(f"the index finds {recall:.1%} of the nearest rows")
    return found


def group_duplicates(
    file: Embeddings,
    above: float = 0.99,
    device: torch.device | str = "cpu",
    advance: Callable = lambda _: None,
    index: VectorIndex | None = None,
) -> list[DuplicateGroup]:
    """Group rows that are connected by pairs with a cosine of at least `above`; the most similar group first.

    Args:
        file: The rows.
        above: The least cosine.
        device: Where all pairs are compared.
        advance: Called with the number of rows that have been compared.
        index: Compare each row only with those that this index finds nearest.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    pairs = list(pairs_above(file, above, device, advance) if index is None else nearest_pairs(index, above, advance))
    if not pairs:
        return []
    first, second, _ = zip(*pairs)
    graph = coo_array(([1] * len(pairs), (first, second)), shape=(len(file), len(file)))
    group_of = connected_components(graph, directed=False)[1].tolist()
    least: dict[int, float] = {}
    members: dict[int, set[int]] = {}
    for i, j, cosine in pairs:
        least[group_of[i]] = min(cosine, least.get(group_of[i], 1.0))
        members.setdefault(group_of[i], set()).update((i, j))
    groups = sorted((-least[group], sorted(rows)) for group, rows in members.items())
    return [DuplicateGroup(round(-minus, 6), [str(file.names[row]) for row in rows]) for minus, rows in groups]


def pairs_above(
    file: Embeddings, above: float, device: torch.device | str, advance: Callable
) -> Iterator[tuple[int, int, float]]:
    """Yield every pair of rows (i < j) whose cosine is at least `above`, with the cosine."""
    count = 0
    for start in range(0, len(file), TILE):
        rows = file[start : start + TILE].to(device)
        for other in range(start, len(file), TILE):
            columns = rows if other == start else file[other : other + TILE].to(device)
            cosines = rows @ columns.T
            similar = cosines >= above - ROUNDING
            similar = similar.triu(1) if other == start else similar
            count += int(similar.sum())
            if count > MOST_PAIRS:
                raise DataError(f"more than {MOST_PAIRS:,} pairs have a cosine of {above:g} or more: raise --above")
            for (i, j), cosine in zip(similar.nonzero().tolist(), cosines[similar].tolist()):
                yield start + i, other + j, min(1.0, cosine)
        advance(len(rows))


def nearest_pairs(index: VectorIndex, above: float, advance: Callable) -> Iterator[tuple[int, int, float]]:
    """Yield pairs of rows (i < j) whose cosine is at least `above`, among each row and its nearest ones."""
    count = 0
    for start in range(0, len(index.file), TILE):
        cosines, rows = index.search(index.file[start : start + TILE], NEAREST + 1)
        own = torch.arange(start, start + len(rows))[:, None]
        similar = (cosines >= above - ROUNDING) & (rows > own)  # a pair is found from one of its rows or from both
        mirrored = (cosines >= above - ROUNDING) & (rows >= 0) & (rows < own)
        count += int(similar.sum())
        if count > MOST_PAIRS:
            raise DataError(f"more than {MOST_PAIRS:,} pairs have a cosine of {above:g} or more: raise --above")
        for place, column in (similar | mirrored).nonzero().tolist():
            i, j = sorted((start + place, int(rows[place, column])))
            yield i, j, min(1.0, float(cosines[place, column]))
        advance(len(rows))
