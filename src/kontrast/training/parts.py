"""All the images that a run reads: those it trains on, and those that its probes go by."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import NamedTuple

from kontrast import distributed
from kontrast.data import ImageSet, Lazy
from kontrast.data.sources import SOURCES
from kontrast.settings import DataSettings, Recipe
from kontrast.training.run import open_split


class Parts(NamedTuple):
    """trained: what is trained on; source: the same before a label imbalance takes from it; train, test: what the
    probes read, where there is any to hold out."""

    trained: ImageSet
    source: ImageSet
    train: ImageSet
    test: ImageSet | None

    @property
    def watched(self) -> list[ImageSet]:
        """Each image once, whichever part it is in today."""
        if self.source.split == "all":
            return [self.source]
        parts = {part.split: part for part in (self.source, self.train, self.test) if part is not None}
        return list(parts.values())


def open_parts(recipe: Recipe, data: DataSettings, trained: ImageSet) -> Parts:
    """The rest of the images, on every rank: all of them must find out alike that a part can't be read.

    data: the recipe's, with the place where its images lie. Of a named set, which comes as one, only what is needed.
    """
    evaluated, seed = bool(recipe.evaluation.every), recipe.seed
    if not (evaluated and distributed.is_main()):
        data = replace(data, overlay_digits=0, random_bits=0)  # nobody looks at the pictures
    source = train = trained
    if data.imbalance != "none":
        source = train = open_split(replace(data, imbalance="none"), "train", seed=seed, pretraining=True)
    if evaluated and data.split != "train":  # its labels may be missing, or it is of other images
        train = open_split(data, "train", seed=seed)
    test = None
    if trained.has_test and (evaluated or data.source not in SOURCES):
        test = open_split(data, "test", seed=seed, beside=train.bad)
    return Parts(trained, source, train, test)


def share_bad(trained: ImageSet) -> None:
    """What any rank found bad counts on all: of images that are decoded as they are needed each sees its share alone.
    Refused on all ranks alike where it is too much."""
    if isinstance(trained.base, Lazy) and distributed.world() > 1:
        reader = trained.base.reader
        for said in distributed.everyone_says(json.dumps(reader.bad)):
            reader.learn((name, reason) for name, reason in json.loads(said))
        reader.check()
