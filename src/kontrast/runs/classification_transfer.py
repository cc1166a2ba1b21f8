"""Transfer to many small classification sets: linear and fine-tuned, with all labels and with a few per class.

As in ELEVATER, learning rate and weight decay are chosen on a fifth of the training images for every set, encoder and
seed; unlike its code, the last epoch counts, not the best on the test images.
"""

from __future__ import annotations

import hashlib
import re
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
from kontrast.probes.fine_tuning import rows_of, split_train, tuned_scores
from kontrast.probes.logistic import standardize
from kontrast.registry import nearest
from kontrast.runs.probe import open_images
from kontrast.runs.transfer_encoders import TransferEncoder
from kontrast.runs.transfer_jobs import own_part
from kontrast.runs.transfer_results import TransferResult, find_result, fingerprints, save_result
from kontrast.training.progress import Progress

METHODS = ("linear", "fine-tuned")
LINEAR = FineTuning("linear", lr=0.1, epochs=50, batch=64)
ASKED = {
    "caltech": "mean-per-class", "aircraft": "mean-per-class", "flowers": "mean-per-class", "pets": "mean-per-class",
    "hateful": "roc-auc",
}  # fmt: skip
"""The metric that ELEVATER's sets ask for, by a word in their names.

All others ask for accuracy, and those whose images have several labels for map.
"""
NETWORK_SETTINGS: dict[str, Any] = {
    "layer_decay": 1.0, "mixup": 0.0, "cutmix": 0.0, "drop_path": 0.0, "erasing": 0.0,
}  # fmt: skip
"""Settings that change images or the encoder, which a linear classifier on features does without, as it leaves them."""


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
        (hot, classes), (held, _) = read_label_sets(train, csv, test.names), read_label_sets(test, csv, train.names)
        return SmallSet(source, train, test, hot, held, len(classes), metric_of(source, metric, hot, held))
    if test is None or train.labels is None or test.labels is None:
        raise DataError(f"{source} has no labels or no test images: give class sub-folders, or a CSV file of labels")
    count = int(max(train.labels.max(), test.labels.max())) + 1
    return SmallSet(
        source, train, test, train.labels, test.labels, count, metric_of(source, metric, train.labels, test.labels)
    )


