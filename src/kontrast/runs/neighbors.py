"""The nearest neighbors of one image, or the images that fit a text, among the vectors of an embeddings file.

N rows of the file, F width, D width of the projections, k neighbors.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kontrast.errors import DataError, UsageError, printable
from kontrast.lens.measures import directions
from kontrast.probes import extract_features, nearest_rows
from kontrast.runs.embed import train_embeddings
from kontrast.runs.embeddings_file import read_embeddings
from kontrast.runs.result_sequence import ResultSequence
from kontrast.runs.run import open_run
from kontrast.runs.towers import Towers
from kontrast.runs.vector_index import open_index
from kontrast.training.device import choose_device


@dataclass(frozen=True)
class Neighbor:
    """A row of the embeddings file, its name, and its cosine similarity to the query."""

    row: int
    name: str
    similarity: float


@dataclass(frozen=True, repr=False)
class Neighbors(ResultSequence[Neighbor]):
    """The neighbors of `image`, or of `text`, nearest first; printed as a table of similarity and name."""

    image: Path
    text: str = ""

    def __str__(self) -> str:
        return "\n".join(f"{one.similarity:7.4f}  {printable(one.name)}" for one in self.items)

    def to_dict(self) -> dict[str, Any]:
        query = {"text": self.text} if self.text else {"image": str(self.image)}
        return {**query, "neighbors": [asdict(one) for one in self.items]}


def neighbors(
    run: str | os.PathLike[str],
    image: str | os.PathLike[str],
    *,
    embeddings: str | os.PathLike[str] | None = None,
    index: str | os.PathLike[str] | None = None,
    k: int = 8,
    float_range: tuple[float, float] | None = None,
    device: str = "auto",
    say: Callable[[str], None] = print,
) -> Neighbors:
    """Find the images most similar to `image`, or with a text tower those that fit a text.

    Args:
        run: A run folder or a `kontrast.Run`.
        image: The image file to compare; or, if the run was trained with texts and there is no such file, a text, such
            as "a dog in the snow".
        embeddings: The embeddings file to search, written with the same run; default: the run's train images.
        index: The index of that file, made by `kontrast.index`, which then is searched; default: search exactly.
        k: How many neighbors to return; default: 8.
        float_range: The values of black and white, if `image` has float values; default: the recipe's.
        device: "auto" (default), "cpu" or "cuda".
        say: Called with each line of progress and each warning; default: print.

    Returns:
        A sequence of neighbors, nearest first, each with `row`, `name` and cosine `similarity`.

    Example:
        >>> import kontrast
        >>> found = kontrast.neighbors("runs/digits", "photo.png", k=3, device="cpu")  # doctest: +ELLIPSIS
        embedding the 192 train images of the run into runs/digits/embeddings/train.npy
        >>> len(found), found[0].similarity <= 1
        (3, True)
    """
    if k < 1:
        raise UsageError(f"-k {k}: give at least 1")
    run, on = open_run(run), choose_device(device)
    encoder = run.encoder(on)
    text = os.fspath(image) if run.recipe.text is not None and not os.path.exists(image) else ""
    if text and index is not None:
        raise UsageError("a text is compared with projections, and an index has features: leave out --index")
    query_image = None if text else open_run(run, float_range).read_image(image)
    found_index = None if index is None else open_index(index, embeddings)
    if found_index is not None:
        path, file = found_index.file.path, found_index.file
        if file.vectors.shape[1] != encoder.width:
            raise DataError(f"{path} has vectors of width {file.vectors.shape[1]}, the run gives {encoder.width}")
    else:
        path = train_embeddings(run, device, say) if embeddings is None else Path(embeddings)
        file = read_embeddings(path, width=encoder.width)
    if file.encoder not in (None, run.encoder_digest()):
        raise DataError(f"{path} has vectors of another encoder than {run.path}: embed its images again with this run")
    if k > len(file):
        say(f"-k {k}: {path} has only {len(file)} rows")
    searched: Any = file
    if query_image is None:
        towers = Towers(run, on)
        query, searched = towers.texts([text]), ProjectedRows(file, towers)
    else:
        query = directions(extract_features(encoder, query_image, run.transform(), device=on))
    pairs = nearest_rows(query, searched, k) if found_index is None else found_index.search(query.cpu(), k)
    cosines, rows = (found[0].tolist() for found in pairs)
    found = (Neighbor(row, str(file.names[row]), round(cosine, 6)) for row, cosine in zip(rows, cosines) if row >= 0)
    return Neighbors(tuple(found), Path(image), text)


class ProjectedRows:
    """The rows of an embeddings file as projections [N,D], which texts are compared with."""

    def __init__(self, file: Any, towers: Towers):
        self.file, self.towers = file, towers
        self.shape = (len(file), towers.student.head.width)

    def __len__(self) -> int:
        return len(self.file)

    def __getitem__(self, rows: slice) -> Tensor:
        return self.towers.project(torch.as_tensor(self.file[rows]).float())
