"""Transfer to many small classification sets: linear and fine-tuned, with all labels and with a few per class.

As in ELEVATER, learning rate and weight decay are chosen on a fifth of the training images for every set, encoder and
seed; unlike its code, the last epoch counts, not the best on the test images.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kontrast.config.overrides import Overrides, nested, override_layers
from kontrast.config.recipe import read_settings
from kontrast.data import ImageSet
from kontrast.data.labels import has_label_sets, read_label_sets
from kontrast.errors import DataError, UsageError
from kontrast.probes import FINE_TUNING, FineTuning, extract_features, few_per_class
from kontrast.probes.classification_metrics import CLASSIFICATION_METRICS
from kontrast.probes.fine_tuning import rows_of, tuned_scores
from kontrast.probes.logistic import standardize
from kontrast.registry import nearest
from kontrast.runs.probe import open_images
from kontrast.runs.transfer_encoders import TransferEncoder
from kontrast.runs.transfer_jobs import own_part
from kontrast.runs.transfer_results import TransferResult, read_results, save_result
from kontrast.training.progress import Progress

METHODS = ("linear", "fine-tuned")
LINEAR = FineTuning("linear", lr=0.1, epochs=50, batch=64)
ASKED = {
    "caltech": "mean-per-class", "aircraft": "mean-per-class", "flowers": "mean-per-class", "pets": "mean-per-class",
    "voc2007": "map", "hateful": "roc-auc",
}  # fmt: skip
"""The metric that ELEVATER's sets ask for, by a part of their names; all others ask for accuracy."""


@dataclass(frozen=True)
class SmallSet:
    """A classification set.

    Args:
        name: the source as the user wrote it.
        train: training images.
        test: test images.
        labels: integers [N] or 0 and 1 [N,C] of the training images.
        test_labels: the same of the test images.
        classes: the number of classes.
        metric: the name of its score.
    """

    name: str
    train: ImageSet
    test: ImageSet
    labels: Tensor
    test_labels: Tensor
    classes: int
    metric: str


class FixedFeatures(nn.Identity):
    """Takes the place of an encoder whose features were computed before."""

    def __init__(self, width: int):
        super().__init__()
        self.width = width
        self.register_buffer("place", torch.zeros(0))  # says on which device the classifier is trained


def open_small_set(run: Any, source: str, metric: str, say: Callable[[str], None]) -> SmallSet:
    """Open a folder with class sub-folders, a named set, or a CSV file `name,label` beside its images.

    Args:
        run: the run whose settings say how images are decoded.
        source: the folder, name or CSV file.
        metric: a name in `CLASSIFICATION_METRICS`; "" for the one that the set asks for.
        say: receives warnings.
    """
    csv = Path(source) if source.endswith(".csv") else None
    if csv is not None and not csv.is_file():
        raise DataError(f"no file {source!r}: give a CSV file with rows name,label, beside its images")
    several = csv is not None and has_label_sets(csv)
    data, labels = (source, None) if csv is None else (str(csv.parent), None if several else source)
    train, test = open_images(run, data, labels, None, say)
    if several:
        both = train if test is None else None
        if both is not None:
            test, train = both.subset(range(0, len(both), 5)), both.subset([i for i in range(len(both)) if i % 5])
        assert csv is not None and test is not None
        (hot, classes), (held, _) = read_label_sets(train, csv), read_label_sets(test, csv)
        return SmallSet(source, train, test, hot, held, len(classes), _metric(source, metric, "map"))
    if test is None or train.labels is None or test.labels is None:
        raise DataError(f"{source} has no labels or no test images: give class sub-folders, or a CSV file of labels")
    count = int(max(train.labels.max(), test.labels.max())) + 1
    return SmallSet(source, train, test, train.labels, test.labels, count, _metric(source, metric, "accuracy"))


def _metric(source: str, metric: str, usual: str) -> str:
    if not metric:
        name = source.lower().replace("-", "").replace("_", "")
        return usual if usual == "map" else next((found for part, found in ASKED.items() if part in name), usual)
    if metric not in CLASSIFICATION_METRICS:
        raise UsageError(f"unknown metric {metric!r}: {nearest(metric, CLASSIFICATION_METRICS)}")
    if (metric == "map") != (usual == "map"):
        raise UsageError(f"metric {metric!r} does not suit {source}: map is for images of several labels, and only map")
    return metric