def metric_of(source: str, metric: str, labels: Tensor, test_labels: Tensor) -> str:
    """Return the metric of a set: the given one if it suits the labels, or the one that the set asks for.

    Args:
        source: the folder, name or CSV file.
        metric: a name in `CLASSIFICATION_METRICS`, or "".
        labels: of the training images.
        test_labels: of the test images.
    """
    if metric and metric not in CLASSIFICATION_METRICS:
        raise UsageError(f"unknown metric {metric!r}: {nearest(metric, CLASSIFICATION_METRICS)}")
    several, two = labels.ndim == 2, len(test_labels.unique()) == len(torch.cat([labels, test_labels]).unique()) == 2
    if not metric:
        folder = Path(source).parent if source.endswith(".csv") else Path(source)
        words = set(re.findall("[a-z]+", folder.name.lower()))
        asked = next((found for word, found in ASKED.items() if word in words), "accuracy")
        return "map" if several else "accuracy" if asked == "roc-auc" and not two else asked
    if (metric == "map") != several:
        raise UsageError(f"metric {metric!r} does not suit {source}: map is for images of several labels, and only map")
    if metric == "roc-auc" and not two:
        raise UsageError(f"metric 'roc-auc' does not suit {source}: it is for two classes that both have test images")
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

    def protocol(self, method: str) -> FineTuning:
        """Return the settings of a method."""
        base = vars(LINEAR if method == "linear" else FINE_TUNING["sgd"])
        tree = dict(base)
        for layer in override_layers(self.overrides):
            tree |= nested(layer)
        found = read_settings(FineTuning, tree, "classification")
        return replace(found, **NETWORK_SETTINGS) if method == "linear" else found

    def check_settings(self, methods: Sequence[str], encoders: Sequence[TransferEncoder]) -> None:
        """Raise if a setting has no effect on any method or encoder."""
        tuned = self.protocol("fine-tuned")
        if tuned.randaugment or tuned.repeats > 1:
            raise UsageError("randaugment and repeats are for random crops, which a transfer does not make: leave out")
        changed = [name for name, usual in NETWORK_SETTINGS.items() if getattr(tuned, name) != usual]
        if changed and "fine-tuned" not in methods:
            names = " and ".join(changed)
            raise UsageError(f"{names}: no effect on linear classifiers, leave out or add the method 'fine-tuned'")
        networks = (encoder.build(0) for encoder in encoders)
        if tuned.drop_path and not any(tuned.suited_to(network).drop_path for network in networks):
            raise UsageError("drop_path is for kontrast's vision transformers, and no encoder is one: leave it out")

    def check_set(self, small: SmallSet, methods: Sequence[str], shots: Sequence[int]) -> None:
        """Raise if a set can't be measured in one of the ways, which does not depend on the seed."""
        settings = [self.protocol(method) for method in methods]
        mixed = [name for name in ("mixup", "cutmix", "smoothing") if any(getattr(one, name) for one in settings)]
        if mixed and small.labels.ndim == 2:
            names = " and ".join(mixed)
            raise UsageError(f"{names}: not for images of several labels, as those of {small.name}; leave out")
        for number in shots:
            rows = rows_with_labels(small.labels, number, 0, small.train.classes)
            if self.search:
                split_train(small.labels[rows], 0)

    def run(self, small: SmallSet, encoder: TransferEncoder, method: str, shots: int, seed: int) -> TransferResult:
        """Train and measure one classifier, or return what an earlier call found."""
        rows, settings = rows_with_labels(small.labels, shots, seed), self.protocol(method)
        decisive: dict[str, Any] = {"protocol": vars(settings), "search": self.search, "metric": small.metric}
        settings = replace(settings, batch=min(settings.batch, len(rows)))
        decisive |= {"images": [small.train.fingerprint, small.test.fingerprint], "encoder": encoder.digest}
        decisive |= {"network": str(encoder.run.recipe.encoder), "method": method, "shots": shots}
        labels = small.labels.numpy().tobytes() + small.test_labels.numpy().tobytes()
        decisive["labels"] = hashlib.sha256(labels).hexdigest()
        digest, common = fingerprints(decisive, seed, protocol=vars(settings))
        known = find_result(self.folder, digest, common)
        if known is not None:
            return known
        start, measure = time.monotonic(), CLASSIFICATION_METRICS[small.metric]
        scores, described = self._scores(small, encoder, method, rows, settings, seed)
        value = measure(scores, small.test_labels)
        facts = {"train_images": len(rows), "test_images": len(small.test), "classes": small.classes,
                 "settings": described, "seconds": round(time.monotonic() - start, 1)}  # fmt: skip
        amount = f"{shots} per class" if shots else "all"
        result = TransferResult("classify", small.name, encoder.name, method, amount, seed, small.metric, value,
                                {small.metric: value}, facts, digest, common)  # fmt: skip
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


def rows_with_labels(labels: Tensor, shots: int, seed: int, classes: Sequence[str] | None = None) -> Tensor:
    """Return the rows of all images, or of `shots` images per class; of several labels, every class has as many."""
    if not shots:
        return torch.arange(len(labels))
    if labels.ndim == 1:
        return few_per_class(labels, shots, seed, classes)
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
    job.check_settings(methods, encoders)
    sets = [open_small_set(encoders[0].run, source, metric, say) for source in sources]
    for small in sets:
        job.check_set(small, methods, shots)
    found = []
    for small in sets:
        cases = [
            (one, method, n, seed) for seed in range(seeds) for n in shots for method in methods for one in encoders
        ]
        found += [job.run(small, *case) for case in own_part(cases)]
    return found
