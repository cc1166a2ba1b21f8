"""The result of a probe, and the checks of a probe's input.

N train rows, T test rows, F width of the features, C classes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kontrast.errors import DataError
from kontrast.notebook import Printed

RESAMPLES = 10_000
BEST = 5
"""Top-5 accuracy is that of the five classes with the highest scores."""


@dataclass(frozen=True)
class ProbeResult(Printed):
    """Test accuracy of one probe with its 95% interval.

    Args:
        probe: name of the probe.
        accuracy: share of test images that were classified correctly, 0 to 1.
        low: lower end of the interval.
        high: upper end of the interval.
        n: number of test images.
        protocol: the probe's settings.
        seed: seed of the probe.
        note: what the reader should know, such as a k that was lowered.
        features: what was probed: "trained", "untrained", "pixels" or "starting weights".
        over: what the interval is over: "test images" (bootstrap) or "seeds" (Student's t).
        top5: share of test images whose class is among the five with the highest scores; None for up to five classes.
        mean_per_class: mean over classes of the accuracy on the test images of each class.
        per_class: for each class with test images its `label`, their number `n` and the `accuracy` on them.
        extra: further numbers, such as the accuracy per epoch.
        correct: whether each test image was classified correctly, booleans [n]; empty for a mean over seeds.

    Example:
        >>> print(ProbeResult("knn", 0.9, 0.85, 0.94, 200, {"k": 20}))
        knn: 90.00% [85.00, 94.00] over 200 test images
    """

    probe: str
    accuracy: float
    low: float
    high: float
    n: int
    protocol: dict[str, Any]
    seed: int = 0
    note: str = ""
    features: str = ""
    over: str = "test images"
    top5: float | None = None
    mean_per_class: float | None = None
    per_class: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    correct: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool), repr=False, compare=False)

    def __str__(self) -> str:
        over = f"{self.n} test images" if self.over == "test images" else self.over
        interval = f"[{100 * self.low:.2f}, {100 * self.high:.2f}]"
        return f"{self.probe}: {100 * self.accuracy:.2f}% {interval} over {over}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything except `correct` as plain values."""
        tree = asdict(self)
        del tree["correct"]
        return tree


class Predictions(NamedTuple):
    """Whether each test image was classified correctly [T], whether its class is among the best five [T] (None for up
    to five classes), and its label [T]."""

    correct: Tensor
    among_five: Tensor | None = None
    labels: Tensor | None = None


def predictions(scores: Tensor, labels: Tensor) -> Predictions:
    """Compare scores [T,C] with labels [T]. A class whose score is not finite was not predicted at all."""
    own = scores.gather(1, labels[:, None])
    correct = scores.argmax(1) == labels
    if scores.shape[1] <= BEST:
        return Predictions(correct, None, labels)
    earlier = torch.arange(scores.shape[1], device=scores.device) < labels[:, None]
    rank = ((scores > own) | ((scores == own) & earlier)).sum(1)  # of equal scores, the first class wins
    return Predictions(correct, (rank < BEST) & own[:, 0].isfinite() | correct, labels)


def join_predictions(parts: list[Predictions]) -> Predictions:
    """Join the predictions of several chunks of test images."""
    columns: Any = (None if column[0] is None else torch.cat(column) for column in zip(*parts))
    return Predictions(*columns)


def result(
    probe: str, found: Predictions, protocol: dict[str, Any], seed: int = 0, note: str = "", **extra: Any
) -> ProbeResult:
    """Build a ProbeResult from the predictions of a probe."""
    correct = found.correct
    n, hits = correct.numel(), int(correct.sum())
    low, high = interval(hits, n, seed)
    five = None if found.among_five is None else float(found.among_five.double().mean())
    classes = [] if found.labels is None else accuracy_per_class(correct, found.labels)
    mean = sum(row["accuracy"] for row in classes) / len(classes) if classes else None
    return ProbeResult(
        probe, hits / n, low, high, n, protocol, seed, note,
        top5=five, mean_per_class=mean, per_class=classes, extra=extra, correct=correct.cpu(),
    )  # fmt: skip


def accuracy_per_class(correct: Tensor, labels: Tensor) -> list[dict[str, Any]]:
    """Return the label, the number of test images and the accuracy of each class that has test images."""
    counts = torch.bincount(labels)
    hits = torch.bincount(labels, correct.double(), minlength=len(counts))
    present = counts.nonzero()[:, 0].tolist()
    return [{"label": c, "n": int(counts[c]), "accuracy": float(hits[c] / counts[c])} for c in present]


def interval(hits: int, n: int, seed: int = 0) -> tuple[float, float]:
    """Return the 95% percentile bootstrap interval of hits / n. Resampling n zeros and ones draws from a binomial."""
    draws = torch.binomial(
        torch.full((RESAMPLES,), float(n), dtype=torch.float64),
        torch.full((RESAMPLES,), hits / n, dtype=torch.float64),
        generator=torch.Generator().manual_seed(seed),
    )
    low, high = torch.quantile(draws / n, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def check_features(
    train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Check the input of a probe; return it as tensors of one dtype on one device, with the number of classes."""
    train, train_labels = check_split("train", train, train_labels)
    test, test_labels = check_split("test", test, test_labels)
    if train.shape[1] != test.shape[1]:
        raise DataError(f"train features are {train.shape[1]} wide, test features {test.shape[1]}: use one encoder")
    to: Any = {"device": train.device, "dtype": torch.promote_types(train.dtype, test.dtype)}
    train_labels, test_labels = train_labels.to(train.device), test_labels.to(train.device)
    return train.to(**to), train_labels, test.to(**to), test_labels, count_classes(train_labels, test_labels)


def check_split(split: str, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return finite floating-point features [N,F] and int64 labels [N], or raise a DataError that names the split."""
    features = torch.as_tensor(features)
    if features.ndim != 2 or not features.is_floating_point():
        raise DataError(f"{split} features must be floating-point [N,F], not {features.dtype} {list(features.shape)}")
    labels = check_labels(split, len(features), labels)
    # In chunks: for a million rows at once, the booleans alone would take gigabytes.
    bad = torch.cat([~torch.isfinite(rows).all(dim=1) for rows in features.split(65_536)])
    if bad.any():
        row = int(bad.nonzero()[0, 0])
        raise DataError(f"{int(bad.sum())} of {len(features)} {split} features are not finite, first in row {row}")
    return features, labels


def check_labels(split: str, images: int, labels: Tensor) -> Tensor:
    """Return int64 labels [N], or raise a DataError if there isn't one whole number from 0 per image."""
    labels = torch.as_tensor(labels)
    whole = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    if images == 0:
        raise DataError(f"{split} has no images")
    if labels.shape != (images,) or not whole:
        given = f"{labels.dtype} {list(labels.shape)}"
        raise DataError(f"{images} {split} images need one whole number each as labels, got {given}")
    if int(labels.min()) < 0:
        raise DataError(f"{split} has the label {int(labels.min())}: leave unlabeled images out")
    return labels.long()


def count_classes(train_labels: Tensor, test_labels: Tensor) -> int:
    """Return the largest train label plus one; train needs two classes, and all classes of test."""
    present = torch.unique(train_labels).tolist()
    if len(present) < 2:
        raise DataError(f"all {len(train_labels)} train images have the label {present[0]}: a probe needs two classes")
    if missing := sorted(set(torch.unique(test_labels).tolist()) - set(present)):
        raise DataError(f"test has classes that train lacks: {missing[:5]}; leave them out or add train images")
    return present[-1] + 1
