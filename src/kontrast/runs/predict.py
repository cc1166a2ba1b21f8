"""Classify many images with a saved classifier, part by part, so that a kill loses at most one part.

N images, C classes.  While the work goes on, OUT.parts beside the output holds the probabilities [n,C] of finished
parts, as for `embed`.
"""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kontrast.data import ImageSet
from kontrast.errors import DataError, UsageError, printable
from kontrast.files import atomic_path
from kontrast.registry import nearest
from kontrast.runs.classifier import Classifier
from kontrast.runs.embed import compute_parts, dependencies, refuse_existing, resume_command, write_in_parts
from kontrast.runs.embeddings_file import Part
from kontrast.runs.image_stream import open_stream
from kontrast.runs.run import open_run
from kontrast.training.device import choose_device

FORMATS = (".csv", ".json", ".jsonl")


@dataclass(frozen=True)
class PredictResult:
    """The file that `predict` wrote.

    Attributes:
        path: The file.
        images: How many images were classified.
        counts: How many images got each label.
        skipped: (name, reason) of the images that could not be read.
    """

    path: Path
    images: int
    counts: dict[str, int]
    skipped: list[tuple[str, str]]

    def __str__(self) -> str:
        longest = max(map(len, self.counts), default=0)
        lines = [f"{printable(label):<{longest}}  {count:>9,}" for label, count in self.counts.items()]
        return "\n".join([*lines, f"{self.images:,} images\nout     {printable(str(self.path))}"])

    def to_dict(self) -> dict[str, Any]:
        facts = {"images": self.images, "counts": self.counts, "skipped": len(self.skipped)}
        return {"out": str(self.path), **facts}


def predict(
    model: str | os.PathLike[str],
    images: Any,
    out: str | os.PathLike[str] = "predictions.csv",
    *,
    probabilities: bool = False,
    split: str = "all",
    device: str = "auto",
    max_bad: float | None = None,
    float_range: tuple[float, float] | None = None,
    say: Callable[[str], None] = print,
) -> PredictResult:
    """Write the label of every image, with its probability, to a file. Call it again to continue after a kill.

    Args:
        model: The folder of a classifier that `kontrast finetune` wrote, or a `Classifier`.
        images: An image file, a folder, a named set, shards or a store; or uint8 pixels [N,C,H,W].
        out: The file to write, by its suffix: .csv (columns file,label,probability), .jsonl (an object per line) or
            .json (a list of them). It must not exist yet. Default: predictions.csv.
        probabilities: Also write the probability of every label.
        split: "all" (default), "train" or "test".
        device: "auto" (default), "cpu" or "cuda".
        max_bad: The share of unreadable images that is allowed; default: the recipe's.
        float_range: The values of black and white in float images; default: the recipe's.
        say: Called with each line of progress and each warning; default: print.

    Returns:
        The path, how many images got each label, and the images that were skipped.

    Example:
        >>> import kontrast
        >>> model = kontrast.finetune("runs/digits", linear=True, out="model", device="cpu", say=lambda line: None)
        >>> kontrast.predict("model", "photos", "labels.csv", device="cpu").images
        240
    """
    classifier, out = Classifier(model), Path(out)
    if float_range is not None:
        classifier.recipe = open_run(classifier, float_range).recipe
    if out.suffix not in FORMATS:
        raise UsageError(f"--out {out}: give a file that ends in .csv, .json or .jsonl")
    if split != "all" and not isinstance(images, str | os.PathLike):
        raise UsageError(f"split = {split!r}: pixels have no splits; {nearest(split, ['all'])}")
    refuse_existing(out)
    on = choose_device(device)
    network = classifier.network(on)
    stream = open_stream(classifier, image_source(classifier, images), split, say, max_bad)
    labels = classifier.labels
    facts = dependencies(classifier, network, stream, on)
    facts |= {"classifier": classifier.classifier_digest(), "labels": labels}
    command = resume_command(classifier, stream, out, split, max_bad, device, verb="predict")
    command += " --probabilities" * probabilities
    compute = partial(compute_parts, classifier, network, stream, on)
    counts: Counter[str] = Counter()

    def write(path: Path, parts: Sequence[Part], facts: dict[str, Any]) -> None:
        write_predictions(path, parts, labels, counts, probabilities)

    done, bad = write_in_parts(classifier, stream, out, write, facts, command, max_bad, compute, say)
    return PredictResult(out, done, dict(counts.most_common()), bad)


def image_source(classifier: Classifier, images: Any) -> str | ImageSet:
    """Return what `open_stream` takes: a place, or an image set of one file or of pixels."""
    if isinstance(images, ImageSet):
        return images
    if isinstance(images, str | os.PathLike):
        return classifier.read_image(images) if os.path.isfile(images) and is_image(images) else os.fspath(images)
    wanted = classifier.limits.made.dtype
    if not hasattr(images, "ndim") or images.ndim != 4 or str(images.dtype).rpartition(".")[2] != wanted:
        kind = f"{images.dtype} {list(images.shape)}" if hasattr(images, "ndim") else type(images).__name__
        allowed = f"give an image file, a folder, a data set, or {wanted} pixels [N,C,H,W]"
        raise DataError(f"can't classify {kind}: {allowed}")
    return ImageSet(torch.as_tensor(images), [str(number) for number in range(len(images))], name="pixels")


def is_image(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a single image by its name; a video is not."""
    from kontrast.data.file_kinds import FILE_KINDS

    single = [suffix for kind, suffixes in FILE_KINDS.items() if kind != "video" for suffix in suffixes]
    return os.fspath(path).lower().endswith(tuple(single))


def write_predictions(
    out: Path, parts: Sequence[Part], labels: list[str], counts: Counter[str], probabilities: bool
) -> None:
    """Write the rows of all parts in the format of the file's suffix, and count the labels."""
    counts.update(dict.fromkeys(labels, 0))
    with atomic_path(out) as place, place.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        rows = iter_rows(parts, labels, counts, probabilities)
        if out.suffix == ".csv":
            more = [f"probability:{label}" for label in labels] if probabilities else []
            writer = csv.writer(file)
            writer.writerow(["file", "label", "probability", *more])
            for row in rows:
                every = row.pop("probabilities", {})
                writer.writerow([*row.values(), *every.values()])
            return
        begin, between, end = ("[\n", ",\n", "\n]\n") if out.suffix == ".json" else ("", "\n", "\n")
        file.write(begin)
        for number, row in enumerate(rows):
            file.write((between if number else "") + json.dumps(row))
        file.write(end)


def iter_rows(
    parts: Sequence[Part], labels: list[str], counts: Counter[str], probabilities: bool
) -> Iterator[dict[str, Any]]:
    """Yield file, label and probability of each image in order."""
    for part in parts:
        vectors = np.load(part.vectors, allow_pickle=False)
        for name, row, best in zip(part.names, vectors, vectors.argmax(1)):
            counts[labels[best]] += 1
            every = {label: round(float(p), 6) for label, p in zip(labels, row)}
            more = {"probabilities": every} if probabilities else {}
            yield {"file": name, "label": labels[best], "probability": every[labels[best]], **more}
