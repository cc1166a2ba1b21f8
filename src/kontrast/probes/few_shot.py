"""Few-shot probes and fine-tuning. N train images, T test images, C classes, n images a class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kontrast.errors import DataError, UsageError
from kontrast.probes.intervals import over_seeds, within_one
from kontrast.probes.logistic import logistic
from kontrast.probes.result import ProbeResult


def few_per_class(labels: Tensor, shots: int, seed: int, classes: Sequence[str] | None = None) -> Tensor:
    """Indices of `shots` images of every class, drawn without replacement. classes: their names, for an error."""
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for label in torch.unique(labels).tolist():
        rows = (labels.cpu() == label).nonzero()[:, 0]
        if len(rows) < shots:
            name = repr(classes[label]) if classes else label
            raise DataError(
                f"class {name} has {len(rows)} train images, fewer than the {shots} of each class that a few-shot "
                "probe takes: add some, or leave the class out"
            )
        chosen.append(rows[torch.randperm(len(rows), generator=generator)[:shots]])
    return torch.cat(chosen)


def few_shot(
    train: Any,
    train_labels: Tensor,
    test: Any,
    test_labels: Tensor,
    *,
    shots: int = 5,
    seeds: Sequence[int] = (0, 1, 2),
    probe: Callable[..., ProbeResult] = logistic,
    classes: Sequence[str] | None = None,
) -> ProbeResult:
    """The mean over seeds of a probe trained on `shots` images a class, with Student's interval over the seeds.

    probe(train, labels, test, labels, seed=...): `logistic` on features unless told; for fine-tuning pass
    `functools.partial(fine_tune, encoder)` and images. classes: names of the labels, for an error.
    """
    if shots < 1 or not seeds:
        raise UsageError(f"shots = {shots}, seeds = {list(seeds)}: give one shot and one seed at least")
    runs, train_labels = [], torch.as_tensor(train_labels)
    for seed in seeds:
        rows = few_per_class(train_labels, shots, seed, classes)
        runs.append(probe(train[rows], train_labels[rows], test, test_labels, seed=seed))
    values = [r.accuracy for r in runs]
    protocol = {"shots": shots, "seeds": list(seeds), "probe": runs[0].probe, **runs[0].protocol}
    found, extra = within_one(over_seeds(values)), {"accuracies": values}
    if found is None:
        return replace(
            runs[0], probe="few-shot", protocol=protocol, note="one seed: no interval over seeds", extra=extra
        )
    mean = sum(values) / len(values)
    return ProbeResult("few-shot", mean, *found, runs[0].n, protocol, seeds[0], over="seeds", extra=extra)


def check_labels(train: Any, train_labels: Tensor, test: Any, test_labels: Tensor) -> int:
    """The number of classes, when there is a label for each image and two classes or more."""
    for part, images, labels in (("train", train, train_labels), ("test", test, test_labels)):
        if len(images) != len(labels) or len(images) == 0:
            raise DataError(f"{len(images)} {part} images but {len(labels)} labels: give one per image")
        if int(labels.min()) < 0:
            raise DataError(f"{part} labels go down to {int(labels.min())}: leave unlabelled images out")
    known = set(train_labels.tolist())
    if len(known) < 2:
        raise DataError(f"all {len(train)} train images have one label: a probe needs two classes")
    if missing := set(test_labels.tolist()) - known:
        raise DataError(f"test has classes that train lacks: {sorted(missing)[:5]}")
    return max(known) + 1