@dataclass(frozen=True)
class ClassificationTransfer:
    """A comparison of encoders on small sets.

    Args:
        folder: the run folder that results are written to.
        overrides: settings of `FineTuning` to replace.
        search: choose learning rate and weight decay on a fifth of the training images.
        device: where to train.
    """

    folder: Path
    overrides: Overrides
    search: bool
    device: torch.device

    def protocol(self, method: str, count: int) -> FineTuning:
        """Return the settings of a method for `count` training images."""
        base = vars(LINEAR if method == "linear" else FINE_TUNING["sgd"])
        tree = dict(base)
        for layer in override_layers(self.overrides):
            tree |= nested(layer)
        found = read_settings(FineTuning, tree, "classification")
        return replace(found, batch=min(found.batch, count))

    def run(self, small: SmallSet, encoder: TransferEncoder, method: str, shots: int, seed: int) -> TransferResult:
        """Train and measure one classifier, or return what an earlier call found."""
        rows = rows_with_labels(small.labels, shots, seed)
        settings = self.protocol(method, len(rows))
        decisive: dict[str, Any] = {"protocol": vars(settings), "search": self.search, "metric": small.metric}
        decisive |= {"images": [small.train.fingerprint, small.test.fingerprint], "encoder": encoder.digest}
        decisive |= {"network": str(encoder.run.recipe.encoder), "method": method, "shots": shots, "seed": seed}
        labels = hashlib.sha256(small.labels.numpy().tobytes() + small.test_labels.numpy().tobytes()).hexdigest()
        digest = hashlib.sha256(json.dumps({**decisive, "labels": labels}, sort_keys=True).encode()).hexdigest()
        known = next((one for one in read_results(self.folder) if one.fingerprint == digest), None)
        if known is not None:
            return known
        start, measure = time.monotonic(), CLASSIFICATION_METRICS[small.metric]
        scores, described = self._scores(small, encoder, method, rows, settings, seed)
        value = measure(scores, small.test_labels)
        facts = {"train_images": len(rows), "test_images": len(small.test), "classes": small.classes,
                 "settings": described, "seconds": round(time.monotonic() - start, 1)}  # fmt: skip
        amount = f"{shots} per class" if shots else "all"
        result = TransferResult("classify", small.name, encoder.name, method, amount, seed, small.metric, value,
                                {small.metric: value}, facts, digest)  # fmt: skip
        save_result(self.folder, result)
        return result

    def _scores(
        self, small: SmallSet, encoder: TransferEncoder, method: str, rows: Tensor, settings: FineTuning, seed: int
    ) -> tuple[Tensor, dict[str, Any]]:
        network, transform = encoder.build(seed).to(self.device), encoder.run.transform()
        train, labels = rows_of(small.train, rows), small.labels[rows]
        options: dict[str, Any] = {"search": self.search, "seed": seed, "measure": CLASSIFICATION_METRICS[small.metric]}
        title = f"{Path(small.name).name}, {method}, {Path(encoder.name).name}, seed {seed}"
        trainings = 1 + self.search * 9 * 0.8  # nine settings on four fifths of the images, then one on all
        with torch.random.fork_rng(), Progress(title, settings.epochs * len(rows) * trainings) as bar:
            torch.manual_seed(seed)
            options["advance"] = bar.advance
            if method == "linear":
                parts = [extract_features(network, part, transform, device=self.device) for part in (train, small.test)]
                fixed = FixedFeatures(network.width).to(self.device)
                x, test = standardize(*parts)  # so that one learning rate suits all encoders
                return tuned_scores(fixed, x, labels, test, small.classes, settings, transform=_unchanged, **options)
            return tuned_scores(
                network, train, labels, small.test, small.classes, settings, transform=transform, **options
            )


def _unchanged(x: Tensor) -> Tensor:
    return x


def rows_with_labels(labels: Tensor, shots: int, seed: int) -> Tensor:
    """Return the rows of all images, or of `shots` images per class; of several labels, every class has as many."""
    if not shots:
        return torch.arange(len(labels))
    if labels.ndim == 1:
        return few_per_class(labels, shots, seed)
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for column in labels.T:
        found = (column > 0).nonzero()[:, 0]
        chosen.append(found[torch.randperm(len(found), generator=generator)[:shots]])
    return torch.cat(chosen).unique()


def transfer_to_classification(
    folder: Path,
    encoders: Sequence[TransferEncoder],
    sources: Sequence[str],
    *,
    metric: str,
    shots: Sequence[int],
    methods: Sequence[str],
    search: bool,
    overrides: Overrides,
    seeds: int,
    device: torch.device,
    say: Callable[[str], None],
) -> list[TransferResult]:
    """Train classifiers on every set with every encoder; see `kontrast.transfer`."""
    wrong = [one for one in methods if one not in METHODS]
    if wrong or not methods or min(shots, default=-1) < 0:
        given = f"methods {list(methods)}, shots {list(shots)}"
        raise UsageError(f"{given}: give some of {', '.join(METHODS)}, and images per class, 0 for all")
    job = ClassificationTransfer(folder, overrides, search, device)
    found = []
    for source in sources:
        small = open_small_set(encoders[0].run, source, metric, say)
        cases = [
            (one, method, n, seed) for seed in range(seeds) for n in shots for method in methods for one in encoders
        ]
        found += [job.run(small, *case) for case in own_part(cases)]
    return found
