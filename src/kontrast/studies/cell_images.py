"""The images that the cells of a comparison or an audit saw: the same ones in all, or their numbers can't be compared.

A set's fingerprint is of its files' names, sizes and dates, or of its names and labels where it has no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kontrast.data import ImageSet
from kontrast.registry import DataError
from kontrast.settings import DataSettings, Recipe
from kontrast.training.folder import RunFolder
from kontrast.training.run import open_split

Marks = dict[str, str | None]
TRAINED = "trained"


def marks_of(train: ImageSet, test: ImageSet | None) -> Marks:
    """The fingerprints that a cell's record keeps: of both parts that probes read."""
    return {"train": train.fingerprint, "test": None if test is None else test.fingerprint}


def images_at_hand(recipes: Sequence[Recipe]) -> list[Marks]:
    """For each recipe the fingerprints of its images as they are now, those it trains on among them."""
    known: dict[DataSettings, Marks] = {}
    made = []
    for recipe in recipes:
        data = replace(recipe.data, random_bits=0, overlay_digits=0)  # laid over the images, they are no other images
        if data not in known:
            known[data] = read_marks(data)
        made.append(known[data])
    return made


def read_marks(data: DataSettings) -> Marks:
    train = open_split(data, "train")
    test = open_split(data, "test", beside=train.bad) if train.has_test else None
    plain = data.split == "train" and data.imbalance == "none"
    trained = train if plain else open_split(data, "train", pretraining=True)
    return {**marks_of(train, test), TRAINED: trained.fingerprint}


def refuse_other_images(folder: Path, record: dict[str, Any] | None, now: Marks) -> None:
    """Refuse a cell that saw other images than there are now: by its record, and by its run's own note. What an older
    version left without fingerprints is taken as it is."""
    before: Marks = dict((record or {}).get("images") or {})
    noted = RunFolder(folder).info().get("data") if RunFolder(folder).holds_run else None
    if isinstance(noted, dict):
        before[TRAINED] = noted.get("fingerprint")
    other = [part for part in now if before.get(part) not in (None, now[part])]
    if other:
        part = "test" if other == ["test"] else "train"
        raise DataError(
            f"{folder} was run on other {part} images than there are now, so it can't be compared with new runs: put "
            "the images back as they were, or give another --out to run all on the new ones"
        )
