"""Choose the images that are worth labeling first: diverse ones, and uncertain ones once there is a classifier.

N images, F width, C classes.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kontrast.data.labels import labels_of, unknown_names
from kontrast.errors import DataError, UsageError, printable
from kontrast.files import atomic_path
from kontrast.lens.measures import directions
from kontrast.probes.selection import select_diverse
from kontrast.runs.classifier import Classifier, entropy, is_classifier
from kontrast.runs.embed import train_embeddings
from kontrast.runs.embeddings_file import Embeddings, read_embeddings
from kontrast.runs.result_sequence import ResultSequence
from kontrast.runs.run import Run, open_run

CANDIDATES = 50_000
"""At most so many images are compared: more would take long and hardly change the choice."""
UNCERTAIN_PER_CHOICE = 10
"""With a classifier, the most uncertain images are compared, so many times as many as are chosen."""
LABELED = 5_000
"""At most so many labeled images keep others away."""


@dataclass(frozen=True)
class SelectedImage:
    """An image to label; `uncertainty` is from 0 to 1, None without a classifier."""

    file: str
    uncertainty: float | None


@dataclass(frozen=True, repr=False)
class SelectResult(ResultSequence[SelectedImage]):
    """The images to label, the most useful first; `path` is the file to fill in."""

    path: Path
    candidates: int
    labeled: int

    def __str__(self) -> str:
        return (
            f"{len(self):,} of {self.candidates:,} images without a label, {self.labeled:,} have one\n"
            f"out     {printable(str(self.path))} (fill in the column label, then: kontrast finetune RUN --labels FILE)"
        )

    def to_dict(self) -> dict[str, Any]:
        facts = {"candidates": self.candidates, "labeled": self.labeled}
        return {"out": str(self.path), **facts, "images": [asdict(item) for item in self.items]}


def select(
    target: str | os.PathLike[str],
    count: int = 200,
    *,
    labels: str | os.PathLike[str] | None = None,
    model: str | os.PathLike[str] | None = None,
    method: str = "k-means",
    out: str | os.PathLike[str] = "to-label.csv",
    seed: int = 0,
    device: str = "auto",
    say: Callable[[str], None] = print,
) -> SelectResult:
    """Choose the images that are worth labeling first, and write a CSV file whose label column is to be filled in.

    They are diverse: they differ from each other and from images that have a label. With a classifier they are also
    uncertain. Labels of the data itself are not used.

    Args:
        target: A run, or a classifier that `kontrast finetune` wrote, for its train images; or an embeddings file.
        count: How many images to choose; default: 200.
        labels: A CSV file with the columns file,label, of images that have a label already.
        model: The classifier whose uncertainty counts, if `target` is an embeddings file of its encoder. Default: the
            target, if it is a classifier; the images that it was trained on count as labeled.
        method: "k-means" (default): typical images; "k-center": unusual ones.
        out: The CSV file to write, with the columns file,label,uncertainty. It must not exist yet.
        seed: Seed of the choice.
        device: "auto" (default), "cpu" or "cuda", for computing the features.
        say: Called with each line of progress and each warning; default: print.

    Returns:
        A sequence with `file` and `uncertainty` of each image, the most useful first.

    Example:
        >>> import kontrast
        >>> chosen = kontrast.select("runs/digits", 12, device="cpu", say=lambda line: None)
        >>> print(chosen)
        12 of 192 images without a label, 0 have one
        out     to-label.csv (fill in the column label, then: kontrast finetune RUN --labels FILE)
    """
    path, out = Path(target), Path(out)
    if out.exists():
        raise UsageError(f"--out {out} already exists, perhaps with labels: give another file")
    if out.suffix != ".csv":
        raise UsageError(f"--out {out}: give a file that ends in .csv")
    if count < 1:
        raise UsageError(f"--count {count}: give at least 1")
    if model is None and path.is_dir() and is_classifier(path):
        model = path
    classifier = None if model is None else Classifier(model)
    file = open_vectors(path, target, classifier, device, say)
    names = [str(name) for name in file.names]
    labeled = set() if classifier is None else set(labels_of(classifier.path / "labels.csv"))
    if labels is not None:
        known = set(names)
        labeled |= set(labels_of(labels, known=known, some=True))
        if line := unknown_names(labels, known, "none of the images to choose from"):
            say(line)
    has_label = torch.tensor([name in labeled for name in names])
    free = (~has_label).nonzero()[:, 0]
    if count > len(free):
        raise UsageError(f"--count {count}: {path} has {len(free):,} images without a label; choose at most so many")
    chosen, unsure = choose(file, free, has_label.nonzero()[:, 0], count, classifier, method, seed)
    items = [SelectedImage(names[i], None if u is None else round(u, 4)) for i, u in zip(chosen.tolist(), unsure)]
    write_selection(out, items)
    return SelectResult(tuple(items), out, len(free), int(has_label.sum()))


def open_vectors(
    path: Path, target: Any, classifier: Classifier | None, device: str, say: Callable[[str], None]
) -> Embeddings:
    """Open the embeddings of the target, which are computed first if it is a run."""
    run: Run | None = open_run(target) if path.is_dir() else None
    file = read_embeddings(path if run is None else train_embeddings(run, device, say))
    if classifier is not None and file.encoder not in (None, classifier.encoder_digest()):
        raise DataError(f"{path} was embedded by another encoder than that of {classifier.path}: embed with that one")
    return file


def choose(
    file: Embeddings,
    free: Tensor,
    labeled: Tensor,
    count: int,
    classifier: Classifier | None,
    method: str,
    seed: int,
) -> tuple[Tensor, Sequence[float | None]]:
    """Return the positions of the chosen rows, and how uncertain each is."""
    generator = np.random.default_rng(seed)
    free, labeled = (thin(rows, most, generator) for rows, most in ((free, max(CANDIDATES, count)), (labeled, LABELED)))
    weights, vectors = None, file.rows(free.numpy())
    if classifier is not None:
        with torch.inference_mode():
            weights = entropy(classifier.layer()(vectors).softmax(1))
        best = weights.argsort(descending=True, stable=True)[: UNCERTAIN_PER_CHOICE * count].sort().values
        free, vectors, weights = free[best], vectors[best], weights[best]
    near = directions(file.rows(labeled.numpy()))
    found = select_diverse(directions(vectors), count, method=method, weights=weights, chosen=near, seed=seed)
    return free[found], [None] * count if weights is None else weights[found].tolist()


def thin(rows: Tensor, most: int, generator: np.random.Generator) -> Tensor:
    """Return at most so many of the rows, drawn without replacement, in their order."""
    if len(rows) <= most:
        return rows
    return rows[torch.from_numpy(np.sort(generator.choice(len(rows), most, replace=False)))]


def write_selection(out: Path, items: Sequence[SelectedImage]) -> None:
    """Write the file whose second column is to be filled in."""
    rows = [(item.file, "", "" if item.uncertainty is None else item.uncertainty) for item in items]
    with atomic_path(out) as place, place.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        csv.writer(file).writerows([("file", "label", "uncertainty"), *rows])
