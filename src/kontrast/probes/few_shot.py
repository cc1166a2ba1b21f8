"""Few-shot probes: train on n images per class, repeat over seeds. N train images, T test images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean as mean
from typing import Any

import torch
from torch import Tensor

from kontrast.errors import DataError, UsageError
from kontrast.probes.intervals import over_seeds, within_one
from kontrast.probes.logistic import logistic
from kontrast.probes.result import ProbeResult


def few_per_class(labels: Tensor, shots: int, seed: int, classes: Sequence[str] | None = None) -> Tensor:
    """Draw the indices of `shots` images of every class without replacement.

    Args:
        labels: integers [N].
        shots: images per class.
        seed: seed of the draw.
        classes: names of the labels, for an error message.

    Example:
        >>> labels = torch.tensor([0, 0, 0, 1, 1])
        >>> labels[few_per_class(labels, shots=2, seed=0)]
        tensor([0, 0, 1, 1])
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for label in torch.unique(labels).tolist():
        rows = (labels.cpu() == label).nonzero()[:, 0]
        if len(rows) < shots:
            name = repr(classes[label]) if classes else label
            raise DataError(
                f"class {name} has {len(rows)} train images, but a few-shot probe needs {shots} per class: "
                "add images or leave the class out"
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
    """Train a probe on a few images per class and average its test accuracy over seeds.

    Args:
        train: train features [N,F].
        train_labels: integers [N].
        test: test features [T,F].
        test_labels: integers [T].
        shots: train images per class, default 5.
        seeds: one draw of train images per seed, default three.
        probe: the probe to train, called as probe(train, labels, test, labels, seed=...). Default: `logistic`. To
            fine-tune, pass `functools.partial(finetune, encoder)`, and images or an image set instead of features.
        classes: names of the labels, for an error message.

    Returns:
        The mean accuracy with Student's 95% interval over the seeds. A setting of the protocol that differs between
        them, such as C or the number of iterations, is a list with a value per seed.

    Example:
        >>> y = torch.arange(40) % 2
        >>> few_shot(torch.eye(2)[y], y, torch.eye(2)[y], y, shots=3).accuracy
        1.0
    """
    if shots < 1 or not seeds:
        raise UsageError(f"shots = {shots}, seeds = {list(seeds)}: give at least one shot and one seed")
    runs, train_labels = [], torch.as_tensor(train_labels)
    for seed in seeds:
        rows = few_per_class(train_labels, shots, seed, classes)
        few = train.subset(rows) if hasattr(train, "subset") else train[rows]
        runs.append(probe(few, train_labels[rows], test, test_labels, seed=seed))
    values = [r.accuracy for r in runs]
    protocol = {"shots": shots, "seeds": list(seeds), "probe": runs[0].probe, **per_seed([r.protocol for r in runs])}
    interval, extra = within_one(over_seeds(values)), {"accuracies": values}
    if interval is None:
        note = "one seed: no interval over seeds"
        return replace(runs[0], probe="few-shot", protocol=protocol, note=note, extra=extra)
    fives = [run.top5 for run in runs if run.top5 is not None]
    per_class = [
        {**rows[0], "accuracy": mean([row["accuracy"] for row in rows])}
        for rows in zip(*(run.per_class for run in runs))
    ]
    return ProbeResult(
        "few-shot", mean(values), *interval, runs[0].n, protocol, seeds[0], over="seeds", extra=extra,
        top5=mean(fives) if fives else None, mean_per_class=mean([row["accuracy"] for row in per_class]),
        per_class=per_class,
    )  # fmt: skip


def per_seed(protocols: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the settings that all seeds share, and a list with a value per seed of the others."""
    found = {key: [protocol[key] for protocol in protocols] for key in protocols[0]}
    return {key: values if any(v != values[0] for v in values) else values[0] for key, values in found.items()}
