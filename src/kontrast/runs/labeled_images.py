"""Labeled images to train a classifier on and to test it on, and the unlabeled rest. Label -1 means none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kontrast.config.recipe import DataSettings
from kontrast.data import ImageSet, read_labels
from kontrast.data.bad_images import skipped
from kontrast.data.labels import labels_of, unknown_names
from kontrast.errors import DataError
from kontrast.runs.run import Run
from kontrast.training.splits import open_split


@dataclass(frozen=True)
class LabeledSets:
    """Images to train on (all labeled), to test on (labeled, or None), and the rest, with the names of the classes."""

    train: ImageSet
    test: ImageSet | None
    others: ImageSet
    classes: list[str]

    @property
    def labels(self) -> Tensor:
        assert self.train.labels is not None
        return self.train.labels


def open_labeled(
    run: Run, data: str | None, labels: str | None, max_bad: float | None, say: Callable[[str], None]
) -> tuple[DataSettings, LabeledSets]:
    """Open the images, read their labels, and tell labeled from unlabeled ones."""
    settings = replace(run.settings_for(data), split="train", imbalance="none")
    if max_bad is not None:
        settings = replace(settings, max_bad=max_bad)
    if labels is not None:
        settings = replace(settings, test_share=0.0)  # few labels are all needed for training
    train = run.check_channels(open_split(settings, "train", seed=run.recipe.seed))
    test = None
    if train.has_test:
        test = run.check_channels(open_split(settings, "test", seed=run.recipe.seed, other_bad=train.bad))
    for part in (train, test):
        if part is not None and part.bad:
            say(skipped(part.bad, part.total, f"{part.split} images"))
    if labels is not None:
        known = {name for part in (train, test) if part is not None for name in (*part.names, *dict(part.bad))}
        given = labels_of(labels, known, some=True)
        if test is not None:
            test = read_labels(test, labels, some=True) if any(name in given for name in test.names) else None
        train = read_labels(train, labels, some=True)
        if line := unknown_names(labels, known):
            say(line)
    if train.labels is None:
        raise DataError(
            f"{train.name} has no labels: give class sub-folders, or --labels CSV with the columns file,label"
        )
    return settings, split_labeled(train, test if test is not None and test.labels is not None else None)


def split_labeled(train: ImageSet, test: ImageSet | None) -> LabeledSets:
    """Number the classes that have train images from 0, and separate the unlabeled images (label -1)."""
    assert train.labels is not None
    present = torch.unique(train.labels[train.labels >= 0])
    names = [train.classes[i] if train.classes else str(i) for i in present.tolist()]
    if len(present) < 2:
        found = f"only the class {names[0]!r}" if names else "no label"
        raise DataError(f"the images of {train.name} have {found}: a classifier needs two classes or more")

    def labeled(part: ImageSet) -> ImageSet:
        assert part.labels is not None
        rows = (part.labels >= 0).nonzero()[:, 0]
        return replace(part.subset(rows), labels=torch.searchsorted(present, part.labels[rows]), classes=names)

    if test is not None:
        assert test.labels is not None
        known = test.labels[test.labels >= 0]
        unknown = known[~torch.isin(known, present)].unique().tolist()
        if unknown:
            name = train.classes[unknown[0]] if train.classes else unknown[0]
            raise DataError(
                f"the test images of {train.name} have the label {name!r}, which no train image has: add some"
            )
        test = labeled(test) if len(known) else None
    others = train.subset((train.labels < 0).nonzero()[:, 0])
    return LabeledSets(labeled(train), test, others, names)
