"""What a probe says, and the checks that keep nonsense out of it.

N train rows, T test rows, F width of the features, C classes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from kontrast.errors import DataError

RESAMPLES = 10_000


@dataclass(frozen=True)
class ProbeResult:
    """Accuracy on n test images, with its 95% interval [low, high]: over them by the bootstrap, or over seeds.

    correct: which of them were named right, booleans [n] on the CPU; empty for the mean of several seeds.
    """

    probe: str
    accuracy: float
    low: float
    high: float
    n: int
    protocol: dict[str, Any]
    seed: int = 0
    note: str = ""
    features: str = ""  # of what: the trained encoder, the untrained one, raw pixels
    over: str = "test images"  # what the interval is over
    extra: dict[str, Any] = field(default_factory=dict)
    correct: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool), repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """All of it but `correct`."""
        tree = asdict(self)
        del tree["correct"]
        return tree

    def to_json(self) -> str:
        return json.dumps(self.to_dict())


def result(probe: str, correct: Tensor, protocol: dict[str, Any], seed: int = 0, note: str = "", **extra: Any):
    """A ProbeResult from one boolean per test image."""
    n, hits = correct.numel(), int(correct.sum())
    low, high = interval(hits, n, seed)
    return ProbeResult(probe, hits / n, low, high, n, protocol, seed, note, extra=extra, correct=correct.cpu())


def interval(hits: int, n: int, seed: int = 0) -> tuple[float, float]:
    """The 95% percentile bootstrap interval of hits / n. Resampling n zeros and ones draws from a binomial."""
    draws = torch.binomial(
        torch.full((RESAMPLES,), float(n), dtype=torch.float64),
        torch.full((RESAMPLES,), hits / n, dtype=torch.float64),
        generator=torch.Generator().manual_seed(seed),
    )
    low, high = torch.quantile(draws / n, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def checked(
    train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, classes: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """The same tensors on one device, and the number of classes; an error that says what is wrong with them."""
    train, test = torch.as_tensor(train), torch.as_tensor(test)
    device = train.device
    train, train_labels = checked_part("train", train, train_labels)
    test, test_labels = checked_part("test", test.to(device), test_labels)
    if train.shape[1] != test.shape[1]:
        raise DataError(f"train features are {train.shape[1]} wide, test features {test.shape[1]}: use one encoder")
    kind = torch.promote_types(train.dtype, test.dtype)
    train, test = train.to(kind), test.to(kind)
    train_labels, test_labels = train_labels.to(device), test_labels.to(device)
    present = torch.unique(train_labels)
    if present.numel() < 2:
        raise DataError(f"all {len(train)} train images have the label {int(present[0])}: a probe needs two classes")
    missing = set(torch.unique(test_labels).tolist()) - set(present.tolist())
    if missing:
        raise DataError(f"test has classes that train lacks: {sorted(missing)[:5]}; leave them out or add train images")
    largest = int(present[-1]) + 1
    if classes is not None and classes < largest:
        raise DataError(f"classes = {classes}, but labels reach {largest - 1}")
    return train, train_labels, test, test_labels, classes or largest


def checked_part(part: str, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    features, labels = torch.as_tensor(features), torch.as_tensor(labels)
    if features.ndim != 2 or not features.is_floating_point():
        raise DataError(f"{part} features must be floating [N,F], not {features.dtype} {list(features.shape)}")
    if len(features) == 0:
        raise DataError(f"{part} has no images")
    if labels.shape != (len(features),):
        raise DataError(f"{len(features)} {part} images but labels of shape {list(labels.shape)}: give one per image")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise DataError(f"{part} labels must be whole numbers, not {labels.dtype}")
    if int(labels.min()) < 0:
        raise DataError(f"{part} labels go down to {int(labels.min())}: leave unlabelled images out")
    # A stretch of rows at a time: of a million rows at once the answers alone would take gigabytes.
    bad = torch.cat([~torch.isfinite(rows).all(dim=1) for rows in features.split(65_536)])
    if bad.any():
        row = int(bad.nonzero()[0, 0])
        raise DataError(f"{int(bad.sum())} of {len(features)} {part} features are not finite, first in row {row}")
    return features, labels.long()
